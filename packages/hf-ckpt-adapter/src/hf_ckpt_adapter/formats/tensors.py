"""What a stored tensor is, and what can be read from: the one interface between formats and conversion.

A source lists tensors and reads *rows*: a tensor's leading dimensions flattened, its last dimension kept
whole, so [E, F, D] has E*F rows of D elements, [D] has D rows of one, a scalar one row of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "MAX_DIMS",
    "WEIGHT_DTYPES",
    "MemorySource",
    "TensorInfo",
    "TensorSource",
    "buffer",
    "dtype_named",
]

# The names that safetensors gives to dtypes (its README, "Format").
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
# What weights may be cast to.
WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_DIMS = 16  # of a tensor that is read; a weight has up to three
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def dtype_named(name: str) -> torch.dtype:
    """The dtype called `bfloat16`, `torch.bfloat16` or `BF16`; ValueError for any other word."""
    word = name.removeprefix("torch.")
    for safetensors_name, dtype in DTYPES.items():
        if word in (safetensors_name, str(dtype).removeprefix("torch.")):
            return dtype
    raise ValueError(f"unknown dtype {name!r}; expected one of {', '.join(str(d)[6:] for d in DTYPES.values())}")


@dataclass(frozen=True)
class TensorInfo:
    """Dtype and shape of a stored tensor, and the file that holds it (empty for memory)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str = ""

    @property
    def cols(self) -> int:
        """Elements in a row."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def rows(self) -> int:
        """Rows: the leading dimensions flattened."""
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.cols * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorSource(Protocol):
    """Something that holds named tensors: a folder of safetensors, a DCP step folder, a dict."""

    @property
    def kind(self) -> str:
        """`hub`, `dcp` or `memory`, for reports."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor that could hold model weights, with nothing read yet."""
        ...

    @property
    def left_out(self) -> Mapping[str, int]:
        """State that is not model weights, by kind (`optimizer`, ...), with the number of its entries."""
        ...

    def read_rows(self, name: str, row: int, out: memoryview) -> None:
        """Fill `out` with the bytes of whole rows of `name` from `row` on."""
        ...

    def close(self) -> None:
        """Close open files."""
        ...


def buffer(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[memoryview, torch.Tensor]:
    """New zeroed memory, as bytes and as a tensor of `shape`. `Tensor.numpy` would need numpy."""
    data = bytearray(math.prod(shape) * dtype.itemsize)
    tensor = torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
    return memoryview(data), tensor


class MemorySource:
    """Tensors in a dict, for tests and for state that is already in memory."""

    kind = "memory"

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state
        self.tensors = {name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in state.items()}
        self.left_out: dict[str, int] = {}

    def read_rows(self, name: str, row: int, out: memoryview) -> None:
        """Fill `out` with the bytes of whole rows of `name` from `row` on."""
        if out:
            info = self.tensors[name]
            rows = self._state[name].detach().reshape(info.rows, info.cols)
            target = torch.frombuffer(out, dtype=info.dtype).view(-1, info.cols)
            target.copy_(rows[row : row + len(target)])

    def close(self) -> None:
        """Nothing is open."""
