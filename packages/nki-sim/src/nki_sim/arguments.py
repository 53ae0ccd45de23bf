"""Arguments of a kernel: which are arrays, their bytes, and writing results back; numpy and torch, torch never imported."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from nki_sim.dtypes import DType, as_dtype
from nki_sim.tensor import NkiTensor


def is_array(value: Any) -> bool:
    """Whether an argument becomes a tensor: it has a shape and a dtype."""
    return not isinstance(value, (NkiTensor, np.generic, type)) and hasattr(value, "shape") and hasattr(value, "dtype")


def is_torch(value: Any) -> bool:
    """Whether a value is a torch tensor (or a subclass of one)."""
    return any(t.__module__ == "torch" and t.__name__ == "Tensor" for t in type(value).__mro__)


def walk(value: Any, replace: Callable[[Any], Any]) -> Any:
    """`value` with every array in it replaced; containers and configuration objects are rebuilt around them."""
    if is_array(value):
        return replace(value)
    if isinstance(value, inspect.BoundArguments):
        return inspect.BoundArguments(value.signature, {k: walk(v, replace) for k, v in value.arguments.items()})
    if type(value) in (list, tuple):
        return type(value)(walk(v, replace) for v in value)
    if isinstance(value, dict):
        return {k: walk(v, replace) for k, v in value.items()}
    inner = getattr(value, "__dict__", None)
    if isinstance(inner, dict) and not callable(value) and any(is_array(v) for v in inner.values()):
        copy = object.__new__(type(value))
        copy.__dict__.update({k: walk(v, replace) for k, v in inner.items()})
        return copy
    return value


def flatten(value: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts."""
    value = list(value.values()) if isinstance(value, dict) else [] if value is None else value
    return [x for v in value for x in flatten(v)] if isinstance(value, (list, tuple)) else [value]


def describe(bound: inspect.BoundArguments) -> str:
    """Arguments as a program is specialised for them: shapes and dtypes for arrays, everything else as it prints."""
    return str(dict(walk(bound, lambda a: f"{as_dtype(a.dtype)}{list(a.shape)}").arguments))


def to_bytes(array: Any, copy: bool) -> np.ndarray:
    """An argument's bytes; a copy when the kernel writes it."""
    if is_torch(array):
        # .numpy() forbids resizing a storage for good, and FSDP frees gathered weights so: it gets a copy's
        array = array.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8).clone().numpy()
    if not isinstance(array, np.ndarray):
        raise TypeError(f"a kernel runs on numpy arrays or torch tensors; got {array!r}")
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return raw.copy() if copy else raw


def to_torch(raw: np.ndarray, dtype: DType, shape: tuple[int, ...]) -> Any:
    """A torch tensor of these bytes."""
    torch = sys.modules["torch"]
    if not hasattr(torch, dtype):
        raise TypeError(f"output dtype {dtype} does not exist in torch; convert it in the kernel, or pass numpy arrays")
    return torch.from_numpy(raw.copy()).view(getattr(torch, dtype)).reshape(shape)


def store_back(array: Any, raw: np.ndarray) -> None:
    """Put what the kernel wrote into the caller's array."""
    if is_torch(array):
        array.detach().copy_(to_torch(raw, as_dtype(array.dtype), tuple(array.shape)))
    elif array.flags.writeable:
        array[...] = raw.view(array.dtype).reshape(array.shape)
    else:
        raise ValueError("the kernel writes to an argument that is read-only; pass a writable array")
