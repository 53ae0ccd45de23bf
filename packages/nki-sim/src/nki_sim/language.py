"""nki.language: tensors, memories, dtypes, operators, the grid and loops on the device."""

import builtins
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from nki_sim import dtypes, errors, limits
from nki_sim.dtypes import NUMPY, DType, as_dtype
from nki_sim.errors import need, unsupported
from nki_sim.instruction import INSTRUCTIONS
from nki_sim.isa.scalars import NkiScalar
from nki_sim.memory import CAPACITY, check_address
from nki_sim.ops import OPS
from nki_sim.program import tracer
from nki_sim.tensor import DynamicSlice, MemoryRegion, NkiTensor, VirtualRegister
from nki_sim.tiles import NAMES

sbuf, psum, hbm = MemoryRegion.sbuf, MemoryRegion.psum, MemoryRegion.private_hbm
private_hbm, shared_hbm = MemoryRegion.private_hbm, MemoryRegion.shared_hbm
ds = DynamicSlice
affine_range = sequential_range = static_range = range
globals().update(OPS)
globals().update({name: DType(name) for name in (*dtypes.FLOATS, *dtypes.INTS, *dtypes.UNSUPPORTED)})
globals().update(NAMES)
bool_ = DType("bool")


class NKIObject:
    """Base of configuration objects: fields by keyword."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in set(vars(cls).get("__annotations__", ())) - set(dir(cls)) if errors.compat else ():
            setattr(cls, name, None)  # NKI 0.3 did not ask for every field

    def __init__(self, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


class tile_size:
    """Sizes of trn2."""

    pmax, psum_num_banks, psum_bank_fmax_bytes = limits.PARTITIONS, limits.PSUM_BANKS, limits.PSUM_BANK_BYTES
    psum_fmax = psum_bank_fmax = psum_bank_fmax_bytes // 4
    gemm_stationary_fmax, gemm_moving_fmax = limits.STATIONARY_FREE, limits.MOVING_FREE
    bn_stats_fmax, psum_min_align, sbuf_min_align = limits.BN_STATS_FREE, limits.PSUM_ALIGN, 1
    sbuf_fmax_bytes = total_available_sbuf_size = CAPACITY[sbuf]
    sbuf_fmax, sbuf_size_bytes = sbuf_fmax_bytes // 4, pmax * limits.SBUF_BYTES


def ndarray(shape: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "", address: Any = None) -> NkiTensor:
    """A new tensor, nothing written in it. On chip dimension 0 is the partition; `address` is (partition, byte)."""
    sizes = tuple(int(n) for n in (shape if isinstance(shape, (tuple, list)) else (shape,)))
    what = f"nl.ndarray({sizes}, {dtype}, {getattr(buffer, 'value', buffer)})"
    if not isinstance(buffer, MemoryRegion):
        raise TypeError(f"{what}: the buffer is one of nl.sbuf, nl.psum, nl.hbm, nl.shared_hbm")
    need(sizes and builtins.min(sizes) > 0, "shape", "{} is empty; every dimension is at least 1", what)
    need(not buffer.on_chip or len(sizes) > 1, "shape", "{}: on chip there is a free dimension as well", what)
    fits = not buffer.on_chip or sizes[0] <= limits.PARTITIONS
    need(fits, "partitions", "{}: {} partitions of {}; split dimension 0", what, sizes[0], limits.PARTITIONS)
    need(address is None or buffer.on_chip, "address", "{}: only SBUF and PSUM tensors can be placed", what)
    place = tuple(address) if address is not None else None
    tensor = tracer().allocate(sizes, as_dtype(dtype), buffer, name or "", place)
    if buffer.on_chip:
        check_address(tensor.storage)
    return tensor


def full(shape: Any, fill_value: float, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A new on-chip tensor holding one value (ndarray and memset)."""
    tensor = ndarray(shape, dtype, buffer, name)
    INSTRUCTIONS["memset"](tensor, fill_value)
    return tensor


def zeros(shape: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A new tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A new tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


def empty_like(x: NkiTensor, dtype: Any = None, buffer: MemoryRegion | None = None, name: str = "") -> NkiTensor:
    """A new tensor of x's shape, nothing written in it."""
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: MemoryRegion | None = None, name: str = "") -> NkiTensor:
    """A new tensor of zeros, of x's shape."""
    return full(x.shape, 0, dtype or x.dtype, buffer or x.buffer, name)


