"""Read a torch DCP checkpoint (a TorchTitan `step-N` folder) tensor by tensor, by rows, with no model built.

A tensor saved by any number of ranks under any sharding is a set of boxes; a row is put together from the boxes that
touch it, and read with `pread` straight from their storage records (`torch_zip.py`).

Two things in such a folder are pickles: `.metadata`, and the small description inside each saved tensor. Both are read
by `safe_unpickle`, which knows a fixed list of classes and opcodes. Byte items (optimizer groups, data loader, trainer
state) are pickles of anything, and are never read at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .dcp_records import RECORDS, Index, Metadata, Tensor, checked_sizes
from .files import METADATA, OpenFiles, pread_exactly, regular_file
from .safe_pickle import safe_unpickle
from .tensors import TensorInfo, buffer
from .torch_zip import Storage, find_storage

__all__ = ["DcpFolder", "is_dcp", "read_metadata"]

MAX_METADATA = 512 << 20
# Roots of state that is not the model, as TorchTitan's checkpointer names them
# (components/checkpointer/base.py).
NOT_MODEL = ("optimizer", "lr_scheduler", "dataloader", "train_state", "trainer")


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
    """A box of a tensor: where it begins, its sizes, and where its zip lies."""

    begin: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int

    def overlaps(self, other: _Chunk) -> bool:
        """Whether the two boxes have an element in common."""
        return all(
            b < ob + on and ob < b + n
            for b, n, ob, on in zip(self.begin, self.sizes, other.begin, other.sizes, strict=True)
        )


class DcpFolder:
    """The tensors of a DCP checkpoint, read by rows.

    `tensors` are those that could be model weights. `left_out` counts optimizer, scheduler, loader and trainer entries.
    `byte_items` names what is pickled and therefore never read.

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
        self._follow = follow_symlinks
        self._files = OpenFiles()
        self._paths: dict[str, Path] = {}
        self._chunks: dict[str, list[_Chunk]] = {}
        self._storages: dict[_Chunk, Storage] = {}
        self._dense: tuple[_Chunk, torch.Tensor] | None = None
        metadata = read_metadata(folder, follow_symlinks=follow_symlinks)
        described, storage = (getattr(metadata, field, None) for field in ("state_dict_metadata", "storage_data"))
        if not isinstance(described, dict) or not isinstance(storage, dict):
            raise ValueError(f"{folder / METADATA}: state_dict_metadata and storage_data must be dicts")
        for name, entry in described.items():
            self._sort(name, entry, storage)
        if self.byte_items:
            self.left_out["byte items"] = len(self.byte_items)

    def _sort(self, name: Any, entry: Any, storage: dict[Any, Any]) -> None:
        """Put an entry of the metadata where it belongs: not the model's, a byte item, or a tensor."""
        if not isinstance(name, str):
            raise ValueError(f"{self.folder / METADATA}: a {type(name).__name__} is not a name")
        root = name.split(".", 1)[0]
        if root in NOT_MODEL:
            self.left_out[root] = self.left_out.get(root, 0) + 1
        elif not isinstance(entry, Tensor):
            self.byte_items.append(name)
        else:
            try:
                self._add(name, entry, storage)
            except (AttributeError, TypeError) as error:  # a record without the fields it should have
                raise ValueError(f"{self.folder / METADATA}: tensor {name!r} is malformed: {error}") from None

    def _add(self, name: str, entry: Any, storage: dict[Any, Any]) -> None:
        where = f"{self.folder / METADATA}: tensor {name!r}"
        shape, dtype = checked_sizes(entry.size), entry.properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{where} has a {type(dtype).__name__} for its dtype")
        chunks = [self._chunk(box, name, shape, dtype, storage, where) for box in entry.chunks]
        chunks = sorted((c for c in chunks if math.prod(c.sizes)), key=lambda c: c.begin)
        if sum(math.prod(c.sizes) for c in chunks) != math.prod(shape):
            raise ValueError(f"{where}: its chunks do not add up to shape {shape}; a rank's file may be missing")
        _refuse_overlaps(chunks, where)
        self.tensors[name] = TensorInfo(dtype, shape, chunks[0].file if len(chunks) == 1 else f"{len(chunks)} chunks")
        self._chunks[name] = chunks

    def _chunk(
        self,
        box: Any,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        storage: dict[Any, Any],
        where: str,
    ) -> _Chunk:
        """A box of a tensor and its place, once both are known to be possible."""
        begin, sizes = checked_sizes(box.offsets), checked_sizes(box.sizes)
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
            self._paths[file] = regular_file(self.folder, file, follow_symlinks=self._follow)
        size = self._paths[file].stat().st_size
        if offset < 0 or length < 0 or offset + length > size:
            raise ValueError(
                f"{where}: bytes {offset}..{offset + length} are past the end of {file} ({size} bytes); truncated?"
            )
        if math.prod(sizes) * dtype.itemsize > length:
            raise ValueError(f"{where}: {sizes} of {dtype} cannot be in {length} bytes of {file}")
        return _Chunk(begin, sizes, file, offset, length)

    def same_bytes(self, name: str, other: str) -> bool:
        """Whether two tensors are one region of the files: a tie that was saved as such."""
        return self.tensors[name] == self.tensors[other] and self._chunks[name] == self._chunks[other]

    def _descriptor(self, file: str) -> int:
        return self._files.descriptor(self._paths[file])

    def _storage(self, chunk: _Chunk, name: str) -> Storage:
        if chunk not in self._storages:
            where = f"{self._paths[chunk.file]}: tensor {name!r}, chunk at {chunk.begin}"
            dtype = self.tensors[name].dtype
            descriptor = self._descriptor(chunk.file)
            self._storages[chunk] = find_storage(descriptor, chunk.offset, chunk.length, dtype, chunk.sizes, where)
        return self._storages[chunk]

    def read_rows(self, name: str, row: int, out: memoryview) -> None:
        """Fill `out` with the bytes of whole rows of `name` from `row` on.

        Raises:
            ValueError: a chunk is not what the metadata says, or the tensor has more than three dimensions.
        """
        info = self.tensors[name]
        if not info.row_bytes:
            return
        rows = len(out) // info.row_bytes
        if len(info.shape) > 3:
            raise ValueError(f"{name!r} has {len(info.shape)} dimensions; up to 3 can be read by rows")
        inner, cols = info.shape[-2:] if len(info.shape) > 1 else (math.prod(info.shape), 1)
        for chunk in self._chunks[name]:
            begin, sizes = _three(chunk.begin, 0), _three(chunk.sizes, 1)
            for low, high, local in _row_ranges(begin, sizes, inner, row, row + rows):
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

    def _densified(self, name: str, chunk: _Chunk, storage: Storage) -> torch.Tensor:
        """A chunk that was saved transposed, read whole; the latest is kept, as its rows are asked for in turn."""
        if self._dense is None or self._dense[0] is not chunk:
            dtype = self.tensors[name].dtype
            data, flat = buffer(dtype, (storage.nbytes // dtype.itemsize,))
            pread_exactly(self._descriptor(chunk.file), data, storage.offset, f"{chunk.file}: {name!r}")
            view = torch.as_strided(flat, chunk.sizes, storage.stride, storage.first)
            self._dense = (chunk, view.contiguous())
        return self._dense[1]

    def damaged(self, progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
        """Read every chunk and compare it with the CRC that its zip has.

        Args:
            progress: told the bytes done and the bytes in all, after each chunk.

        Returns:
            Tensor and file of each chunk that is not what was saved.
        """
        found, done, total = [], 0, sum(info.nbytes for info in self.tensors.values())
        for name, chunks in self._chunks.items():
            for chunk in chunks:
                if not self._storage(chunk, name).intact(self._descriptor(chunk.file)):
                    found.append(f"{name} at {list(chunk.begin)} in {chunk.file}")
                done += math.prod(chunk.sizes) * self.tensors[name].dtype.itemsize
                progress(done, total)
        return found

    def close(self) -> None:
        """Close open files."""
        self._files.close()


def _refuse_overlaps(chunks: Sequence[_Chunk], where: str) -> None:
    """ValueError when two chunks, which are sorted by where they begin, have an element in common."""
    for i, chunk in enumerate(chunks):
        for other in chunks[i + 1 :]:
            if chunk.begin and other.begin[0] >= chunk.begin[0] + chunk.sizes[0]:
                break
            if chunk.overlaps(other):
                raise ValueError(f"{where}: the chunks at {chunk.begin} and {other.begin} overlap")


def _three(values: tuple[int, ...], fill: int) -> tuple[int, int, int]:
    """Offsets or sizes as (leading, row, column), for tensors of one to three dimensions."""
    if len(values) == 1:
        return (fill, values[0], fill)
    leading, row, column = (fill, fill, fill, *values)[-3:]
    return leading, row, column


def _row_ranges(
    begin: tuple[int, int, int], sizes: tuple[int, int, int], inner: int, first: int, last: int
) -> Iterator[tuple[int, int, int]]:
    """The rows of a tensor that a box holds, as ranges (from row, to row, row of the box).

    The tensor has `inner` rows for each leading index. A box with all inner rows has one range, any other has one for
    each leading index that rows [first, last) touch.
    """
    if begin[1] == 0 and sizes[1] == inner:
        yield begin[0] * inner, (begin[0] + sizes[0]) * inner, 0
        return
    for e in range(max(0, first // inner - begin[0]), min(sizes[0], (last - 1) // inner - begin[0] + 1)):
        low = (begin[0] + e) * inner + begin[1]
        yield low, low + sizes[1], e * sizes[1]
