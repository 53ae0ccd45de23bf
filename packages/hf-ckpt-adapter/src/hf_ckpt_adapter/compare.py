"""Compare two checkpoints of any format and layout, part by part, block by block.

Both sides are read as parts (the tensors of the Hub's per-expert layout), so that a DCP step and a Hub folder with
fused experts line up. A tied side without a head is compared by its embedding, and one without native-only state (an
expert bias) as if it were zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .config import load_config, tied
from .formats.tensors import TensorInfo, TensorSource
from .names.order import natural
from .names.read import Reading, read_names
from .names.rows import Piece, Shape
from .names.table import EMBED, HEAD
from .names.write import Target
from .plan import Output, resolve
from .side_state import read_side_state
from .sources import assets_of, find, open_source
from .stream import blocks
from .vocabulary import vocabulary

__all__ = ["Comparison", "Difference", "Model", "diff"]


@dataclass(frozen=True)
class Difference:
    """One part that is not the same on both sides.

    `why` is `value`, `shape` or `dtype`. `max` and `mean` are absolute differences over all elements, where NaN against
    a number counts as infinite. `index` is the first element that differs. `a` and `b` say where the part is stored.
    """

    part: str
    why: str
    a: str
    b: str
    max: float = 0.0
    mean: float = 0.0
    count: int = 0
    index: tuple[int, ...] = ()
    detail: str = ""


@dataclass
class Comparison:
    """What differs; `same` counts the parts that agree in every bit (or in value, between dtypes). `padding` says
    which rows were left aside because the config does not count them as vocabulary.
    """

    same: int = 0
    different: list[Difference] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    padding: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether nothing differs, and neither side has a part that the other lacks."""
        return not (self.different or self.missing or self.extra)

    def to_dict(self) -> dict[str, Any]:
        """All fields and `equal`, for JSON."""
        return {**asdict(self), "equal": self.equal}

    def summary(self) -> str:
        """The differences for people, a line each."""
        lines = [f"{self.same} parts are the same, {len(self.different)} differ"]
        for d in self.different:
            at = f"first at {list(d.index)}, {d.count} elements, max {d.max:.6g}, mean {d.mean:.6g}"
            lines.append(f"  {d.part}: {at if d.why == 'value' else d.detail} ({d.a} / {d.b})")
        lines += [f"  not compared: {text}" for text in self.padding]
        lines += [f"  only in A: {name}" for name in self.missing]
        lines += [f"  only in B: {name}" for name in self.extra]
        return "\n".join(lines)


class Model:
    """A checkpoint opened as parts.

    `config` is its config.json, or empty when it has none. Rows that only pad the vocabulary are not in `parts`;
    `padding` has their number. `side` is native-only state by native name.
    """

    def __init__(self, name: str | Path, *, follow_symlinks: bool = False) -> None:
        self.folder = find(name)
        self.source: TensorSource = open_source(self.folder, follow_symlinks=follow_symlinks)
        self.reading: Reading = read_names({n: i.shape for n, i in self.source.tensors.items()})
        self.side = read_side_state(self.source, self.reading, self.folder, follow_symlinks=follow_symlinks)
        try:
            assets = assets_of(self.folder, follow_symlinks=follow_symlinks)
            self.config = load_config(assets, follow_symlinks=follow_symlinks)
        except FileNotFoundError:
            self.config = {}
        self.parts: dict[str, Shape] = dict(self.reading.parts)
        self.padding: dict[str, int] = {}
        for part in {EMBED, HEAD} & self.parts.keys():
            rows, *cols = self.parts[part]
            self.parts[part] = (vocabulary(self.config, rows), *cols)
            if self.parts[part][0] != rows:
                self.padding[part] = rows - self.parts[part][0]
        if tied(self.config) and HEAD not in self.parts and EMBED in self.parts:
            self.parts[HEAD], self.reading.runs[HEAD] = self.parts[EMBED], self.reading.runs[EMBED]

    def output(self, part: str) -> Output:
        """A part as an output to stream, in its stored dtype."""
        shape = self.parts[part]
        rows = shape[0] if shape else 1
        reads = resolve(Target(part, shape, (Piece(part, 0, rows),)), self.reading)
        assert reads[0].tensor is not None, part
        dtype = self.source.tensors[reads[0].tensor].dtype
        return Output(part, TensorInfo(dtype, shape), dtype, reads)

    def place(self, part: str) -> str:
        """The place where a part is stored: `tensor in file`."""
        tensor = self.reading.runs[part][0].tensor
        return f"{tensor} in {self.source.tensors[tensor].file or self.source.kind}"

    def close(self) -> None:
        """Close open files."""
        self.source.close()


