"""Any checkpoint as a DCP one: what a trainer needs to start from a Hugging Face folder without converting it first.

    dcp.load(model.state_dict(), storage_reader=CheckpointReader("Qwen/Qwen3-4B", Layout.NATIVE))

DCP asks each rank for the boxes that its shards need, and only their rows are read: experts of other ranks stay on
disk, and no rank ever holds a whole model. The same table, checks and ties as a conversion of the folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from .config import load_config
from .names.table import HUB_LAYOUTS, Layout
from .options import Options
from .plan import Output, Read
from .planning import make_plan
from .side_state import check_side, read_side_state, side_names
from .sources import assets_of, find, open_source
from .stream import blocks, cast_into, different_head
from .vocabulary import refuse_trained_rows

__all__ = ["CheckpointReader"]


class CheckpointReader(StorageReader):
    """Reads `source` as if it had been saved in `layout`.

    Args:
        source: a Hugging Face folder in either expert layout, a Hub id or cache snapshot, or a DCP step folder.
        layout: `native`, `native-wqkv` or `backend`.
        options: ties, padding and the like, as for a conversion; the dtype is that of the tensors loaded into.
        follow_symlinks: trust links that lead out of the source folder.

    Native-only state (expert bias) that the source lacks reads as zeros, as in a conversion. `zeros` has the names of
    what is zero, stored or not: a model without such state computes the same.

    Raises:
        FileNotFoundError: no checkpoint or no config there.
        ValueError: a Hub layout asked for, tensors that do not make up the model in config.json, hostile files; while
            loading: a tied head that differs from the embedding, a number that the target's dtype cannot hold.
    """

    def __init__(
        self,
        source: Path | str,
        layout: Layout | str,
        *,
        options: Options | None = None,
        follow_symlinks: bool = False,
    ) -> None:
        layout = Layout(layout)
        if layout in HUB_LAYOUTS:
            raise ValueError(f"layout is {layout.value!r}: DCP loads into TorchTitan's names (native or backend)")
        folder = find(source)
        config = load_config(assets_of(folder, follow_symlinks=follow_symlinks), follow_symlinks=follow_symlinks)
        self._source = open_source(folder, follow_symlinks=follow_symlinks)
        plan = make_plan(self._source, config, layout, options or Options())
        refuse_trained_rows(self._source, plan, options or Options())
        side = read_side_state(self._source, plan.reading, folder, follow_symlinks=follow_symlinks)
        check_side(side, plan)
        self.config = plan.config
        self._side = side_names(side, plan)
        self.zeros = {name for name, tensor in self._side.items() if not tensor.any()}
        self._outputs = {output.name: output for output in plan.outputs}
        self._outputs.update({name: self._outputs[target] for name, target in plan.aliases.items()})

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Every tensor of the layout, each as one chunk."""
        stored = {name: (o.stored, o.info.shape) for name, o in self._outputs.items()}
        stored |= {name: (t.dtype, tuple(t.shape)) for name, t in self._side.items()}
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=dtype),
                    torch.Size(shape),
                    [ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))],
                )
                for name, (dtype, shape) in stored.items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the boxes that this rank's plan asks for."""
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            if item.storage_index.fqn in self._side:
                target.copy_(_box(self._side[item.storage_index.fqn], item))
            else:
                self._read(self._outputs[item.storage_index.fqn], item, target)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, output: Output, item: ReadItem, target: torch.Tensor) -> None:
        """Fill `target` with the box of `item`: rows of the leading dimensions, then columns of them."""
        columns = slice(0, 1)
        leading = list(zip(item.storage_offsets, item.lengths, output.info.shape, strict=True))
        if len(leading) > 1:
            first, length, _ = leading.pop()
            columns = slice(first, first + length)
        row = 0
        cpu = torch.empty(tuple(item.lengths), dtype=target.dtype) if target.device.type != "cpu" else target
        # A box of [E, F, D] that takes some rows of each expert is one run of rows for each expert.
        flat = cpu if cpu.is_contiguous() else torch.empty(cpu.shape, dtype=cpu.dtype)
        flat_rows = flat.view(math.prod(n for _, n, _ in leading), -1)
        for start, rows in _row_runs(leading):
            reads = _slice(output.reads, start, rows)
            others = blocks(self._source, output, _slice(output.witness, start, rows))
            for _, tensor in blocks(self._source, output, reads):
                other = next(others, (None, tensor[:0]))[1]  # padding has no witness
                if not torch.equal(other.view(torch.uint8), tensor[: len(other)].view(torch.uint8)):
                    gap = (tensor[: len(other)].double() - other.double()).abs().max()
                    raise different_head(output, float(gap))
                cast_into(flat_rows[row : row + len(tensor)], tensor[:, columns], output.name)
                row += len(tensor)
        assert row == len(flat_rows), (output.name, row, len(flat_rows))
        if flat is not target:
            target.copy_(flat)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between loads."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing has to be set up: the source is open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are: every rank reads for itself."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any id will do, since none is used."""
        return True

    def close(self) -> None:
        """Close open files."""
        self._source.close()


def _box(tensor: torch.Tensor, item: ReadItem) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _row_runs(box: list[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """(first row, rows) of a box of leading dimensions (offset, length, size), neighbouring runs joined."""
    (start, length, _), *rest = box
    if not rest:
        yield start, length
        return
    inner = math.prod(n for _, _, n in rest)
    if all(offset == 0 and n == whole for offset, n, whole in rest):
        yield start * inner, length * inner
        return
    for index in range(start, start + length):
        for first, rows in _row_runs(rest):
            yield index * inner + first, rows


def _slice(reads: Iterable[Read], row: int, rows: int) -> tuple[Read, ...]:
    """The reads that give rows [row, row + rows) of an output."""
    result, begin, end = [], 0, row + rows
    for read in reads:
        first, last = max(row, begin), min(end, begin + read.rows)
        if first < last:
            result.append(Read(read.tensor, read.row + first - begin, last - first))
        begin += read.rows
    return tuple(result)
