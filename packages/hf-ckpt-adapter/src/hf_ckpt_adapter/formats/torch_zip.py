"""The zip that `torch.save` makes of one tensor: how a DCP file holds each chunk. Written and read without building it.

Written front to back, from blocks of bytes, so that a tensor never has to be in memory (torch's own writer needs whole
tensors). Read down to the place of its storage record, which is stored without compression, so that rows are read from
there. The small description inside is a pickle, read by `safe_unpickle`.
"""

from __future__ import annotations

import collections
import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from .dcp_records import as_sizes, checked_sizes
from .files import pread_exactly
from .safe_pickle import safe_unpickle

__all__ = ["Storage", "find_storage", "tensor_zip"]

MAX_DESCRIPTION = 64 << 10
MAX_DIRECTORY = 1 << 20  # of a chunk's zip, which has half a dozen entries
# Where torch.save puts a storage record, so that it could be mapped (torch.serialization, storage alignment).
ALIGNMENT = 64
_LOCAL_HEADER = 30  # bytes of a zip member's own header before its name and extra field

# Typed storages by the name under which torch.save pickles them; newer dtypes come as untyped ones.
STORAGES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


@dataclass(frozen=True)
class Storage:
    """A tensor's storage record in a file: absolute offset, bytes, and how the tensor lies in it (in elements).

    `crc` is the CRC-32 of the record, as its zip has it.
    """

    offset: int
    nbytes: int
    first: int
    stride: tuple[int, ...]
    contiguous: bool
    crc: int

    def intact(self, descriptor: int) -> bool:
        """Whether the record's bytes are those that were saved, by its CRC."""
        crc, data = 0, memoryview(bytearray(min(self.nbytes, 1 << 20)))
        for start in range(0, self.nbytes, 1 << 20):
            block = data[: min(len(data), self.nbytes - start)]
            pread_exactly(descriptor, block, self.offset + start, "a saved tensor")
            crc = zlib.crc32(block, crc)
        return crc == self.crc


@dataclass(frozen=True)
class _Description:
    """What a saved tensor says of itself."""

    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any

    @property
    def elements(self) -> int:
        """How many elements its storage must have."""
        return 1 + self.first + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie in order, without gaps."""
        step = 1
        for n, s in zip(reversed(self.size), reversed(self.stride), strict=True):
            if s != step and n != 1:
                return False
            step *= n
        return True


def find_storage(
    descriptor: int, offset: int, length: int, dtype: torch.dtype, shape: tuple[int, ...], where: str
) -> Storage:
    """Find the storage record in a saved tensor and check that it can hold what it should.

    Args:
        descriptor: an open file.
        offset: where the zip begins in it, in bytes.
        length: bytes of the zip.
        dtype: what the tensor must be.
        shape: what shape it must have.
        where: file and tensor, for messages.

    Raises:
        ValueError: it is no zip of a tensor, is compressed, is of another dtype or shape, or has too few bytes.
    """
    try:
        with zipfile.ZipFile(_FileWindow(descriptor, offset, length)) as archive:
            found, record = _read_description(archive, where)
        header = os.pread(descriptor, _LOCAL_HEADER, offset + record.header_offset)
        elements = found.elements
    except Exception as error:  # zipfile, and what a pickle describes, can fail in any way
        raise ValueError(f"{where}: not a tensor that torch.save wrote: {error}") from None
    name_bytes, extra_bytes = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    begin = record.header_offset + _LOCAL_HEADER + name_bytes + extra_bytes
    sound = (
        record.compress_type == zipfile.ZIP_STORED
        and header[:4] == b"PK\3\4"
        and begin + record.file_size <= length
        and found.size == shape
        and found.dtype == dtype
        and elements * dtype.itemsize <= record.file_size
    )
    if not sound:
        saved = found.dtype if isinstance(found.dtype, torch.dtype) else type(found.dtype).__name__
        raise ValueError(
            f"{where}: saved as {saved} {list(found.size)} in {record.file_size} bytes; the metadata "
            f"says {dtype} {list(shape)}"
        )
    return Storage(offset + begin, record.file_size, found.first, found.stride, found.contiguous, record.CRC)


def _read_description(archive: zipfile.ZipFile, where: str) -> tuple[_Description, zipfile.ZipInfo]:
    """The description, and the member that is the storage."""
    members = {m.filename.split("/", 1)[-1]: m for m in archive.infolist()}
    description, record = members["data.pkl"], members["data/0"]
    order = members.get("byteorder")
    if description.file_size > MAX_DESCRIPTION or (order and order.file_size > 16):
        raise ValueError("its description is too large")
    if order and archive.read(order) != b"little":
        raise ValueError("it was saved on a big-endian machine")
    _, first, size, stride, dtype = safe_unpickle(
        archive.read(description), _tensor_classes(), where, lambda pid: ("storage", *pid)
    )
    (first,) = checked_sizes((first,))
    return _Description(first, checked_sizes(size), checked_sizes(stride), dtype), record


def _tensor_classes() -> dict[tuple[str, str], Any]:
    """What the description of a saved tensor may name; tensors are described, not built."""

    def rebuild(storage: Any, first: int, size: Any, stride: Any, *rest: Any) -> tuple[Any, ...]:
        return storage, first, size, stride, storage[2]

    def rebuild_v3(storage: Any, first: int, size: Any, stride: Any, *rest: Any) -> tuple[Any, ...]:
        return storage, first, size, stride, rest[2]

    allowed: dict[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_tensor_v2"): rebuild,
        ("torch._utils", "_rebuild_tensor_v3"): rebuild_v3,
        ("collections", "OrderedDict"): lambda: None,  # the hooks of a tensor: none
        ("torch.storage", "UntypedStorage"): None,
        ("torch", "Size"): as_sizes,
    }
    allowed.update({("torch", name): dtype for name, dtype in STORAGES.items()})
    return allowed


class _FileWindow(io.RawIOBase):
    """A read-only window on a file, for zipfile."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        size = left if size < 0 else min(size, left)
        if size > MAX_DIRECTORY:
            raise ValueError(f"its zip has a directory of {size} bytes; up to {MAX_DIRECTORY} are read")
        data = os.pread(self._descriptor, size, self._offset + self._at)
        self._at += len(data)
        return data


