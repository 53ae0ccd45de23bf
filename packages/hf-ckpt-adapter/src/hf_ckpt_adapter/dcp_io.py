"""Read a torch DCP checkpoint (a TorchTitan `step-N` folder) tensor by tensor, by rows, with no model built.

Two things in such a folder are pickles: `.metadata`, and the small description inside each saved tensor. Both
are read by `safe_unpickle`, which knows a fixed list of classes and opcodes. Byte items (optimizer groups,
data loader, trainer state) are pickles of anything, and are never read at all.

A saved tensor chunk is a zip as `torch.save` writes it, stored without compression, so the rows of a chunk
are read with `pread` straight from its storage record. Checkpoints saved by any number of ranks under any
sharding are a set of boxes per tensor; a row is put together from the boxes that touch it.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch

from .dcp_records import RECORDS, Index, Metadata, Tensor, as_sizes
from .safetensors_io import MAX_DIMS, OpenFiles, pread_exactly, regular_file
from .tensors import TensorInfo, buffer

__all__ = ["DcpFolder", "is_dcp", "read_metadata", "safe_unpickle"]

METADATA = ".metadata"
MAX_METADATA = 512 << 20
MAX_DESCRIPTION = 64 << 10
MAX_DIRECTORY = 1 << 20  # of a chunk's zip, which has half a dozen entries
# Roots of state that is not the model, as TorchTitan's checkpointer names them
# (components/checkpointer/base.py).
NOT_MODEL = ("optimizer", "lr_scheduler", "dataloader", "train_state", "trainer")

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

# What pickles of plain records of names, numbers, tuples, lists and dicts consist of.
_OPCODES = """
    PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET POP
    NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
    GLOBAL STACK_GLOBAL REDUCE BUILD NEWOBJ BINPERSID
""".split()  # noqa: SIM905
_CODES = [getattr(pickle, name)[0] for name in _OPCODES]


class _Refused(ValueError):
    """A refusal that already says what and where."""


class _Opcodes(dict[int, Callable[[Any], None]]):
    """Opcode -> what reads it."""

    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise ValueError(f"opcode {bytes([code])!r} is not among those that records need")


class _Unpickler(pickle._Unpickler):
    """The standard library's reader in Python, with the opcodes above and no others.

    A pickle can do harm with allowed classes too, and does not here: BUILD changes records, never a class or a
    function; a key is a name or a plain `Index`, since the hash of tuples in tuples in tuples can take forever.
    """

    def __init__(
        self,
        data: bytes,
        allowed: Mapping[tuple[str, str], Any],
        what: str,
        persistent_load: Callable[[Any], Any] | None,
    ) -> None:
        file = io.BytesIO(data)
        super().__init__(file)
        self._allowed, self._what, self._persistent_load = allowed, what, persistent_load
        # The library's own loop reads through a Python function for each byte; this is as it is otherwise.
        self.read, self.readline = file.read, file.readline
        self.metastack: list[list[Any]] = []
        self.stack: list[Any] = []
        self.append = self.stack.append

    def load(self) -> Any:
        try:
            while True:
                self.dispatch[self.read(1)[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value

    def load_frame(self) -> None:
        self.read(8)  # a hint for readers that buffer

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._allowed:
            return self._allowed[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None  # getattr would import what torch imports late
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _Refused(f"{self._what} wants to load {module}.{name}, which no checkpoint needs. Refused.")

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent_load is None:
            raise _Refused(f"{self._what} refers to an outside object. Refused.")
        return self._persistent_load(pid)

    def load_build(self) -> None:
        target = self.stack[-2]
        if isinstance(target, type) or not is_dataclass(target):
            raise _Refused(f"{self._what} wants to change what is no record of its own. Refused.")
        super().load_build()  # type: ignore[misc]

    def load_setitem(self) -> None:
        self._check_keys(self.stack[-2:-1])
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        self._check_keys(self.stack[::2])
        super().load_setitems()  # type: ignore[misc]

    def _check_keys(self, keys: list[Any]) -> None:
        for key in keys:
            plain = type(key) is str or (
                type(key) is Index and type(key.fqn) is str and (key.offset is None or _are_sizes(key.offset))
            )
            if not plain:
                raise _Refused(f"{self._what} has a {type(key).__name__} where a name is expected. Refused.")

    dispatch = _Opcodes({code: pickle._Unpickler.dispatch[code] for code in _CODES})
    dispatch[pickle.FRAME[0]] = load_frame
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems


def safe_unpickle(
    data: bytes,
    allowed: Mapping[tuple[str, str], Any],
    what: str,
    persistent_load: Callable[[Any], Any] | None = None,
) -> Any:
    """Unpickle `data` using only the globals in `allowed` (and torch dtypes).

    Raises:
        ValueError: naming `what` and the refused class or opcode, or for a broken pickle. Memory stays
            proportional to `data`. What comes back may still be nested without end: print types of it, not values.
    """
    try:
        return _Unpickler(data, allowed, what, persistent_load).load()
    except _Refused:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise ValueError(f"{what} is broken: {type(error).__name__}: {str(error)[:200]}") from None


def is_dcp(folder: Path) -> bool:
    """Whether `folder` looks like a DCP checkpoint."""
    return (folder / METADATA).is_file()


def read_metadata(folder: Path, *, follow_symlinks: bool = False) -> Metadata:
    """The `Metadata` of a DCP folder, read through the allow-list.

    Raises:
        FileNotFoundError: no `.metadata`: not a checkpoint, or a save that never finished.
        ValueError: the file is not such a pickle.
    """
    if not is_dcp(folder):
        raise FileNotFoundError(f"{folder} has no {METADATA}: not a DCP checkpoint, or one whose save did not finish")
    path = regular_file(folder, METADATA, follow_symlinks=follow_symlinks)
    if path.stat().st_size > MAX_METADATA:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; up to {MAX_METADATA} are read")
    metadata = safe_unpickle(path.read_bytes(), RECORDS, str(path))
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path} holds a {type(metadata).__name__}, expected DCP Metadata")
    return metadata


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor: where it begins, its sizes, and where its `torch.save` zip lies."""

    begin: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class _Storage:
    """A chunk's storage record: absolute offset, bytes, and how the chunk lies in it (in elements)."""

    offset: int
    nbytes: int
    first: int
    stride: tuple[int, ...]
    contiguous: bool


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