def is_sbuf(buffer: MemoryRegion) -> bool:
    """Whether a memory is SBUF."""
    return buffer is sbuf


def is_psum(buffer: MemoryRegion) -> bool:
    """Whether a memory is PSUM."""
    return buffer is psum


def is_hbm(buffer: MemoryRegion) -> bool:
    """Whether a memory is HBM, private or shared."""
    return not buffer.on_chip


def is_on_chip(buffer: MemoryRegion) -> bool:
    """Whether a memory is SBUF or PSUM."""
    return buffer.on_chip


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with the values of an HBM tensor (ndarray and dma_copy)."""
    tensor = ndarray(src.shape if src.ndim > 1 else (1, *src.shape), dtype or src.dtype)
    INSTRUCTIONS["dma_copy"](tensor, src)
    return tensor


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Copy an SBUF tile to HBM (dma_copy)."""
    INSTRUCTIONS["dma_copy"](dst, value)


def shared_constant(constant: Any) -> NkiTensor:
    """Data compiled into the program, in shared HBM: a numpy array or the path of a .npy file."""
    array = np.load(constant) if isinstance(constant, (str, Path)) else np.asarray(constant)
    return tracer().allocate(array.shape, as_dtype(array.dtype), shared_hbm, "constant", constant=array)


def shared_identity_matrix(n: int, dtype: Any = "uint8", dst: NkiTensor | None = None) -> NkiTensor:
    """An n x n identity in SBUF."""
    tile = dst if dst is not None else ndarray((n, n), dtype)
    INSTRUCTIONS["dma_copy"](tile, shared_constant(np.eye(n, dtype=NUMPY[as_dtype(dtype)])))
    return tile


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Print a tensor's values when the program gets there."""
    INSTRUCTIONS["device_print"](print_prefix, tensor)


def program_id(axis: int = 0) -> int:
    """This core's number in the launch grid."""
    return tracer().core


def num_programs(axes: int = 0) -> int:
    """Cores in the launch grid."""
    return tracer().cores


def program_ndim() -> int:
    """Dimensions of the launch grid: 1 on two cores, else 0."""
    return int(tracer().cores > 1)


def _bounds(lower: Any, upper: Any, step: Any) -> None:
    need(isinstance(step, int) and step > 0, "loop", "a step is a positive compile-time integer; got {!r}", step)
    good = builtins.all(isinstance(b, (int, VirtualRegister)) for b in (lower, upper))
    need(good, "loop", "bounds are integers or registers (nisa.register_load); got {!r}, {!r}", lower, upper)


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[VirtualRegister], Any], step: int = 1) -> None:
    """A loop on the device: body_fun(i) is traced once.

    Args:
        lower, upper: the counter goes from lower to below upper; integers, registers or scalars.
        body_fun: gets the counter, a scalar (a register where a bound is one), and returns nothing.
        step: a positive compile-time integer.
    """
    _bounds(lower, upper, step)
    registers = any(type(bound) is VirtualRegister for bound in (lower, upper))
    counter = VirtualRegister if registers else NkiScalar
    with tracer().loop(counter, lower=lower, upper=upper, step=step) as loop:
        need(body_fun(loop.counter) is None, "loop", "a fori_loop body returns nothing; carry state in SBUF or HBM")


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """A loop on the device while a register is not zero; the body receives it and returns the next one."""
    need(isinstance(init, VirtualRegister), "loop", "while_loop: init is a register; got {!r}", init)
    with tracer().loop(condition=init) as loop:
        loop.result = body_fun(loop.counter)
        need(isinstance(loop.result, VirtualRegister), "loop", "the body returns a register; got {!r}", loop.result)


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """NKI 0.6's form of fori_loop: `for i in nl.dynamic_range(n)` runs its body on the device (0.7 removed it)."""
    start, stop = (0, start) if stop is None else (start, stop)
    _bounds(start, stop, step)
    with tracer().loop(lower=start, upper=stop, step=step) as loop:
        tracer().broken = loop.where
        yield loop.counter  # a `break` never comes back here
        tracer().broken = None


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    meant = errors.near(name, globals())
    unsupported(f"nl.{name}", f"no name that nki-sim models{meant}")
