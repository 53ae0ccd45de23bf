"""The Tensor Engine: matrix multiplication into PSUM, and transposition through it."""

from typing import TYPE_CHECKING, Any

import numpy as np

from nki_sim.constants import engine as Engine
from nki_sim.constants import matmul_perf_mode
from nki_sim.dtypes import f32
from nki_sim.errors import refuse
from nki_sim.limits import MOVING_FREE, PARTITIONS, PSUM_BANK_BYTES, STATIONARY_FREE
from nki_sim.program import Instr, tracer
from nki_sim.rules import PSUM, SBUF, instruction, out, rule, tile
from nki_sim.tensor import MemoryRegion, NkiTensor

if TYPE_CHECKING:
    from nki_sim.machine import Machine

FP8 = ("float8_e4m3", "float8_e5m2")
OPERANDS = ("float32", "bfloat16", "float16", *FP8)


def _one_bank(title: str, view: NkiTensor) -> None:
    """A matmul writes within one PSUM bank of each partition."""
    storage = view.storage
    size = view.dtype.itemsize
    first = (storage.address or (0, 0))[1] + view.offset * size % storage.pitch
    last = first + (sum(s * (n - 1) for s, n in zip(view.strides[1:], view.shape[1:], strict=True)) + 1) * size
    rule(
        first // PSUM_BANK_BYTES == (last - 1) // PSUM_BANK_BYTES,
        "psum-bank",
        lambda: (
            f"{title}: dst {view!r} covers bytes {first}..{last} of its partition and crosses a PSUM bank ({PSUM_BANK_BYTES} bytes); write at most 512 float32 within one bank"
        ),
    )


