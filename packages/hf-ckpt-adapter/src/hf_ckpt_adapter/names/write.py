"""Write by the table: which tensors of a layout hold these parts, and in which order do their rows come?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from .order import abstract, natural
from .rows import Piece, Shape, rows_of
from .table import BACKEND_ROOT, HUB_LAYOUTS, Q_NORM, SPELLINGS, Layout, Op, Spelling

__all__ = ["Target", "write_names"]


@dataclass(frozen=True)
class Target:
    """A tensor to write: its name, shape, and the pieces that make it up in order."""

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]


def write_names(
    parts: Mapping[str, Shape], layout: Layout, *, expert_layouts: Mapping[int, str] | None = None
) -> list[Target]:
    """The tensors of a layout that together hold exactly `parts`.

    Args:
        parts: part name -> shape, as `Reading.parts` has them.
        layout: the target's layout.
        expert_layouts: layer -> `per-expert` or `fused`, to override the layout of experts layer by layer.

    Returns:
        Targets in the order of the forward pass.

    Raises:
        ValueError: experts of a layer missing in the middle, or of unequal shape; parts that no line of the table can
            hold in this layout.
    """
    writer = _Writer(parts, BACKEND_ROOT if layout is Layout.BACKEND else "")
    for layer in sorted({int(numbers[0]) for _, numbers in map(abstract, parts) if numbers}):
        wanted = (expert_layouts or {}).get(layer)
        for spelling in _lines(Layout(wanted) if wanted and layout in HUB_LAYOUTS else layout):
            if "{}" in spelling.name:
                writer.write(spelling, str(layer))
    for spelling in _lines(layout):
        if "{}" not in spelling.name:
            writer.write_part(spelling)
    if writer.left:
        shown = f"{sorted(writer.left)[:5]} ({len(writer.left)} in all)"
        raise ValueError(f"no name in layout {layout.value!r} for {shown}")
    return sorted(writer.targets, key=lambda t: natural(t.name.removeprefix(writer.root)))


@cache
def _lines(layout: Layout) -> tuple[Spelling, ...]:
    """The lines of the table by which a layout is written."""
    return tuple(s for s in SPELLINGS if layout in s.layouts and s.op not in (Op.SIDE, Op.DROP))


class _Writer:
    """Targets made so far, and the parts that are left; `experts` is (pattern, layer) -> expert -> part."""

    def __init__(self, parts: Mapping[str, Shape], root: str) -> None:
        self.parts, self.root = parts, root
        self.left = set(parts)
        self.targets: list[Target] = []
        self.experts: dict[tuple[str, str], dict[int, str]] = {}
        for part in parts:
            pattern, numbers = abstract(part)
            if len(numbers) == 2:
                self.experts.setdefault((pattern, numbers[0]), {})[int(numbers[1])] = part

    def write(self, spelling: Spelling, layer: str) -> None:
        """The tensors of one line in one layer, if the layer has its parts."""
        if spelling.op in (Op.STACK, Op.GATE_UP):
            self._stack(spelling, layer)
        elif spelling.op is Op.QKV:
            self._qkv(spelling, layer)
        elif spelling.name.count("{}") == 2:
            for expert in sorted(self.experts.get((spelling.parts[0], layer), {})):
                self.write_part(spelling, layer, expert)
        else:
            self.write_part(spelling, layer)

    def write_part(self, spelling: Spelling, *numbers: str | int) -> None:
        """A tensor that is one part, if there is such a part."""
        part = spelling.parts[0].format(*numbers)
        if part in self.left:
            self._emit(spelling.name.format(*numbers), self.parts[part], Op.RENAME, (part,))

    def _stack(self, spelling: Spelling, layer: str) -> None:
        columns = [self.experts.get((part, layer), {}) for part in spelling.parts]
        if not any(columns):
            return
        count = 1 + max(expert for column in columns for expert in column)
        absent = [
            part.format(layer, expert)
            for part, column in zip(spelling.parts, columns, strict=True)
            for expert in range(count)
            if expert not in column
        ]
        if absent:
            raise ValueError(f"layer {layer} lacks experts: {absent[0]!r} and {len(absent) - 1} more are missing")
        names = tuple(column[expert] for column in columns for expert in range(count))
        shapes = {self.parts[name] for name in names}
        if len(shapes) != 1:
            raise ValueError(f"the experts of layer {layer} differ in shape: {sorted(map(list, shapes))}")
        rows, cols = next(iter(shapes))
        self._emit(spelling.name.format(layer), (count, rows * len(columns), cols), spelling.op, names)

    def _qkv(self, spelling: Spelling, layer: str) -> None:
        names, norm = tuple(part.format(layer) for part in spelling.parts), Q_NORM.format(layer)
        if norm in self.parts and self.left.issuperset(names):
            shape = (sum(self.parts[name][0] for name in names), self.parts[names[0]][1])
            self._emit(spelling.name.format(layer), shape, Op.QKV, names, self.parts[norm][0])

    def _emit(self, name: str, shape: Shape, op: Op, names: tuple[str, ...], head_rows: int = 0) -> None:
        pieces = tuple(rows_of(op, names, self.parts, head_rows))
        self.targets.append(Target(self.root + name, shape, pieces))
        self.left.difference_update(names)
