"""The Tensor Engine: matrix multiplication into PSUM, and transposition through it."""

import numpy as np

from nki_sim.constants import Engine, matmul_perf_mode
from nki_sim.dtypes import f32
from nki_sim.errors import need, refuse
from nki_sim.instruction import IN, OUT, PSUM, SBUF, Args, Compute, Tile, instruction
from nki_sim.limits import MOVING_FREE, PARTITIONS, PSUM_BANK_BYTES, STATIONARY_FREE
from nki_sim.machine import Machine
from nki_sim.program import tracer
from nki_sim.tensor import MemoryRegion, NkiTensor

FP8 = ("float8_e4m3", "float8_e5m2")
OPERAND = Tile(SBUF, ("float32", "bfloat16", "float16", *FP8))
DOUBLE = matmul_perf_mode.double_row


@instruction("T", special=True, dst=Tile(PSUM, write=True), stationary=OPERAND, moving=OPERAND, is_stationary_onezero=False, is_moving_onezero=False, is_transpose=False, accumulate=None, tile_position=(), tile_size=(), perf_mode=matmul_perf_mode.none)  # fmt: skip
def nc_matmul(a: Args) -> Compute:
    """dst[M, N] (+)= stationary[K, M].T @ moving[K, N], K on partitions (double_row: and on a first free dimension of 2).
    accumulate=None overwrites what no matmul has written and adds to what one has."""
    pair, double = (a.stationary, a.moving), a.perf_mode is DOUBLE
    m, n = (v.free_size // (1 + double) for v in pair)
    if double:
        need(all(v.dtype in FP8 for v in pair), "dtype", "double_row needs float8 operands; got {}", pair)
        need(all(v.ndim > 2 and v.shape[1] == 2 for v in pair), "shape", "double_row: first free must be 2; {}", pair)
    need(bool(a.tile_position) == bool(a.tile_size), "tile-position", "tile_position and tile_size are set together")
    rows, columns = tuple(a.tile_size) or (PARTITIONS, STATIONARY_FREE)
    at = tuple(a.tile_position) or (0, 0)
    sizes = zip(at, (rows, columns), strict=True)
    fits = all(s in (32, 64, 128) and p % s == 0 and 0 <= p <= 128 - s for p, s in sizes)
    need(fits, "tile-position", "size {}: 32, 64, 128; position {}: its multiple", (rows, columns), at)
    need(not double or columns == 128, "tile-position", "double_row excludes column tiling")
    need(pair[0].shape[0] == pair[1].shape[0] <= rows, "shape", "{}: dimension 0 must agree, <= {}", pair, rows)
    need(m <= columns, "stationary-free", "stationary has {} free elements, at most {}; split rows", m, columns)
    need(n <= MOVING_FREE, "moving-free", "moving has {} free elements, at most {}; split columns", n, MOVING_FREE)
    need((a.dst.shape[0], a.dst.free_size) == (m, n), "shape", "dst {} must be ({}, {})", a.dst, m, n)
    need(len({v.dtype == "float32" for v in pair}) == 1, "dtype", "float32 pairs only with float32; got {}", pair)
    kept = (a.stationary.dtype, a.moving.dtype) if a.is_transpose else ("float32",)
    need(a.dst.dtype in kept, "dtype", "dst must be {} (a transpose keeps its dtype); got {}", " or ".join(kept), a.dst)
    _one_bank(a.dst)
    trace, key = tracer(), a.dst.storage.key
    outside = trace.blocks[1:] and trace.home.get(key) is not trace.blocks[-1] and key not in trace.matmul_base
    fix = "overwrite or add is not known at compile time; pass accumulate= or allocate it inside"
    need(not (outside and a.accumulate is None), "accumulate", "{} is from outside this loop: {}", a.dst.storage, fix)
    trace.matmul_base.add(key)
    return _matmul


def _one_bank(view: NkiTensor) -> None:
    size, storage = view.dtype.itemsize, view.storage
    first = (storage.address or (0, 0))[1] + view.offset * size % storage.pitch
    last = first + (view.extent(1) + 1) * size
    one = first // PSUM_BANK_BYTES == (last - 1) // PSUM_BANK_BYTES
    need(one, "psum-bank", "dst {} covers bytes {}..{}, across a PSUM bank of {}", view, first, last, PSUM_BANK_BYTES)


def _matmul(machine: Machine) -> None:
    a = Args(**machine.instr.args)
    x, y = (f32(machine.read(v)) for v in (a.stationary, a.moving))
    rows = x.shape[0] * (2 if a.perf_mode is DOUBLE else 1)
    x, y = x.reshape(rows, -1), y.reshape(rows, -1)
    exact = a.is_transpose and y.shape[0] == y.shape[1] and np.array_equal(y, np.eye(len(y)))
    values = (x.T if exact else x.T @ y).reshape(a.dst.shape)
    offset = machine.locate(a.dst)
    if a.accumulate is not False and offset is not None and not a.is_transpose:
        cell = machine.cell(a.dst.storage)
        base: np.ndarray = cell.over(cell.base, a.dst, offset)
        if a.accumulate and not base.all():
            refuse("accumulate", f"adds to {a.dst.storage} where no matmul wrote (memset is no base); start with False")
        base = np.all(base, axis=-1) if base.ndim > a.dst.ndim else base
        if base.any():
            values = np.where(base, values + cell.array(a.dst, offset), values)
        elif a.accumulate is None and (cell.written is None or cell.over(cell.written, a.dst, offset).any()):
            refuse("accumulate", f"adds to {a.dst.storage}, which no matmul wrote: undefined on trn2; pass False")
    machine.write(a.dst, values, matmul=not a.is_transpose)


@instruction("TV", same_dtype="dst data", dst=OUT, data=IN, engine=Engine.unknown)
def nc_transpose(a: Args) -> tuple[Compute, str]:
    """dst[F, P] = data[P, F].T: to 128 x 128 from SBUF to PSUM on the Tensor Engine, to 32 x 32 on the Vector Engine."""
    p, f = a.data.shape[0], a.data.free_size
    through_pe = a.data.buffer is MemoryRegion.sbuf and a.dst.buffer is MemoryRegion.psum
    letter = "V" if a.engine is Engine.vector or (a.engine is Engine.unknown and not through_pe) else "T"
    need(letter == "V" or through_pe, "buffer", "the Tensor Engine goes SBUF -> PSUM; got {} -> {}", a.data, a.dst)
    side = 32 if letter == "V" else 128
    need(max(p, f) <= side, "transpose-size", "data {} exceeds {} x {} on this engine; split it", a.data, side, side)
    need((a.dst.shape[0], a.dst.free_size) == (f, p), "shape", "dst {} must be ({}, {})", a.dst, f, p)
    if letter == "T":
        _one_bank(a.dst)
    return (lambda x: x.reshape(p, f).T), letter
