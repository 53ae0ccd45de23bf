"""The records of a DCP checkpoint's `.metadata`, without importing torch.distributed.checkpoint.

That import takes seconds (it brings in most of torch.distributed), and reading `.metadata` with stand-ins
means that not even torch's own classes run code on what a file says. Names, fields and pickled form are those
of torch (torch/distributed/checkpoint/metadata.py and filesystem.py); a test compares what is written here
with what torch writes. `to_pickle` writes them under torch's names, so that torch reads them back as its own.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field
from typing import Any

import torch

from .tensors import MAX_DIMS

__all__ = [
    "RECORDS",
    "Bytes",
    "Chunk",
    "Index",
    "Metadata",
    "Properties",
    "StorageInfo",
    "StorageMeta",
    "Tensor",
    "are_sizes",
    "as_sizes",
    "checked_sizes",
    "to_pickle",
]


@dataclass
class Metadata:
    """Everything: what each name is, and where its bytes are."""

    state_dict_metadata: dict[str, Any]
    planner_data: Any = None
    storage_data: Any = None
    storage_meta: Any = None
    version: str | None = None


@dataclass
class Chunk:
    """A box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass
class Tensor:
    """A tensor and the boxes it was saved in."""

    properties: Any
    size: tuple[int, ...]
    chunks: list[Chunk]


@dataclass
class Properties:
    """Dtype; the other fields are deprecated in torch and written with their defaults."""

    dtype: Any = None

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]

    def __getstate__(self) -> tuple[Any, ...]:
        return self.dtype, torch.strided, False, MemoryFormat(0), False


@dataclass
class Bytes:
    """A pickled object; never read."""


@dataclass
class MemoryFormat:
    """torch's enum of memory formats; 0 is contiguous."""

    value: int

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryFormat, (self.value,)


@dataclass(frozen=True)
class Index:
    """Key of a chunk: its tensor's name and where it begins."""

    fqn: str
    offset: Any = None
    index: int | None = field(hash=False, compare=False, default=None)


@dataclass
class StorageInfo:
    """The place of a chunk's bytes."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if v is not None}


@dataclass
class StorageMeta:
    """Ids of the save; of no use to a reader."""

    checkpoint_id: Any = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_TORCH_NAMES: dict[type, tuple[str, str]] = {
    Metadata: (_METADATA, "Metadata"),
    Tensor: (_METADATA, "TensorStorageMetadata"),
    Chunk: (_METADATA, "ChunkStorageMetadata"),
    Properties: (_METADATA, "TensorProperties"),
    Bytes: (_METADATA, "BytesStorageMetadata"),
    MemoryFormat: (_METADATA, "_MEM_FORMAT_ENCODING"),
    Index: (_METADATA, "MetadataIndex"),
    StorageMeta: (_METADATA, "StorageMeta"),
    StorageInfo: (_FILESYSTEM, "_StorageInfo"),
}


def as_sizes(values: Any = ()) -> tuple[Any, ...]:
    """Stands in for torch.Size. Bounded, because a pickle can name one long list a thousand times."""
    if len(values) > MAX_DIMS:
        raise ValueError(f"a shape of {len(values)} dimensions; up to {MAX_DIMS} are read")
    return tuple(values)


def are_sizes(values: Any) -> bool:
    """Whether `values` are sizes or offsets of a tensor: a short tuple of whole numbers."""
    return isinstance(values, tuple) and len(values) <= MAX_DIMS and all(type(v) is int and v >= 0 for v in values)


def checked_sizes(values: Any) -> tuple[int, ...]:
    """Sizes or offsets as a tuple of numbers; TypeError for anything else."""
    values = tuple(values) if isinstance(values, list) else values
    if not are_sizes(values):
        raise TypeError(f"a {type(values).__name__} where up to {MAX_DIMS} sizes are expected")
    result: tuple[int, ...] = values
    return result


def _forgotten(*parts: Any) -> None:
    """Stands in for what a reader has no use for: the path it was saved under, the layout."""


RECORDS: dict[tuple[str, str], Any] = {name: record for record, name in _TORCH_NAMES.items()}
RECORDS["torch", "Size"] = as_sizes
RECORDS["torch.serialization", "_get_layout"] = _forgotten
for _path in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
    RECORDS["pathlib", _path] = RECORDS["pathlib._local", _path] = _forgotten


class _Pickler(pickle._Pickler):
    """Writes our records under torch's names. The pickler in C would import torch's module to verify them."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        name = _TORCH_NAMES.get(obj) if isinstance(obj, type) else None
        if name is None:
            super().save(obj, save_persistent_id)  # type: ignore[misc]
        elif id(obj) in self.memo:  # type: ignore[attr-defined]
            self.write(self.get(self.memo[id(obj)][0]))  # type: ignore[attr-defined]
        else:
            self.write(pickle.GLOBAL + f"{name[0]}\n{name[1]}\n".encode())  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]


def to_pickle(metadata: Metadata) -> bytes:
    """`.metadata` as torch would have written it."""
    text = io.BytesIO()
    _Pickler(text, protocol=2).dump(metadata)
    return text.getvalue()
