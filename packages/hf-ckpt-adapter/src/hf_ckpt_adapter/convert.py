"""Convert a checkpoint into another layout, and publish the result as a whole folder.

Every conversion is the same three steps: open a source, plan, move rows into files. What differs is the kind
of file (`_HubFolder`, `_DcpFolder`) and the small files beside the weights.

Peak memory is a fixed part (the interpreter and torch), plus (POOL + 2) x max(BLOCK, the widest row) for
blocks (10 MiB, see `stream.py`), plus about 2 kB for each tensor name. It does not depend on the size of the
model or of a tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from .assets import asset_files, config_bytes, load_config
from .formats.dcp_write import SavedChunk, chunk_starts, metadata_bytes
from .formats.files import ASSETS, INDEX, METADATA, SIDE_FILE, chunk_file, shard_file
from .formats.safetensors import header_bytes, index_bytes, split_shards, tensor_order
from .formats.staging import Staging
from .formats.tensors import TensorInfo, TensorSource, dtype_named
from .formats.torch_zip import tensor_zip
from .names.table import Layout
from .plan import Options, Output, Plan, make_plan
from .report import Report
from .side_state import read_side_state, side_file_bytes, tensor_bytes
from .sources import assets_of, find, open_source
from .stream import stream

__all__ = ["Progress", "convert_checkpoint", "export_step"]

Progress = Callable[[int, int], None]
"""Called with tensor bytes done and in all."""


def convert_checkpoint(
    source: Path | str,
    out: Path | str,
    layout: Layout | str,
    *,
    options: Options | None = None,
    assets: Path | str | None = None,
    overwrite: bool = False,
    write_once: bool = False,
    follow_symlinks: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Convert a checkpoint to `layout`: Hub layouts become a Hugging Face folder, the others a DCP folder.

    No model is built and no accelerator touched; the folder appears whole or not at all, and a run that was
    interrupted is continued by the next one with the same arguments.

    Args:
        source: a Hugging Face folder, Hub id or cache snapshot, or a DCP step folder saved on any number of
            ranks.
        out: the folder to make.
        layout: `per-expert` or `fused` (Hub), `native`, `native-wqkv` or `backend` (TorchTitan DCP).
        options: dtype, expert layout, ties, padding, shard size; see `Options`.
        assets: a folder with config.json and tokenizer instead of the checkpoint's own.
        overwrite: replace `out` if it is there and holds nothing but a checkpoint.
        write_once: for mounts without rename: write in place, the completeness marker last.
        follow_symlinks: trust links that lead out of the source folder.
        progress: told the bytes done and the bytes in all, after each block.

    Raises:
        FileNotFoundError: no checkpoint, no config, or files missing from it.
        ValueError: tensors that do not make up the model in config.json, or hostile files.
        FileExistsError: `out` is there.
        BlockingIOError: another process is writing `out`.
    """
    begun = time.monotonic()
    folder, out, layout, options = find(source), Path(out), Layout(layout), options or Options()
    assets_dir = Path(assets) if assets is not None else assets_of(folder, follow_symlinks=follow_symlinks)
    config = load_config(assets_dir, follow_symlinks=follow_symlinks)
    opened = open_source(folder, follow_symlinks=follow_symlinks)
    try:
        plan = make_plan(opened, config, layout, options)
        side = read_side_state(opened, plan.reading, folder, follow_symlinks=follow_symlinks)
        plan.check_side(side)
        staging = Staging(out, _fingerprint(folder, plan, options), overwrite=overwrite, write_once=write_once)
        report = _begin_report(folder, out, opened, plan)
        try:
            kind = _HubFolder if plan.to_hub else _DcpFolder
            kind(staging, plan, options, report, side, assets_dir, follow_symlinks).write(opened, progress)
        except BaseException:
            staging.abandon()
            raise
    finally:
        opened.close()
    report.seconds = time.monotonic() - begun
    return report


