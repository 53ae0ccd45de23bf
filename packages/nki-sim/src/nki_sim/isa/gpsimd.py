"""GpSimd's own instructions: patterns, selection by position, gathers within SBUF, reductions across partitions."""

import numpy as np

from nki_sim.dtypes import f32
from nki_sim.errors import need, refuse
from nki_sim.instruction import REQUIRED, SBUF, Args, Compute, Tile, instruction
from nki_sim.isa.vector import like, line, need_alu, need_ints, need_shape, write_where
from nki_sim.machine import Machine
from nki_sim.ops import OPS, alu

GROUP = 16  # SBUF partitions connected to one of the eight GpSimd cores
Array = np.ndarray
IN, OUT = Tile(SBUF), Tile(SBUF, write=True)
REDUCTIONS = ("add", "average", "maximum", "bitwise_or", "bitwise_and")


def _affine(a: Args, offset: int) -> Array:
    """offset + partition * channel_multiplier + sum(step * index), int32, in dst's shape."""
    need(len(a.pattern) <= 4, "access-pattern", "pattern {} has more than 4 dimensions", a.pattern)
    size = int(np.prod([n for _, n in a.pattern]))
    need(size == a.dst.free_size, "shape", "pattern {} does not fill dst {}", a.pattern, a.dst)
    values = offset + np.arange(a.dst.shape[0], dtype=np.int64)[:, None] * a.channel_multiplier
    for step, n in a.pattern:
        values = (values[:, :, None] + np.arange(n, dtype=np.int64) * step).reshape(len(values), -1)
    return values.astype(np.int32).reshape(a.dst.shape)


@instruction("G", special=True, dst=OUT, pattern=REQUIRED, offset=0, channel_multiplier=0)
def iota(a: Args) -> Compute:
    """Integers by an affine pattern, converted to dst's dtype. The offset may be a register."""
    values = _affine(a, 0)

    def execute(machine: Machine) -> None:
        machine.write(a.dst, values + np.int32(machine.value(a.offset)))

    return execute


@instruction("G", same="dst on_true_tile", dst=OUT, pattern=REQUIRED, channel_multiplier=REQUIRED, on_true_tile=IN, on_false_value=REQUIRED, cmp_op=OPS["equal"], offset=0)  # fmt: skip
def affine_select(a: Args) -> Compute:
    """on_true_tile where cmp_op(affine value, 0) holds, else on_false_value."""
    need_alu(a.cmp_op)
    keep = alu(a.cmp_op, _affine(a, a.offset), 0) != 0
    return lambda x: np.where(keep, like(f32(x), a.dst), np.float32(a.on_false_value))


def _take(x: Array, index: Array) -> Array:
    """x[p, index[p, i]]; refused outside."""
    top, n = int(index.max()), x.shape[1]
    if top >= n:
        refuse("out-of-bounds", f"index {top} of {n} elements per partition; clamp the indices")
    return np.take_along_axis(x, np.minimum(index, n - 1), axis=1)


@instruction("G", same="dst indices", same_dtype="dst data", dst=OUT, data=IN, indices=Tile(SBUF, ("uint32",)))
def nc_n_gather(a: Args) -> Compute:
    """dst[p, i] = data[p, indices[p, i]], free dimensions flattened."""
    return lambda x, i: _take(line(x), line(i).astype(np.int64))


@instruction("G", same_dtype="dst src_buffer", dst=OUT, src_buffer=IN, index=Tile(SBUF, ("uint16",)), num_elem_per_idx=1, num_valid_indices=None)  # fmt: skip
def local_gather(a: Args) -> Compute:
    """Each group of 16 partitions gathers by its own indices, read down its partitions first."""
    p, n, held = a.src_buffer.shape[0], a.num_elem_per_idx, a.index.free_size * GROUP
    count = held if a.num_valid_indices is None else a.num_valid_indices
    need(p == a.index.shape[0] and p % GROUP == 0, "shape", "{}, {}: partitions", a.src_buffer, a.index)
    need(n in (1, 2, 4, 8, 16, 32), "value", "num_elem_per_idx {} is not 1, 2, 4, 8, 16 or 32", n)
    need(count <= min(4096, held), "value", "{} indices per core; at most 4096 and the {} of index", count, held)
    need_shape("dst", a.dst, p, count * n)

    def compute(x: Array, index: Array) -> Array:
        groups = line(index).reshape(p // GROUP, GROUP, -1).transpose(0, 2, 1)
        first = groups.reshape(p // GROUP, -1)[:, :count].astype(np.int64)
        at = (first[:, :, None] + np.arange(n)).reshape(p // GROUP, -1)
        return _take(line(x), np.repeat(at, GROUP, axis=0))

    return compute


@instruction("G", dst=OUT, op=REQUIRED, data=IN)
def tensor_partition_reduce(a: Args) -> Compute:
    """Reduce over the partitions, into one partition."""
    need(getattr(a.op, "name", None) in REDUCTIONS, "op", "op is one of {}; got {!r}", REDUCTIONS, a.op)
    need_shape("dst", a.dst, 1, a.data.free_size)
    need_ints(a.op, a.dst, a.data)
    if a.op.name == "average":
        return lambda x: f32(x).mean(axis=0)
    return lambda x: a.op.alu.reduce(x if a.op.bitvec else f32(x), axis=0)


@instruction("G", special=True, dst=Tile(SBUF, ("int32",), write=True), src=Tile(SBUF, ("float32", "int32")), index_offset=0, padding_val=-1)  # fmt: skip
def nonzero_with_count(a: Args) -> Compute:
    """Positions of nonzero elements, padding, and their count last; partitions 0, 16, ... only, the others stay."""
    need_shape("dst", a.dst, a.src.shape[0], a.src.free_size + 1)

    def execute(machine: Machine) -> None:
        values = np.full((a.dst.shape[0], a.dst.free_size), a.padding_val, np.int32)
        for lane in range(0, len(values), GROUP):
            at = np.flatnonzero(machine.read(a.src[lane : lane + 1]))
            values[lane, : len(at)], values[lane, -1] = at + a.index_offset, len(at)
        chosen = np.zeros(a.dst.shape, bool)
        chosen[::GROUP] = True
        write_where(machine, a.dst, chosen, values.reshape(a.dst.shape))

    return execute
