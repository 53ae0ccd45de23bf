"""A conversion as data: what will be read and what will be written, known before a byte is read.

`planning.py` makes a plan, `stream.py` moves the rows that it lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .formats.tensors import TensorInfo
from .names.read import Reading
from .names.table import HUB_LAYOUTS, Layout
from .names.write import Target
from .sizes import Sizes

__all__ = ["Output", "Plan", "Read", "resolve"]


@dataclass(frozen=True)
class Read:
    """The next `rows` rows: of stored tensor `tensor` from `row` on, or zeros when `tensor` is None."""

    tensor: str | None
    row: int
    rows: int


@dataclass(frozen=True)
class Output:
    """A tensor to write, and the reads that fill it. `witness` are reads of rows that must be equal to them."""

    name: str
    info: TensorInfo
    stored: torch.dtype
    reads: tuple[Read, ...]
    witness: tuple[Read, ...] = ()


@dataclass
class Plan:
    """A whole conversion. `aliases` are names that share another output's bytes (a tied head in DCP)."""

    layout: Layout
    config: dict[str, Any]
    tie: bool
    dtype: torch.dtype | None
    reading: Reading
    expert_layouts: dict[int, str] = field(default_factory=dict)  # layer -> layout, where each has its own
    sizes: Sizes = field(default_factory=Sizes)
    outputs: list[Output] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    trimmed: dict[str, int] = field(default_factory=dict)
    cast: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def layout_name(self) -> str:
        """The layout for reports; both names where layers differ."""
        return " and ".join(sorted(set(self.expert_layouts.values()))) or self.layout.value

    @property
    def to_hub(self) -> bool:
        """Whether the layout is one of Hugging Face's."""
        return self.layout in HUB_LAYOUTS


def resolve(target: Target, reading: Reading) -> tuple[Read, ...]:
    """Turn a target's pieces of parts into reads of stored tensors.

    Args:
        target: what is written.
        reading: where the rows of each part lie.

    Returns:
        Reads in order, neighbouring ones merged.
    """
    reads: list[Read] = []

    def add(tensor: str | None, row: int, rows: int) -> None:
        last = reads[-1] if reads else None
        if last and last.tensor == tensor and (tensor is None or last.row + last.rows == row):
            reads[-1] = Read(tensor, last.row, last.rows + rows)
        elif rows:
            reads.append(Read(tensor, row, rows))

    for piece in target.pieces:
        if piece.part is None:
            add(None, 0, piece.rows)
            continue
        row, left = piece.row, piece.rows
        for run in reading.runs[piece.part]:
            if left and run.part_row <= row < run.part_row + run.rows:
                take = min(left, run.part_row + run.rows - row)
                add(run.tensor, run.row + row - run.part_row, take)
                row, left = row + take, left - take
        assert left == 0, (target.name, piece, reading.runs[piece.part])
    return tuple(reads)
