"""Data types: NKI's names are strings; numpy and ml_dtypes give their bits, and conversions round as the engines do."""

import ml_dtypes
import numpy as np

from nki_sim.errors import kernel_line, unsupported


class DType(str):
    """An NKI dtype: a string such as "bfloat16", as in the real package; call it to convert a Python number."""

    __slots__ = ()

    def __call__(self, value: object) -> object:
        return NUMPY[self].type(value)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return NUMPY[self].itemsize


FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "float8_e4m3fn")
INTS = ("int32", "uint32", "int16", "uint16", "int8", "uint8")
NUMPY = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in (*FLOATS, *INTS, "bool")}
# Known by name only: the first packs for Trn3's MX instructions, the second is a matmul input mode.
UNSUPPORTED = ("float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4", "float8_e8m0fnu", "tfloat32")


def as_dtype(value: object) -> DType:
    """The NKI dtype of a name, a numpy, ml_dtypes or torch dtype."""
    if isinstance(value, DType) and value in NUMPY:
        return value
    name = getattr(value, "__name__", str(value)).removeprefix("torch.")
    if name in UNSUPPORTED:
        unsupported(name, "this dtype is not modelled (Trn3's MX formats and tfloat32 are out of scope)")
    if name not in NUMPY:
        raise ValueError(f"dtype {value!r} is not an NKI dtype; use one of {', '.join(NUMPY)} [{kernel_line()}]")
    return DType(name)


def f32(x: np.ndarray) -> np.ndarray:
    """What an engine's datapath sees: everything is float32 inside."""
    return x if x.dtype == np.float32 else x.astype(np.float32)


def cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert as the engines do: floats round to nearest even (beyond range: inf where the format has one, else its
    largest value), integers round to nearest even and saturate (NaN becomes 0)."""
    if x.dtype == dtype or x.dtype.kind == "b":
        return x.astype(dtype, copy=False)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        if x.dtype.kind not in "iub":
            x = np.nan_to_num(np.rint(x.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
        return np.clip(x, info.min, info.max).astype(dtype)
    if dtype.kind == "b":
        return x != 0
    with np.errstate(over="ignore", invalid="ignore"):
        x = f32(x)
        if dtype == ml_dtypes.float8_e4m3fn:  # no inf in this format: saturate
            x = np.clip(x, -448, 448)
        return x.astype(dtype)