@instruction("T", special=True, dst=out(PSUM), stationary=tile(SBUF, OPERANDS), moving=tile(SBUF, OPERANDS))
def nc_matmul(
    dst: Any,
    stationary: Any,
    moving: Any,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: Any = (),
    tile_size: Any = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none,
) -> Any:
    """dst[M, N] (+)= stationary[K, M].T @ moving[K, N], K on partitions (double_row: K on partitions and a first free 2).

    accumulate None: what matmuls have not written is overwritten, what they have is added to.
    """
    double = perf_mode is matmul_perf_mode.double_row
    m, n = (v.free_size // (2 if double else 1) for v in (stationary, moving))
    if double:
        rule(
            all(v.dtype in FP8 for v in (stationary, moving)),
            "dtype",
            lambda: f"nc_matmul: double_row needs float8 operands; got {stationary!r}, {moving!r}",
        )
        rule(
            all(v.ndim >= 3 and v.shape[1] == 2 for v in (stationary, moving)),
            "shape",
            lambda: f"nc_matmul: double_row needs a first free dimension of 2; got {stationary!r}, {moving!r}",
        )
    rows, columns = tuple(tile_size) or (PARTITIONS, STATIONARY_FREE)
    rule(
        bool(tile_position) == bool(tile_size),
        "tile-position",
        lambda: "nc_matmul: tile_position and tile_size are set together",
    )
    if tile_size:
        at = tuple(tile_position)
        good = all(
            s in (32, 64, 128) and p % s == 0 and 0 <= p and p + s <= 128
            for p, s in zip(at, (rows, columns), strict=True)
        )
        rule(
            good,
            "tile-position",
            lambda: (
                f"nc_matmul: tile_size {tile_size} must be 32, 64 or 128 and tile_position {at} a multiple of it inside the 128 x 128 array"
            ),
        )
        rule(
            not (double and columns != 128),
            "tile-position",
            lambda: "nc_matmul: double_row cannot be combined with column tiling",
        )
    rule(
        stationary.shape[0] == moving.shape[0] <= rows,
        "shape",
        lambda: (
            f"nc_matmul: stationary {stationary.shape} and moving {moving.shape} contract over dimension 0, which must be equal and at most {rows}"
        ),
    )
    rule(
        m <= columns,
        "stationary-free",
        lambda: (
            f"nc_matmul: stationary {stationary.shape} has {m} free elements; at most {columns}. Split the output rows"
        ),
    )
    rule(
        n <= MOVING_FREE,
        "moving-free",
        lambda: (
            f"nc_matmul: moving {moving.shape} has {n} free elements; at most {MOVING_FREE} on trn2. Split the output columns"
        ),
    )
    rule(
        (dst.shape[0], dst.free_size) == (m, n),
        "shape",
        lambda: f"nc_matmul: dst {dst.shape} must hold ({m}, {n}) = stationary free x moving free",
    )
    wide = {v.dtype == "float32" for v in (stationary, moving)}
    rule(
        len(wide) == 1,
        "dtype",
        lambda: f"nc_matmul: float32 pairs only with float32; got {stationary!r} and {moving!r}",
    )
    if is_transpose:
        rule(
            dst.dtype == stationary.dtype or dst.dtype == moving.dtype,
            "dtype",
            lambda: f"nc_matmul: a transpose keeps its dtype; dst is {dst.dtype}, stationary {stationary.dtype}",
        )
    else:
        rule(dst.dtype == "float32", "dtype", lambda: f"nc_matmul: dst must be float32 on trn2; got {dst.dtype}")
    _one_bank("nc_matmul", dst)
    _static_accumulation(dst, accumulate)
    return _matmul


def _static_accumulation(dst: NkiTensor, accumulate: bool | None) -> None:
    """accumulate=None is decided when the program is compiled, so a first write inside a loop cannot also be a later one."""
    trace, key = tracer(), dst.storage.key
    outside = trace.home.get(key) is not trace.blocks[-1]
    if accumulate is None and outside and key not in trace.matmul_base and trace.depth:
        refuse(
            "accumulate",
            f"nc_matmul: {dst.storage} was allocated outside this dynamic loop; whether a pass overwrites or adds is not decidable at compile time. Pass accumulate=, or allocate it inside",
        )
    trace.matmul_base.add(key)


def _matmul(machine: "Machine", instr: Instr) -> None:
    args = instr.args
    dst = args["dst"]
    a, b = (f32(machine.read(args[k], instr)) for k in ("stationary", "moving"))
    if args["is_transpose"]:
        values = (
            a.reshape(a.shape[0], -1).T if _is_identity(b) else a.reshape(a.shape[0], -1).T @ b.reshape(b.shape[0], -1)
        )
    elif args["perf_mode"] is matmul_perf_mode.double_row:
        k = a.shape[0] * 2
        values = a.reshape(k, -1).T @ b.reshape(k, -1)
    else:
        values = a.reshape(a.shape[0], -1).T @ b.reshape(b.shape[0], -1)
    values = values.reshape(dst.shape)
    offset = machine.locate(dst, instr)
    accumulate = args["accumulate"]
    if accumulate is not False and offset is not None and not args["is_transpose"]:
        cell = machine.cell(dst.storage)
        assert cell.base is not None
        base = cell.over(cell.base, dst, offset)
        if accumulate and not base.all():
            refuse(
                "accumulate",
                f"nc_matmul adds to {dst!r} of {dst.storage}, where no matmul has written; start with accumulate=False (memset is no base on trn2)",
                instr.where,
            )
        if base.ndim > len(dst.shape):
            base = base.all(axis=-1)
        if base.all():
            values = values + cell.array(dst, offset)
        elif base.any():
            values = np.where(base, values + cell.array(dst, offset), values)
        elif cell.written is None or cell.over(cell.written, dst, offset).any():
            refuse(
                "accumulate",
                f"nc_matmul with accumulate=None on {dst!r} of {dst.storage}, which another instruction wrote: adding to that is undefined on trn2. Pass accumulate=False, or drop the earlier write",
                instr.where,
            )
    machine.write(dst, values, instr, matmul=not args["is_transpose"])


def _is_identity(b: np.ndarray) -> bool:
    flat = b.reshape(b.shape[0], -1)
    return flat.shape[0] == flat.shape[1] and bool((flat == np.eye(flat.shape[0], dtype=flat.dtype)).all())


@instruction("TV", dst=out(), data=tile(), same_dtype=("dst", "data"))
def nc_transpose(dst: Any, data: Any, engine: Engine = Engine.unknown) -> Any:
    """dst[F, P] = data[P, F].T: up to 128 x 128 from SBUF to PSUM on the Tensor Engine, up to 32 x 32 on the Vector Engine."""
    p, f = data.shape[0], data.free_size
    fits_tensor = data.buffer is MemoryRegion.sbuf and dst.buffer is MemoryRegion.psum
    letter = "V" if engine is Engine.vector or (engine is Engine.unknown and not fits_tensor) else "T"
    rule(
        (dst.shape[0], dst.free_size) == (f, p),
        "shape",
        lambda: f"nc_transpose: dst {dst.shape} must be ({f}, {p}), data {data.shape} transposed",
    )
    if letter == "T":
        rule(
            fits_tensor,
            "buffer",
            lambda: f"nc_transpose on the Tensor Engine reads SBUF and writes PSUM; got {data!r} -> {dst!r}",
        )
        rule(
            p <= PARTITIONS and f <= STATIONARY_FREE,
            "transpose-size",
            lambda: f"nc_transpose: data {data.shape} exceeds 128 x 128 on the Tensor Engine; split it",
        )
        _one_bank("nc_transpose", dst)
    else:
        rule(
            p <= 32 and f <= 32,
            "transpose-size",
            lambda: (
                f"nc_transpose: data {data.shape} exceeds 32 x 32 on the Vector Engine; split it, or go from SBUF to PSUM for the Tensor Engine"
            ),
        )
    return (lambda x: x.reshape(p, f).T), letter
