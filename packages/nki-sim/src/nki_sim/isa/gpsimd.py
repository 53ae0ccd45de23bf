"""GpSimd's own instructions: patterns, selection by position, gathers within SBUF, reductions across partitions."""

from typing import TYPE_CHECKING, Any

import numpy as np

from nki_sim.dtypes import INTS, f32
from nki_sim.errors import refuse
from nki_sim.isa.vector import like, line, partial_write
from nki_sim.ops import OPS, Op, alu
from nki_sim.program import Instr
from nki_sim.rules import SBUF, instruction, out, rule, tile
from nki_sim.tensor import NkiTensor

if TYPE_CHECKING:
    from nki_sim.machine import Machine

GROUP = 16  # SBUF partitions connected to one of the eight GpSimd cores
Array = np.ndarray


def _affine(title: str, dst: NkiTensor, pattern: Any, offset: int, channel_multiplier: int) -> Array:
    """offset + partition * channel_multiplier + sum(step * index), int32, in dst's shape."""
    steps = [(int(s), int(n)) for s, n in pattern]
    rule(len(steps) <= 4, "access-pattern", lambda: f"{title}: pattern {pattern} has more than 4 dimensions")
    rule(
        int(np.prod([n for _, n in steps])) == dst.free_size,
        "shape",
        lambda: (
            f"{title}: pattern {pattern} does not describe the {dst.free_size} elements per partition of dst {dst.shape}"
        ),
    )
    values = offset + np.arange(dst.shape[0], dtype=np.int64)[:, None] * channel_multiplier
    for step, n in steps:
        values = (values[:, :, None] + np.arange(n, dtype=np.int64) * step).reshape(len(values), -1)
    return values.astype(np.int32).reshape(dst.shape)


@instruction("G", dst=out(SBUF))
def iota(dst: Any, pattern: Any, offset: int = 0, channel_multiplier: int = 0) -> Any:
    """Integers by an affine pattern, converted to dst's dtype."""
    values = _affine("iota", dst, pattern, offset, channel_multiplier)
    return lambda: values


@instruction("G", dst=out(SBUF), on_true_tile=tile(SBUF), same=("dst", "on_true_tile"))
def affine_select(
    dst: Any,
    pattern: Any,
    channel_multiplier: int,
    on_true_tile: Any,
    on_false_value: float,
    cmp_op: Op = OPS["equal"],
    offset: int = 0,
) -> Any:
    """on_true_tile where cmp_op(affine value, 0) holds, else on_false_value."""
    affine = _affine("affine_select", dst, pattern, offset, channel_multiplier)
    keep = alu(cmp_op, affine, 0) != 0
    return lambda x: np.where(keep, like(f32(x), dst), np.float32(on_false_value))


@instruction(
    "G",
    dst=out(SBUF),
    data=tile(SBUF),
    indices=tile(SBUF, ("uint32",)),
    same=("dst", "indices"),
    same_dtype=("dst", "data"),
)
def nc_n_gather(dst: Any, data: Any, indices: Any) -> Any:
    """dst[p, i] = data[p, indices[p, i]], free dimensions flattened."""

    def compute(x: Array, index: Array) -> Array:
        x, index = line(x), line(index).astype(np.int64)
        if index.max() >= x.shape[1]:
            refuse("out-of-bounds", f"nc_n_gather: index {int(index.max())} of {x.shape[1]} elements per partition")
        return np.take_along_axis(x, np.minimum(index, x.shape[1] - 1), axis=1)

    return compute


