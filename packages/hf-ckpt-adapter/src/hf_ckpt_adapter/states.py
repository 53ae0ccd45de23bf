"""Convert a state dict that is already in memory: what a trainer's state-dict adapter needs.

The same table as for files. Tensors that are only renamed keep their identity (no copy, DTensors stay
sharded); folded ones are new. The dict that comes in is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .names.read import Reading, read_names
from .names.table import EMBED, HEAD, HUB_LAYOUTS, Layout
from .names.write import Target, write_names
from .plan import resolve
from .planning import refuse_unexpected

__all__ = ["Converted", "convert_state"]


@dataclass
class Converted:
    """The state in its new layout. `side` is native-only state by native name, `dropped` are computed buffers."""

    tensors: dict[str, torch.Tensor]
    side: dict[str, torch.Tensor] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


def convert_state(
    state: Mapping[str, torch.Tensor],
    layout: Layout,
    *,
    tied: bool = False,
    dialect: str | None = None,
) -> Converted:
    """Rename and refold `state` into `layout`. A fragment (one pipeline stage) is fine.

    Args:
        state: any dialect, any expert layout; not changed.
        layout: the layout of the result.
        tied: the model ties head and embedding: the result has no head in a Hub layout, and the embedding
            under both names (the same tensor) in a TorchTitan layout.
        dialect: `hub` or `native`, when `state` may hold no layer to tell them apart.

    Returns:
        The tensors by their new names. A DTensor that must be unfolded is gathered, which every rank of its mesh has to
        take part in.

    Raises:
        ValueError: names that the table does not know (all counted, five shown), adapters, collisions,
            experts that are not all there, a tied head that is not the embedding.
    """
    reading = read_names({name: tuple(t.shape) for name, t in state.items()}, dialect=dialect)
    refuse_unexpected(reading)
    parts = dict(reading.parts)
    hub = layout in HUB_LAYOUTS
    if tied and HEAD in parts and EMBED not in parts:
        parts[EMBED], reading.runs[EMBED] = parts[HEAD], reading.runs[HEAD]
    if tied:
        if HEAD in parts and EMBED in parts:
            _refuse_different_head(*(state[reading.runs[part][0].tensor] for part in (HEAD, EMBED)))
        parts.pop(HEAD, None)
        if not hub and EMBED in parts:
            parts[HEAD], reading.runs[HEAD] = parts[EMBED], reading.runs[EMBED]
    gathered: dict[str, torch.Tensor] = {}
    result = Converted({}, dropped=reading.dropped)
    for target in write_names(parts, layout):
        result.tensors[target.name] = _build(target, reading, state, gathered)
    result.side = {name: state[stored] for name, stored in reading.side.items()}
    return result


def _refuse_different_head(head: torch.Tensor, embed: torch.Tensor) -> None:
    """A tied head is the embedding; of shards, those of this rank are compared."""
    if head is embed or head.is_meta or embed.is_meta:
        return
    if head.shape == embed.shape and head.dtype == embed.dtype:
        one, other = (t.to_local() if hasattr(t, "to_local") else t for t in (head, embed))
        if one.shape != other.shape or one.data_ptr() == other.data_ptr():  # sharded in two ways, or one tensor
            return
        if torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)):
            return
    raise ValueError(
        f"the model ties lm_head to the embedding, but in this state they differ: {list(head.shape)} {head.dtype} and "
        f"{list(embed.shape)} {embed.dtype}. Remove the head, or convert as untied."
    )


def _build(
    target: Target, reading: Reading, state: Mapping[str, torch.Tensor], gathered: dict[str, torch.Tensor]
) -> torch.Tensor:
    """One tensor of the result: the stored tensor itself where it is that, else joined from rows."""
    reads = resolve(target, reading)
    tensors = [read.tensor for read in reads if read.tensor is not None]
    if len(reads) == 1 and tuple(state[tensors[0]].shape) == target.shape:
        return state[tensors[0]]
    rows = [
        _rows(tensor, state, gathered)[read.row : read.row + read.rows]
        for tensor, read in zip(tensors, reads, strict=True)
    ]
    return torch.cat(rows).reshape(target.shape)


def _rows(name: str, state: Mapping[str, torch.Tensor], gathered: dict[str, torch.Tensor]) -> torch.Tensor:
    """A stored tensor with its leading dimensions flattened, gathered if it is sharded."""
    if name not in gathered:
        tensor = state[name]
        whole = getattr(tensor, "full_tensor", None)
        tensor = whole() if whole is not None else tensor
        gathered[name] = tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor
    return gathered[name]