def export_step(
    step_dir: Path | str,
    out: Path | str,
    *,
    dtype: str | torch.dtype | None = None,
    options: Options | None = None,
    assets: Path | str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Export a TorchTitan checkpoint step to a Hugging Face folder that Transformers and servers load.

    The step folder is enough: its `assets/` has config.json, generation config and tokenizer.

    Args:
        step_dir: `checkpoint/step-N`.
        out: the folder to make.
        dtype: `bfloat16`, `float32`, ...; None means what config.json says.
        options: see `Options`; its `experts` chooses the expert layout.
        assets, overwrite, progress: as `convert_checkpoint` has them.

    Raises:
        As `convert_checkpoint`, which has a few more settings.
    """
    options = options or Options()
    if dtype is not None:
        options = replace(options, dtype=dtype_named(dtype) if isinstance(dtype, str) else dtype)
    layout = Layout.FUSED if options.experts == "fused" else Layout.PER_EXPERT
    return convert_checkpoint(
        step_dir, out, layout, options=options, assets=assets, overwrite=overwrite, progress=progress
    )


def _fingerprint(folder: Path, plan: Plan, options: Options) -> str:
    """What is written from what: every output with its reads, and the identity of every source file."""
    files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir() if p.is_file()]
    digest = hashlib.sha256(json.dumps([os.path.realpath(folder), sorted(files)]).encode())
    digest.update(json.dumps([plan.layout, plan.config, plan.tie, str(options)], default=str).encode())
    for output in plan.outputs:
        digest.update(f"{output.name} {output.info} {output.stored}".encode())
        digest.update(" ".join(f"{r.tensor}:{r.row}:{r.rows}" for r in output.reads).encode())
    return digest.hexdigest()


def _begin_report(folder: Path, out: Path, source: TensorSource, plan: Plan) -> Report:
    return Report(
        source=str(folder),
        out=str(out),
        layout=plan.layout.value,
        dtype=", ".join(sorted({str(o.info.dtype).removeprefix("torch.") for o in plan.outputs})),
        tensors_read=len(source.tensors) - len(plan.reading.side),
        tensors_written=len(plan.outputs) + len(plan.aliases),
        cast=plan.cast,
        missing=plan.missing,
        dropped=plan.reading.dropped,
        trimmed=plan.trimmed,
        left_out=dict(source.left_out),
        warnings=list(plan.notes),
    )


class _Folder:
    """What the two kinds of output share: files of tensors, each kept if an earlier run finished it."""

    kind = ""

    def __init__(
        self,
        staging: Staging,
        plan: Plan,
        options: Options,
        report: Report,
        side: dict[str, torch.Tensor],
        assets_dir: Path,
        follow_symlinks: bool,
    ) -> None:
        self.staging, self.plan, self.report, self.side = staging, plan, report, side
        self.assets_dir, self.follow_symlinks = assets_dir, follow_symlinks
        self.by_name = {o.name: o for o in plan.outputs}
        self.sizes = {o.name: o.info.nbytes for o in plan.outputs}
        shards = split_shards(self.sizes, options.max_shard_bytes)
        self.files = dict(zip(self.file_names(len(shards)), shards, strict=True))
        report.files = list(self.files)

    def file_names(self, count: int) -> list[str]:
        raise NotImplementedError

    def write_file(self, name: str, outputs: list[Output], source: TensorSource, count: Callable[[int], None]) -> None:
        raise NotImplementedError

    def write_rest(self) -> None:
        raise NotImplementedError

    def write(self, source: TensorSource, progress: Progress | None) -> None:
        """Write every file that is not there yet, then what belongs beside them, then publish."""
        total, done = sum(self.sizes.values()), 0

        def count(written: int) -> None:
            nonlocal done
            done += written
            self.report.bytes_written += written
            if progress is not None:
                progress(done, total)

        for name, tensors in self.files.items():
            if name in self.staging.done:
                kept = sum(self.sizes[t] for t in tensors)
                done += kept
                self.report.bytes_resumed += kept
                continue
            order = tensor_order({t: self.by_name[t].info for t in tensors})
            self.write_file(name, [self.by_name[t] for t in order], source, count)
        self.write_rest()
        self.staging.commit(
            {
                "format": 1,
                "kind": self.kind,
                "layout": self.plan.layout.value,
                "tensors": {t: s for n in self.staging.done.values() for t, s in n["sums"].items()},
            }
        )

    def write_assets(self, folder: str) -> None:
        """config.json as the weights now are, and copies of generation config and tokenizer."""
        prefix = f"{folder}/" if folder else ""
        with self.staging.file(prefix + "config.json") as file:
            file.write(config_bytes(self.plan.config, dtype=self.plan.dtype, tie=self.plan.tie))
        for name, path in asset_files(self.assets_dir, follow_symlinks=self.follow_symlinks):
            with self.staging.file(prefix + name) as file, open(path, "rb") as original:
                while data := original.read(1 << 20):
                    file.write(data)


class _HubFolder(_Folder):
    """safetensors files, their index, config and tokenizer; native-only state in a side file."""

    kind = "hub"

    def file_names(self, count: int) -> list[str]:
        return [shard_file(i, count) for i in range(1, count + 1)]

    def write_file(self, name: str, outputs: list[Output], source: TensorSource, count: Callable[[int], None]) -> None:
        sums = {}
        with self.staging.file(name) as file:
            file.write(header_bytes({o.name: o.info for o in outputs}))
            for block in stream(source, outputs):
                file.write(block.data)
                count(len(block.data))
                if block.checksum is not None:
                    sums[block.output.name] = block.checksum
        self.staging.note(name, {"sums": sums})

    def write_rest(self) -> None:
        if self.side:
            with self.staging.file(SIDE_FILE) as file:
                file.write(side_file_bytes(self.side))
            self._report_side_state()
        with self.staging.file(INDEX) as file:
            file.write(index_bytes(self.files, self.sizes))
        self.write_assets("")

    def _report_side_state(self) -> None:
        self.report.side_state = {
            name: float(t.double().abs().max()) if t.numel() else 0.0 for name, t in self.side.items()
        }
        biased = {n: v for n, v in self.report.side_state.items() if n.endswith("expert_bias_E") and v != 0}
        if biased:
            worst = max(biased, key=lambda n: biased[n])
            self.report.warnings.append(
                f"{len(biased)} layers route with a non-zero expert bias (up to {biased[worst]:.6g}, "
                f"{worst}). Hugging Face has no place for it: the exported model routes without. It is "
                f"kept in {SIDE_FILE}."
            )


class _DcpFolder(_Folder):
    """Files of tensor chunks, `.metadata`, and an `assets/` folder from which it can be exported again."""

    kind = "dcp"

    def file_names(self, count: int) -> list[str]:
        return [chunk_file(i) for i in range(count)]

    def write_file(self, name: str, outputs: list[Output], source: TensorSource, count: Callable[[int], None]) -> None:
        sums: dict[str, str] = {}
        chunks: dict[str, list[tuple[int, int, int, int]]] = {}
        with self.staging.file(name) as file:
            blocks = stream(source, outputs)
            offset = 0
            for output in outputs:
                left: memoryview | None = None
                for start, length in chunk_starts(output.info):
                    shape = (length, *output.info.shape[1:]) if output.info.shape else ()
                    want = torch.Size(shape).numel() * output.info.dtype.itemsize
                    with tensor_zip(file, output.info.dtype, shape) as (write, written):
                        while want:
                            if left is None:
                                block = next(blocks)
                                assert block.output is output, (block.output.name, output.name)
                                left = block.data
                                if block.checksum is not None:
                                    sums[output.name] = block.checksum
                            part, left = left[:want], left[want:] if len(left) > want else None
                            write(part)
                            want -= len(part)
                            count(len(part))
                    chunks.setdefault(output.name, []).append((start, length, offset, written()))
                    offset += written()
            assert next(blocks, None) is None
        self.staging.note(name, {"sums": sums, "chunks": chunks})

    def write_rest(self) -> None:
        infos = {o.name: o.info for o in self.plan.outputs}
        chunks = {
            tensor: [SavedChunk(start, count, file, offset, length) for start, count, offset, length in boxes]
            for file, note in self.staging.done.items()
            for tensor, boxes in note["chunks"].items()
        }
        side = self.plan.side_names(self.side)
        if side:
            name, offset = chunk_file(len(self.files)), 0
            with self.staging.file(name) as file:
                for tensor, value in side.items():
                    info = TensorInfo(value.dtype, tuple(value.shape))
                    with tensor_zip(file, info.dtype, info.shape) as (write, written):
                        write(memoryview(tensor_bytes(value)))
                    infos[tensor] = info
                    count = info.shape[0] if info.shape else 1
                    chunks[tensor] = [SavedChunk(0, count, name, offset, written())]
                    offset += written()
        self.write_assets(ASSETS)
        with self.staging.file(METADATA) as file:
            file.write(metadata_bytes(infos, chunks, self.plan.aliases))