class DcpFolder:
    """The tensors of a DCP checkpoint, read by rows.

    `tensors` are those that could be model weights; `left_out` counts optimizer, scheduler, loader and
    trainer entries, `byte_items` names what is pickled and therefore never read.

    Raises (on opening):
        ValueError: `.metadata` is hostile or contradicts the files, naming file and tensor.
        FileNotFoundError: a data file is missing.
    """

    kind = "dcp"

    def __init__(self, folder: Path, *, follow_symlinks: bool = False) -> None:
        self.folder = folder
        self.tensors: dict[str, TensorInfo] = {}
        self.left_out: dict[str, int] = {}
        self.byte_items: list[str] = []
        self.notes: list[str] = []
        self._files = OpenFiles()
        self._paths: dict[str, Path] = {}
        self._chunks: dict[str, list[_Chunk]] = {}
        self._storages: dict[_Chunk, _Storage] = {}
        self._dense: tuple[_Chunk, torch.Tensor] | None = None
        metadata = read_metadata(folder, follow_symlinks=follow_symlinks)
        described, storage = (getattr(metadata, field, None) for field in ("state_dict_metadata", "storage_data"))
        if not isinstance(described, dict) or not isinstance(storage, dict):
            raise ValueError(f"{folder / METADATA}: state_dict_metadata and storage_data must be dicts")
        for name, entry in described.items():
            if not isinstance(name, str):
                raise ValueError(f"{folder / METADATA}: a {type(name).__name__} is not a name")
            root = name.split(".", 1)[0]
            if root in NOT_MODEL:
                self.left_out[root] = self.left_out.get(root, 0) + 1
            elif not isinstance(entry, Tensor):
                self.byte_items.append(name)
            else:
                try:
                    self._add(name, entry, storage, follow_symlinks)
                except (AttributeError, TypeError) as error:  # a record without the fields it should have
                    raise ValueError(f"{folder / METADATA}: tensor {name!r} is malformed: {error}") from None
        if self.byte_items:
            self.left_out["byte items"] = len(self.byte_items)

    def _add(self, name: str, entry: Any, storage: dict[Any, Any], follow_symlinks: bool) -> None:
        where = f"{self.folder / METADATA}: tensor {name!r}"
        shape, dtype = _sizes(entry.size), entry.properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{where} has a {type(dtype).__name__} for its dtype")
        chunks = []
        for chunk in entry.chunks:
            begin, sizes = _sizes(chunk.offsets), _sizes(chunk.sizes)
            inside = len(begin) == len(sizes) == len(shape) and all(
                b + n <= s for b, n, s in zip(begin, sizes, shape, strict=True)
            )
            if not inside:
                raise ValueError(f"{where}: chunk {begin}+{sizes} is not inside shape {shape}")
            info = storage.get(Index(name, begin))
            if info is None:
                raise ValueError(f"{where}: no storage is recorded for the chunk at {begin}")
            if getattr(info, "transform_descriptors", None):
                through = ", ".join(d[:40] for d in info.transform_descriptors if isinstance(d, str))
                raise ValueError(f"{where} was saved through {through}; only plain DCP files can be read")
            file, offset, length = info.relative_path, info.offset, info.length
            if type(file) is not str or type(offset) is not int or type(length) is not int:
                raise ValueError(f"{where}: its storage record does not hold a file, an offset and a length")
            if file not in self._paths:
                self._paths[file] = regular_file(self.folder, file, follow_symlinks=follow_symlinks)
            if offset < 0 or length < 0 or offset + length > self._paths[file].stat().st_size:
                raise ValueError(
                    f"{where}: bytes {offset}..{offset + length} are past the end of {file} "
                    f"({self._paths[file].stat().st_size} bytes); truncated?"
                )
            if math.prod(sizes) * dtype.itemsize > length:
                raise ValueError(f"{where}: {sizes} of {dtype} cannot be in {length} bytes of {file}")
            if math.prod(sizes):
                chunks.append(_Chunk(begin, sizes, file, offset, length))
        if sum(math.prod(c.sizes) for c in chunks) != math.prod(shape):
            raise ValueError(f"{where}: its chunks do not add up to shape {shape}; a rank's file may be missing")
        chunks.sort(key=lambda c: c.begin)
        for i, chunk in enumerate(chunks):
            for other in chunks[i + 1 :]:
                if shape and other.begin[0] >= chunk.begin[0] + chunk.sizes[0]:
                    break
                if all(
                    b < ob + on and ob < b + n
                    for b, n, ob, on in zip(chunk.begin, chunk.sizes, other.begin, other.sizes, strict=True)
                ):
                    raise ValueError(f"{where}: the chunks at {chunk.begin} and {other.begin} overlap")
        self.tensors[name] = TensorInfo(dtype, shape, chunks[0].file if len(chunks) == 1 else f"{len(chunks)} chunks")
        self._chunks[name] = chunks

    def same_bytes(self, name: str, other: str) -> bool:
        """Whether two tensors are one region of the files: a tie that was saved as such."""
        return self.tensors[name] == self.tensors[other] and self._chunks[name] == self._chunks[other]

    def _descriptor(self, file: str) -> int:
        return self._files.descriptor(self._paths[file])

    def _storage(self, chunk: _Chunk, name: str) -> _Storage:
        if chunk not in self._storages:
            self._storages[chunk] = self._open_chunk(chunk, name)
        return self._storages[chunk]

    def _open_chunk(self, chunk: _Chunk, name: str) -> _Storage:
        """Find the storage record in a chunk's zip and check that it can hold the chunk."""
        where = f"{self._paths[chunk.file]}: tensor {name!r}, chunk at {chunk.begin}"
        descriptor, dtype = self._descriptor(chunk.file), self.tensors[name].dtype
        try:
            with zipfile.ZipFile(_FileWindow(descriptor, chunk.offset, chunk.length)) as archive:
                members = {m.filename.split("/", 1)[-1]: m for m in archive.infolist()}
                description, record = members["data.pkl"], members["data/0"]
                order = members.get("byteorder")
                if description.file_size > MAX_DESCRIPTION or (order and order.file_size > 16):
                    raise ValueError("its description is too large")
                if order and archive.read(order) != b"little":
                    raise ValueError("it was saved on a big-endian machine")
                _, first, size, stride, saved_dtype = safe_unpickle(
                    archive.read(description), _tensor_classes(), where, lambda pid: ("storage", *pid)
                )
                size, stride, (first,) = _sizes(size), _sizes(stride), _sizes((first,))
                header = os.pread(descriptor, 30, chunk.offset + record.header_offset)
                last = first + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        except Exception as error:  # zipfile, and what a pickle describes, can fail in any way
            raise ValueError(f"{where}: not a tensor that torch.save wrote: {error}") from None
        begin = (
            record.header_offset
            + 30
            + int.from_bytes(header[26:28], "little")
            + int.from_bytes(header[28:30], "little")
        )
        if (
            record.compress_type != zipfile.ZIP_STORED
            or header[:4] != b"PK\3\4"
            or begin + record.file_size > chunk.length
            or tuple(size) != chunk.sizes
            or saved_dtype != dtype
            or (last + 1) * dtype.itemsize > record.file_size
        ):
            saved = saved_dtype if isinstance(saved_dtype, torch.dtype) else type(saved_dtype).__name__
            raise ValueError(
                f"{where}: saved as {saved} {list(size)} in {record.file_size} bytes; the metadata "
                f"says {dtype} {list(chunk.sizes)}"
            )
        dense, step = True, 1
        for n, s in zip(reversed(size), reversed(stride), strict=True):
            dense, step = dense and (s == step or n == 1), step * n
        return _Storage(chunk.offset + begin, record.file_size, first, tuple(stride), dense)

    def read_rows(self, name: str, row: int, out: memoryview) -> None:
        info = self.tensors[name]
        if not info.row_bytes:
            return
        rows = len(out) // info.row_bytes
        if len(info.shape) > 3:
            raise ValueError(f"{name!r} has {len(info.shape)} dimensions; up to 3 can be read by rows")
        inner, cols = info.shape[-2:] if len(info.shape) > 1 else (math.prod(info.shape), 1)
        for chunk in self._chunks[name]:
            begin, sizes = _three(chunk.begin, 0), _three(chunk.sizes, 1)
            whole = begin[1] == 0 and sizes[1] == inner
            # Rows [low, high) of the flattened tensor that this box holds, as one range or one per leading
            # index.
            ranges = (
                [(begin[0] * inner, (begin[0] + sizes[0]) * inner, 0)]
                if whole
                else [
                    (
                        (begin[0] + e) * inner + begin[1],
                        (begin[0] + e) * inner + begin[1] + sizes[1],
                        e * sizes[1],
                    )
                    for e in range(
                        max(0, row // inner - begin[0]),
                        min(sizes[0], (row + rows - 1) // inner - begin[0] + 1),
                    )
                ]
            )
            for low, high, local in ranges:
                first, last = max(low, row), min(high, row + rows)
                if first < last:
                    target = out[(first - row) * info.row_bytes : (last - row) * info.row_bytes]
                    self._read_box(name, chunk, local + first - low, last - first, begin[2], sizes[2], cols, target)

    def _read_box(
        self,
        name: str,
        chunk: _Chunk,
        local: int,
        rows: int,
        col: int,
        width: int,
        cols: int,
        out: memoryview,
    ) -> None:
        """Rows [local, local + rows) of a box, put at columns [col, col + width) of `out`."""
        storage, dtype = self._storage(chunk, name), self.tensors[name].dtype
        what = f"{self._paths[chunk.file]}: tensor {name!r}"
        if storage.contiguous:
            offset = storage.offset + (storage.first + local * width) * dtype.itemsize
            if width == cols:
                pread_exactly(self._descriptor(chunk.file), out, offset, what)
                return
            data, box = buffer(dtype, (rows, width))
            pread_exactly(self._descriptor(chunk.file), data, offset, what)
        else:
            box = self._densified(name, chunk, storage).reshape(-1, width)[local : local + rows]
        torch.frombuffer(out, dtype=dtype).view(rows, cols)[:, col : col + width] = box

    def _densified(self, name: str, chunk: _Chunk, storage: _Storage) -> torch.Tensor:
        """A chunk that was saved transposed, read whole; the latest is kept, as its rows are asked for in
        turn."""
        if self._dense is None or self._dense[0] is not chunk:
            dtype = self.tensors[name].dtype
            data, flat = buffer(dtype, (storage.nbytes // dtype.itemsize,))
            pread_exactly(self._descriptor(chunk.file), data, storage.offset, f"{chunk.file}: {name!r}")
            view = torch.as_strided(flat, chunk.sizes, storage.stride, storage.first)
            self._dense = (chunk, view.contiguous())
        return self._dense[1]

    def close(self) -> None:
        self._files.close()


def _are_sizes(values: Any) -> bool:
    return isinstance(values, tuple) and len(values) <= MAX_DIMS and all(type(v) is int and v >= 0 for v in values)


def _sizes(values: Any) -> tuple[int, ...]:
    """Sizes or offsets as a tuple of numbers; TypeError for anything else."""
    values = tuple(values) if isinstance(values, list) else values
    if not _are_sizes(values):
        raise TypeError(f"a {type(values).__name__} where up to {MAX_DIMS} sizes are expected")
    result: tuple[int, ...] = values
    return result


def _three(values: tuple[int, ...], fill: int) -> tuple[int, int, int]:
    """Offsets or sizes as (leading, row, column), for tensors of one to three dimensions."""
    if len(values) == 0:
        return (fill, fill, fill)
    if len(values) == 1:
        return (fill, values[0], fill)
    return (fill,) * (3 - len(values)) + values if len(values) <= 3 else values[-3:]  # type: ignore[return-value]


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
