"""nki.language: tensors, memories, dtypes, operators, the grid and loops on the device."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from nki_sim import dtypes, limits
from nki_sim.dtypes import DType, as_dtype
from nki_sim.errors import refuse, unsupported
from nki_sim.memory import check_address
from nki_sim.ops import OPS, Op
from nki_sim.program import tracer
from nki_sim.rules import rule
from nki_sim.tensor import DynamicSlice, MemoryRegion, NkiTensor, VirtualRegister

sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
private_hbm, shared_hbm = MemoryRegion.private_hbm, MemoryRegion.shared_hbm
hbm = private_hbm
ds = DynamicSlice
affine_range = sequential_range = static_range = range
globals().update(OPS)
globals().update({name: DType(name) for name in (*dtypes.FLOATS, *dtypes.INTS, *dtypes.UNSUPPORTED)})
bool_ = DType("bool")


class NKIObject:
    """Base of configuration objects: fields by keyword."""

    def __init__(self, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


class _TileSize(NKIObject):
    """Sizes of trn2."""

    pmax = limits.PARTITIONS
    psum_fmax = psum_bank_fmax = limits.PSUM_BANK_BYTES // 4
    psum_bank_fmax_bytes = limits.PSUM_BANK_BYTES
    psum_num_banks = limits.PSUM_BANKS
    psum_min_align, sbuf_min_align = 4, 1
    gemm_stationary_fmax = limits.STATIONARY_FREE
    gemm_moving_fmax = limits.MOVING_FREE
    bn_stats_fmax = limits.BN_STATS_FREE
    sbuf_fmax_bytes = total_available_sbuf_size = limits.SBUF_BYTES - limits.SBUF_RESERVED
    sbuf_fmax = sbuf_fmax_bytes // 4
    sbuf_size_bytes = limits.PARTITIONS * limits.SBUF_BYTES


tile_size = _TileSize()


def is_hbm(buffer: MemoryRegion) -> bool:
    """Whether a buffer is in HBM."""
    return not buffer.on_chip


def is_on_chip(buffer: MemoryRegion) -> bool:
    """Whether a buffer is SBUF or PSUM."""
    return buffer.on_chip


def is_psum(buffer: MemoryRegion) -> bool:
    """Whether a buffer is PSUM."""
    return buffer is psum


def is_sbuf(buffer: MemoryRegion) -> bool:
    """Whether a buffer is SBUF."""
    return buffer is sbuf


def ndarray(
    shape: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "", address: tuple[int, int] | None = None
) -> NkiTensor:
    """A new tensor, nothing written in it. On chip dimension 0 is the partition; `address` is (partition, byte)."""
    sizes = tuple(int(n) for n in (shape if isinstance(shape, (tuple, list)) else (shape,)))
    kind = as_dtype(dtype)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"shape: nl.ndarray({sizes}) is empty; every dimension is at least 1")
    if not isinstance(buffer, MemoryRegion):
        raise TypeError(f"buffer {buffer!r}: use nl.sbuf, nl.psum, nl.hbm or nl.shared_hbm")
    if buffer.on_chip:
        rule(
            len(sizes) >= 2,
            "shape",
            lambda: (
                f"nl.ndarray({sizes}, {buffer.value}): on-chip tensors have a partition and at least one free dimension; use ({sizes[0]}, 1)"
            ),
        )
        rule(
            sizes[0] <= limits.PARTITIONS,
            "partitions",
            lambda: (
                f"nl.ndarray({sizes}, {buffer.value}): {sizes[0]} partitions; there are {limits.PARTITIONS}. Split dimension 0 into tiles"
            ),
        )
    elif address is not None:
        raise ValueError("address: only SBUF and PSUM tensors can be placed")
    tensor = tracer().allocate(sizes, kind, buffer, name or "", tuple(address) if address is not None else None)
    if address is not None:
        check_address(tensor.storage)
    if buffer is psum:
        rule(
            tensor.storage.pitch <= limits.PSUM_BANKS * limits.PSUM_BANK_BYTES,
            "capacity",
            lambda: (
                f"{tensor.storage} needs {tensor.storage.pitch} bytes per partition; PSUM has {limits.PSUM_BANKS} banks of {limits.PSUM_BANK_BYTES}"
            ),
        )
    return tensor


def zeros(shape: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A new tensor of zeros (ndarray and memset)."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A new tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


def full(shape: Any, fill_value: float, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A new on-chip tensor holding one value."""
    from nki_sim.isa import memset

    tensor = ndarray(shape, dtype, buffer, name)
    memset(tensor, fill_value)
    return tensor


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with the values of an HBM tensor (ndarray and dma_copy)."""
    from nki_sim.isa import dma_copy

    tensor = ndarray(src.shape if src.ndim > 1 else (1, *src.shape), dtype or src.dtype)
    dma_copy(tensor, src)
    return tensor


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Copy an SBUF tile to HBM (dma_copy)."""
    from nki_sim.isa import dma_copy

    dma_copy(dst, value)