@contextmanager
def tensor_zip(
    file: BinaryIO, dtype: torch.dtype, shape: tuple[int, ...]
) -> Iterator[tuple[Callable[[memoryview], None], Callable[[], int]]]:
    """Write one saved tensor to `file`, front to back.

    Args:
        file: open for writing; never sought in.
        dtype: the tensor's dtype.
        shape: the tensor's shape.

    Returns:
        A function that takes the tensor's bytes in order, and one that tells how many bytes the zip has had so far (all
        of them once the block has ended).
    """
    out = _Forward(file)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_member("data.pkl"), _description_bytes(dtype, shape))
        archive.writestr(_member(".format_version"), "1")
        archive.writestr(_member(".storage_alignment"), str(ALIGNMENT))
        archive.writestr(_member("byteorder"), "little")
        record = _member("data/0")
        record.file_size = torch.Size(shape).numel() * dtype.itemsize
        # An extra field of zeros moves the data to the next multiple of ALIGNMENT.
        begin = out.written + _LOCAL_HEADER + len(record.filename) + 4
        padding = -begin % ALIGNMENT
        record.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
        with archive.open(record, "w") as data:
            yield data.write, lambda: out.written  # type: ignore[misc]
        archive.writestr(_member("version"), "3\n")


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


class _PickledStorage:
    """Stands for a storage while a tensor's description is pickled."""

    def __init__(self, kind: Any, elements: int) -> None:
        self.kind, self.elements = kind, elements


class _PickledTensor:
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
            storage = _PickledStorage(getattr(torch, name), count)
            return torch._utils._rebuild_tensor_v2, (storage, *rest)
        storage = _PickledStorage(torch.UntypedStorage, count * self.dtype.itemsize)
        return torch._utils._rebuild_tensor_v3, (storage, *rest, self.dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, "0", "cpu", obj.elements) if isinstance(obj, _PickledStorage) else None


def _description_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    text = io.BytesIO()
    _Pickler(text, protocol=2).dump(_PickledTensor(dtype, shape))
    return text.getvalue()
