"""What folding does to rows: every operation of the table is a rearrangement of them.

A tensor's rows are its leading dimensions flattened: [E, F, D] has E*F rows of D. One function lists the rows of a
stored tensor and so serves both directions: reading looks up where each row of a part lies, writing lists which rows
come next. A conversion between two layouts is the composition of the two lists, and needs no intermediate tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .table import Op

__all__ = ["Piece", "Run", "Shape", "part_shapes", "row_count", "rows_of"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """`rows` rows of a part, its row `part_row` on, are the rows of stored tensor `tensor` from `row` on."""

    part_row: int
    rows: int
    tensor: str
    row: int


@dataclass(frozen=True)
class Piece:
    """The next `rows` rows of a target come from `part`, its row `row` on; `part` None means zeros."""

    part: str | None
    row: int
    rows: int


def row_count(shape: Shape) -> int:
    """Rows of a tensor: [E, F, D] has E*F, [D] has D, a scalar has one."""
    return math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)


def rows_of(op: Op, parts: tuple[str, ...], shapes: Mapping[str, Shape], head_rows: int = 0) -> list[Piece]:
    """The rows of a stored tensor in order.

    Args:
        op: how the parts are folded.
        parts: names without `{}`; for STACK and GATE_UP gates first, then ups, each expert in order.
        shapes: part -> shape.
        head_rows: head_dim, which QKV alone needs.

    Returns:
        Pieces that together are the stored tensor.
    """

    def whole(part: str) -> Piece:
        return Piece(part, 0, row_count(shapes[part]))

    if op in (Op.RENAME, Op.STACK):
        return [whole(p) for p in parts]
    if op is Op.GATE_UP:
        half = len(parts) // 2
        return [whole(p) for pair in zip(parts[:half], parts[half:], strict=True) for p in pair]
    assert op is Op.QKV, op
    q, k, v = parts
    n_kv, groups = shapes[k][0] // head_rows, shapes[q][0] // shapes[k][0]
    return [
        piece
        for head in range(n_kv)
        for piece in (
            Piece(q, head * groups * head_rows, groups * head_rows),
            Piece(k, head * head_rows, head_rows),
            Piece(v, head * head_rows, head_rows),
        )
    ]


def part_shapes(
    name: str, op: Op, parts: tuple[str, ...], shape: Shape, output: Shape | None, norm: Shape | None
) -> dict[str, Shape]:
    """The shapes of the parts that are folded in a stored tensor.

    Args:
        name: the stored tensor, for messages.
        op: how the parts are folded.
        parts: as for `rows_of`.
        shape: shape of the stored tensor.
        output: shape of the layer's attention output [D, N], which QKV alone needs.
        norm: shape of the layer's q_norm [H], which QKV alone needs.

    Raises:
        ValueError: the stored tensor cannot be unfolded into these parts.
    """
    if op is Op.RENAME:
        return {parts[0]: shape}
    if op is Op.STACK:
        return dict.fromkeys(parts, shape[1:])
    if op is Op.GATE_UP:
        if shape[1] % 2:
            raise ValueError(f"{name} has shape {list(shape)}; expected [experts, 2 x width, model]")
        return dict.fromkeys(parts, (shape[1] // 2, shape[2]))
    assert op is Op.QKV, op
    if output is None or norm is None:
        raise ValueError(f"{name} is fused and needs attention.wo and attention.q_norm beside it to be split")
    q_rows, kv = output[1], shape[0] - output[1]
    if kv <= 0 or kv % (2 * norm[0]) or q_rows % (kv // 2):
        raise ValueError(
            f"{name} has {shape[0]} rows; with {q_rows} query rows and head_dim {norm[0]} the rest cannot "
            "be split into equal k and v heads"
        )
    return {parts[0]: (q_rows, shape[1]), parts[1]: (kv // 2, shape[1]), parts[2]: (kv // 2, shape[1])}