def _pairs(a: Model, b: Model, part: str) -> Iterator[tuple[int, memoryview, torch.Tensor, memoryview, torch.Tensor]]:
    """First row, and the same rows of both sides."""
    one, other = a.output(part), b.output(part)
    # The same width in bytes on both sides, so that the blocks have the same rows.
    wide = one.info.dtype if one.info.dtype.itemsize >= other.info.dtype.itemsize else other.info.dtype
    left = Output(part, TensorInfo(wide, one.info.shape), one.stored, one.reads)
    right = Output(part, TensorInfo(wide, other.info.shape), other.stored, other.reads)
    row = 0
    for (x_data, x), (y_data, y) in zip(
        blocks(a.source, left, left.reads), blocks(b.source, right, right.reads), strict=True
    ):
        yield row, x_data, x, y_data, y
        row += len(x)


def _compare(a: Model, b: Model, part: str, count: Callable[[int], None]) -> Difference | None:
    shape, cols = a.parts[part], a.parts[part][-1] if len(a.parts[part]) > 1 else 1
    if shape != b.parts[part]:
        detail = f"shape {list(shape)} against {list(b.parts[part])}"
        return Difference(part, "shape", a.place(part), b.place(part), detail=detail)
    x_dtype, y_dtype = a.output(part).stored, b.output(part).stored
    worst, total, different, first = 0.0, 0.0, 0, -1
    for row, x_data, x, y_data, y in _pairs(a, b, part):
        count(len(x_data))
        if x_dtype == y_dtype and x_data == y_data:
            continue
        p, q = x.double(), y.double()
        unequal = (p != q) & ~(p.isnan() & q.isnan())
        if x_dtype == y_dtype:  # by bits: -0.0 and 0.0 are two numbers
            unequal = (_bits(x) != _bits(y)).view(unequal.shape)
        if not bool(unequal.any()):
            continue
        gap = (p - q).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
        gap[p == q] = 0.0
        worst, total = max(worst, float(gap.max())), total + float(gap.sum())
        if first < 0:
            first = row * cols + int(unequal.flatten().nonzero()[0])
        different += int(unequal.sum())
    if not different:
        return None
    elements = torch.Size(shape).numel()
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), shape)) if shape else ()
    return Difference(part, "value", a.place(part), b.place(part), worst, total / elements, different, index)


def _compare_side(a: Model, b: Model, name: str) -> Difference | None:
    """Native-only state of both sides. Where one has none it routes as with zeros."""
    found = [m.side.get(name) for m in (a, b)]
    like = next(t for t in found if t is not None)
    x, y = (torch.zeros_like(like) if t is None else t for t in found)
    left, right = (f"{m.folder}" + ("" if name in m.side else " (absent, so zero)") for m in (a, b))
    if x.shape != y.shape:
        return Difference(name, "shape", left, right, detail=f"shape {list(x.shape)} against {list(y.shape)}")
    gap = (x.double() - y.double()).abs().nan_to_num(nan=float("inf"))
    unequal = gap != 0
    if not unequal.any():
        return None
    first = (int(unequal.nonzero()[0]),)
    return Difference(name, "value", left, right, float(gap.max()), float(gap.mean()), int(unequal.sum()), first)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.dtype.itemsize])


def diff(
    a: str | Path,
    b: str | Path,
    *,
    follow_symlinks: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare two checkpoints.

    Args:
        a: a folder, cache snapshot or Hub id, in any format and layout.
        b: another one.
        follow_symlinks: trust links that lead out of a folder.
        progress: told the bytes done and the bytes in all, after each block.

    Returns:
        What differs, part by part.

    Raises:
        FileNotFoundError: one of them is not there.
        ValueError: one of them cannot be read; see `open_source` and `read_names`.
    """
    one, other = (Model(x, follow_symlinks=follow_symlinks) for x in (a, b))
    try:
        result = Comparison(
            padding=[
                f"{n} padding rows of {p} in {m.folder}" for m in (one, other) for p, n in sorted(m.padding.items())
            ],
            missing=sorted(one.parts.keys() - other.parts.keys(), key=natural) + one.reading.unexpected,
            extra=sorted(other.parts.keys() - one.parts.keys(), key=natural) + other.reading.unexpected,
        )
        shared = sorted(one.parts.keys() & other.parts.keys(), key=natural)
        total, done = sum(one.output(p).info.nbytes for p in shared), 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            if progress is not None:
                progress(done, total)

        for part in shared:
            difference = _compare(one, other, part, count)
            if difference is None:
                result.same += 1
            else:
                result.different.append(difference)
        for name in sorted(one.side.keys() | other.side.keys(), key=natural):
            difference = _compare_side(one, other, name)
            if difference is not None:
                result.different.append(difference)
        return result
    finally:
        one.close()
        other.close()
