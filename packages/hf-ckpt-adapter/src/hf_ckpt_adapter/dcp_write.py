"""Write a torch DCP checkpoint as a stream: files of tensor chunks, then `.metadata`.

Each chunk is the zip that `torch.save` would write (stored, not compressed), produced front to back from
blocks of bytes, so that a tensor never has to be in memory. A tensor larger than CHUNK is cut along its first
dimension into several chunks, as if that many ranks had saved it: whoever loads it reads pieces of that size
too. Two names may point at the same bytes, which is how a tied head costs nothing.

Torch's own writer needs whole tensors.
"""

from __future__ import annotations

import collections
import io
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from .dcp_io import STORAGES
from .dcp_records import Chunk, Index, Metadata, Properties, StorageInfo, StorageMeta, Tensor, to_pickle
from .tensors import TensorInfo

__all__ = ["CHUNK", "SavedChunk", "chunk_starts", "metadata_bytes", "tensor_zip"]

CHUNK = 64 << 20
VERSION = "1.0.0"  # CURRENT_DCP_VERSION of torch 2.14
# Where torch.save puts a storage record, so that it could be mapped (torch.serialization, storage alignment).
ALIGNMENT = 64


@dataclass(frozen=True)
class SavedChunk:
    """A chunk on disk: rows [start, start + count) of the first dimension, and its bytes in `file`."""

    start: int
    count: int
    file: str
    offset: int
    length: int


def chunk_starts(info: TensorInfo) -> list[tuple[int, int]]:
    """First index and length of each chunk along a tensor's first dimension; [(0, 1)] for a scalar."""
    if not info.shape:
        return [(0, 1)]
    per_index = info.nbytes // info.shape[0]
    step = max(1, CHUNK // per_index)
    return [(start, min(step, info.shape[0] - start)) for start in range(0, info.shape[0], step)]


class _Storage:
    """Stands for a storage while a tensor's description is pickled."""

    def __init__(self, kind: Any, elements: int) -> None:
        self.kind, self.elements = kind, elements


class _Description:
    """Pickles to what torch.save writes for a contiguous CPU tensor that needs no gradient."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape

    def __reduce__(self) -> tuple[Any, ...]:
        count = torch.Size(self.shape).numel()
        stride: list[int] = []
        step = 1
        for size in reversed(self.shape):
            stride.insert(0, step)
            step *= size
        name = next((n for n, d in STORAGES.items() if d == self.dtype), None)
        rest: tuple[Any, ...] = (0, tuple(self.shape), tuple(stride), False, collections.OrderedDict())
        if name is not None:
            storage = _Storage(getattr(torch, name), count)
            return torch._utils._rebuild_tensor_v2, (storage, *rest)
        storage = _Storage(torch.UntypedStorage, count * self.dtype.itemsize)
        return torch._utils._rebuild_tensor_v3, (storage, *rest, self.dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, "0", "cpu", obj.elements) if isinstance(obj, _Storage) else None


def _description(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    text = io.BytesIO()
    _Pickler(text, protocol=2).dump(_Description(dtype, shape))
    return text.getvalue()


class _Forward(io.RawIOBase):
    """A file that can only be written forward, counting: zipfile then never seeks back."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.written = file, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._file.write(view)
        self.written += view.nbytes
        return view.nbytes


def _member(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"archive/{name}")  # dated 1980, so that the same tensors give the same bytes


@contextmanager
def tensor_zip(
    file: BinaryIO, dtype: torch.dtype, shape: tuple[int, ...]
) -> Iterator[tuple[Callable[[memoryview], None], Callable[[], int]]]:
    """Write one saved tensor to `file`. Gives a function that takes the tensor's bytes in order, and one that
    tells how many bytes the zip has had so far (all of them once the block has ended)."""
    out = _Forward(file)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_member("data.pkl"), _description(dtype, shape))
        archive.writestr(_member(".format_version"), "1")
        archive.writestr(_member(".storage_alignment"), str(ALIGNMENT))
        archive.writestr(_member("byteorder"), "little")
        record = _member("data/0")
        record.file_size = torch.Size(shape).numel() * dtype.itemsize
        # An extra field of zeros moves the data to the next multiple of ALIGNMENT.
        begin = out.written + 30 + len(record.filename) + 4
        padding = -begin % ALIGNMENT
        record.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
        with archive.open(record, "w") as data:
            yield data.write, lambda: out.written  # type: ignore[misc]
        archive.writestr(_member("version"), "3\n")


def metadata_bytes(
    tensors: Mapping[str, TensorInfo], chunks: Mapping[str, Sequence[SavedChunk]], aliases: Mapping[str, str]
) -> bytes:
    """`.metadata` for these tensors; `aliases` are further names of them."""
    described: dict[str, Any] = {}
    storage: dict[Index, StorageInfo] = {}
    for name, tensor in {**{n: n for n in tensors}, **aliases}.items():
        info = tensors[tensor]
        boxes = []
        for index, chunk in enumerate(chunks[tensor]):
            begin = (chunk.start, *(0 for _ in info.shape[1:])) if info.shape else ()
            sizes = (chunk.count, *info.shape[1:]) if info.shape else ()
            boxes.append(Chunk(torch.Size(begin), torch.Size(sizes)))
            key = Index(name, torch.Size(begin), index)
            storage[key] = StorageInfo(chunk.file, chunk.offset, chunk.length)
        described[name] = Tensor(Properties(info.dtype), torch.Size(info.shape), boxes)
    names = {name: (name,) for name in described}
    return to_pickle(Metadata(described, names, storage, StorageMeta(), VERSION))