@instruction("G", dst=out(SBUF), src_buffer=tile(SBUF), index=tile(SBUF, ("uint16",)), same_dtype=("dst", "src_buffer"))
def local_gather(
    dst: Any, src_buffer: Any, index: Any, num_elem_per_idx: int = 1, num_valid_indices: int | None = None
) -> Any:
    """Each group of 16 partitions gathers by its own indices, read down its partitions first."""
    partitions = src_buffer.shape[0]
    count = index.free_size * GROUP if num_valid_indices is None else num_valid_indices
    rule(
        partitions == index.shape[0] and partitions % GROUP == 0,
        "shape",
        lambda: (
            f"local_gather: src {src_buffer.shape} and index {index.shape} need the same partitions, a multiple of {GROUP}"
        ),
    )
    rule(
        num_elem_per_idx in (1, 2, 4, 8, 16, 32),
        "value",
        lambda: f"local_gather: num_elem_per_idx {num_elem_per_idx} is not 1, 2, 4, 8, 16 or 32",
    )
    rule(
        count <= 4096 and count <= index.free_size * GROUP,
        "value",
        lambda: f"local_gather: {count} indices per core; at most 4096, and no more than index {index.shape} holds",
    )
    rule(
        dst.shape[0] == partitions and dst.free_size == count * num_elem_per_idx,
        "shape",
        lambda: f"local_gather: dst {dst.shape} must hold {count} x {num_elem_per_idx} elements per partition",
    )

    def compute(x: Array, i: Array) -> Array:
        x, groups = line(x), line(i).reshape(partitions // GROUP, GROUP, -1)
        first = groups.transpose(0, 2, 1).reshape(len(groups), -1)[:, :count].astype(np.int64)
        at = (first[:, :, None] + np.arange(num_elem_per_idx)).reshape(len(groups), -1)
        if at.max() >= x.shape[1]:
            refuse("out-of-bounds", f"local_gather: index {int(at.max())} of {x.shape[1]} elements per partition")
        return np.take_along_axis(x, np.repeat(np.minimum(at, x.shape[1] - 1), GROUP, axis=0), axis=1)

    return compute


@instruction("G", dst=out(SBUF), data=tile(SBUF))
def tensor_partition_reduce(dst: Any, op: Op, data: Any) -> Any:
    """Reduce over the partitions, into one partition."""
    names = ("add", "average", "maximum", "bitwise_or", "bitwise_and")
    rule(
        isinstance(op, Op) and op.name in names,
        "op",
        lambda: f"tensor_partition_reduce: op is one of {', '.join(names)}; got {op!r}",
    )
    rule(
        dst.shape[0] == 1 and dst.free_size == data.free_size,
        "shape",
        lambda: f"tensor_partition_reduce: dst {dst.shape} must be (1, {data.free_size})",
    )
    rule(
        not op.bitvec or (data.dtype in INTS and dst.dtype in INTS),
        "dtype",
        lambda: f"tensor_partition_reduce: {op} works on integers; got {data!r}",
    )

    def compute(x: Array) -> Array:
        if op.name == "average":
            return f32(x).mean(axis=0)
        assert op.reduce is not None
        return op.reduce.reduce(x if op.bitvec else f32(x), axis=0)  # type: ignore[attr-defined,no-any-return]

    return compute


@instruction("G", dst=out(SBUF, ("int32",)), src=tile(SBUF, ("float32", "int32")), special=True)
def nonzero_with_count(dst: Any, src: Any, index_offset: int = 0, padding_val: int = -1) -> Any:
    """Positions of nonzero elements, padding, and their count last; partitions 0, 16, ... only, the others stay."""
    rule(
        dst.shape[0] == src.shape[0] and dst.free_size == src.free_size + 1,
        "shape",
        lambda: f"nonzero_with_count: dst {dst.shape} must be ({src.shape[0]}, {src.free_size + 1})",
    )

    def execute(machine: "Machine", instr: Instr) -> None:
        values = np.zeros((dst.shape[0], dst.free_size), np.int32)
        for lane in range(0, src.shape[0], GROUP):
            at = np.flatnonzero(line(machine.read(src[lane : lane + 1], instr))[0])
            row = np.full(dst.free_size, padding_val, np.int32)
            row[: len(at)], row[-1] = at + index_offset, len(at)
            values[lane] = row
        chosen = np.zeros(dst.shape, bool)
        chosen[::GROUP] = True
        partial_write(machine, instr, dst, chosen, values.reshape(dst.shape))

    return execute