def shared_constant(constant: Any) -> NkiTensor:
    """Data compiled into the program, in shared HBM: a numpy array or the path of a .npy file."""
    array = np.load(constant) if isinstance(constant, (str, Path)) else np.asarray(constant)
    return tracer().allocate(array.shape, as_dtype(array.dtype), shared_hbm, "constant", constant=array)


def shared_identity_matrix(n: int, dtype: Any = "uint8", dst: NkiTensor | None = None) -> NkiTensor:
    """An n x n identity in SBUF."""
    from nki_sim.isa import dma_copy

    kind = as_dtype(dtype)
    tile = dst if dst is not None else ndarray((n, n), kind, sbuf)
    dma_copy(tile, shared_constant(np.eye(n, dtype=dtypes.NUMPY[kind])))
    return tile


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Print a tensor's values when the program gets there."""
    from nki_sim.isa.control import device_print as instruction

    instruction(tensor, print_prefix)


def program_id(axis: int = 0) -> int:
    """This core's number in the launch grid."""
    return tracer().core


def num_programs(axes: int = 0) -> int:
    """Cores in the launch grid."""
    return tracer().cores


def program_ndim() -> int:
    """Dimensions of the launch grid: 1 on two cores, else 0."""
    return 1 if tracer().cores > 1 else 0


def _bounds(what: str, lower: Any, upper: Any, step: Any) -> None:
    if not isinstance(step, int) or step < 1:
        refuse("loop", f"{what}: step must be a positive compile-time integer; got {step!r}")
    for bound in (lower, upper):
        if not isinstance(bound, (int, VirtualRegister)):
            raise TypeError(
                f"{what}: bounds are integers or registers (nisa.register_load puts a tensor's value in one); got {bound!r}"
            )


def fori_loop(
    lower: int | VirtualRegister,
    upper: int | VirtualRegister,
    body_fun: Callable[[VirtualRegister], None],
    step: int = 1,
) -> None:
    """A loop on the device: body_fun(i) is traced once, with the counter in a register."""
    _bounds("fori_loop", lower, upper, step)
    with tracer().loop(lower=lower, upper=upper, step=step) as loop:
        if body_fun(loop.counter) is not None:
            refuse("loop", "fori_loop: the body returned a value; carried state goes through SBUF or HBM")


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """A loop on the device while a register is not zero; the body receives it and returns the next one."""
    if not isinstance(init, VirtualRegister):
        raise TypeError(f"while_loop: init is a register; got {init!r}")
    with tracer().loop(condition=init) as loop:
        loop.result = body_fun(loop.counter)
        if not isinstance(loop.result, VirtualRegister):
            refuse("loop", f"while_loop: the body must return the next condition register; got {loop.result!r}")


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """NKI 0.6's form of fori_loop: `for i in nl.dynamic_range(n)` runs its body on the device (0.7 removed it)."""
    start, stop = (0, start) if stop is None else (start, stop)
    _bounds("dynamic_range", start, stop, step)
    with tracer().loop(lower=start, upper=stop, step=step) as loop:
        try:
            yield loop.counter
        except GeneratorExit:
            refuse(
                "loop", "a dynamic_range body cannot break, return or raise: it is traced once and runs on the device"
            )


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    unsupported(f"nl.{name}", "not modelled by nki-sim")


def __dir__() -> list[str]:
    return sorted(n for n, v in globals().items() if not n.startswith("_") and not isinstance(v, Op) or n in OPS)
