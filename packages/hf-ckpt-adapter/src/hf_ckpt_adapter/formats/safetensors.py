"""Read and write safetensors, trusting nothing in a file that is read.

Reading uses `pread` instead of a memory map, so that pages read once do not count as ours, and a truncated file is an
error and not a bus error. Every header is checked before a byte of data is used (`read_header`). Writing goes front to
back, because the header is known beforehand.

Format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON header, data).
"""

from __future__ import annotations

import json
import os
import struct
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .files import (
    INDEX,
    SINGLE,
    OpenFiles,
    is_plain,
    parse_json,
    pread_exactly,
    read_json,
    regular_file,
    shards_missing,
)
from .tensors import DTYPE_NAMES, DTYPES, MAX_DIMS, TensorInfo

__all__ = [
    "SafetensorsFolder",
    "header_bytes",
    "index_bytes",
    "read_header",
    "split_shards",
    "tensor_order",
]

# The reference implementation allows 100 MB; 16 MiB hold about 130,000 tensors in one file, and parsing JSON
# costs up to ten times its size in memory.
MAX_HEADER = 16 << 20
MAX_INDEX = 64 << 20


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def read_header(path: Path) -> tuple[dict[str, tuple[TensorInfo, int]], dict[str, str]]:
    """Tensors of a file (info and absolute byte offset) and its metadata.

    Raises:
        ValueError: naming file and tensor, for a header length that the file cannot hold, bad JSON, a
            duplicate key, an unknown dtype, a bad shape, offsets that overlap, leave a gap, pass the end, or
            do not fit shape x dtype.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError(f"{path} has {size} bytes; a safetensors file has at least 8. Truncated?")
        (length,) = struct.unpack("<Q", start)
        if length > min(size - 8, MAX_HEADER):
            raise ValueError(
                f"{path} declares a header of {length} bytes; the file has {size} and {MAX_HEADER} are "
                "allowed. Truncated or not a safetensors file."
            )
        header = parse_json(file.read(length), f"{path}: header")
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is a {type(header).__name__}, expected an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{path}: __metadata__ must map strings to strings")

    data, tensors, spans = 8 + length, {}, []
    for name, entry in header.items():
        where = f"{path}: tensor {name!r}"
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{where} must have exactly dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"{where} has dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
        if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_size, shape)):
            raise ValueError(f"{where} has shape {str(shape)[:80]}; expected up to {MAX_DIMS} sizes")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
            raise ValueError(f"{where} has data_offsets {str(offsets)[:80]}; expected two offsets")
        begin, end = offsets
        info = TensorInfo(DTYPES[dtype], tuple(shape), path.name)
        if end < begin or data + end > size:
            raise ValueError(f"{where} lies at bytes {begin}..{end} of {size - data} in the file; truncated or corrupt")
        if end - begin != info.nbytes:
            raise ValueError(f"{where} has {end - begin} bytes; shape {shape} of {dtype} needs {info.nbytes}")
        tensors[name] = (info, data + begin)
        spans.append((begin, end, name))
    position, before = 0, "the header"
    for begin, end, name in sorted(spans):
        if begin != position:
            what = "overlaps" if begin < position else f"leaves a gap of {begin - position} bytes after"
            raise ValueError(f"{path}: tensor {name!r} {what} {before!r}")
        position, before = end, name
    if data + position != size:
        raise ValueError(f"{path} has {size - data - position} bytes that belong to no tensor; corrupt")
    return tensors, metadata


class SafetensorsFolder:
    """The tensors of a Hugging Face model folder, read by rows.

    With an index only the files it names are opened, and each tensor comes from the file it names. Without
    one, `model.safetensors`, or else all shards, which must not repeat a tensor. No other file is ever
    opened, pickles least of all.

    Raises (on opening, before any data is read):
        ValueError: a hostile or contradictory index or header, naming file and tensor.
        FileNotFoundError: shards that are missing, all of them by name; or no safetensors at all.
    """

    kind = "hub"

    def __init__(self, folder: Path, *, follow_symlinks: bool = False) -> None:
        self.folder = folder
        self.left_out: dict[str, int] = {}
        self.notes: list[str] = []
        self._follow = follow_symlinks
        self._files = OpenFiles()
        self._paths: dict[str, Path] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        weight_map, total = self._read_index()
        names = sorted(set(weight_map.values())) if weight_map is not None else self._loose_files()
        missing = []
        for name in names:
            try:
                self._paths[name] = regular_file(folder, name, follow_symlinks=follow_symlinks)
            except FileNotFoundError:
                missing.append(name)
        if missing:
            raise FileNotFoundError(
                f"{folder}: {len(missing)} of {len(names)} files that the index names are missing: {', '.join(missing)}"
            )
        beside = sorted(p.name for p in folder.glob("adapter_*") if p.name not in names)
        if beside:
            self.notes.append(f"{', '.join(beside)} lie beside the weights: an adapter that is not merged is left out")
        lost = shards_missing(names)
        if lost:
            raise FileNotFoundError(
                f"{folder}: {min(names)} and others count {len(names) + len(lost)} files by their names, and "
                f"{len(lost)} are missing: {', '.join(lost[:5])}. Fetch them; a model without them is another one."
            )
        for name in names:
            self._add_file(name, weight_map)
        if weight_map is not None:
            absent = [t for t in weight_map if t not in self.tensors]
            if absent:
                raise ValueError(
                    f"{folder}: the index places {len(absent)} tensors where they are not, such as "
                    f"{absent[0]!r} in {weight_map[absent[0]]}"
                )
            size = sum(info.nbytes for info in self.tensors.values())
            if total not in (None, size):
                raise ValueError(
                    f"{folder / INDEX}: total_size is {total}, and the tensors that it names have {size} bytes. A file "
                    "is "
                    "not the one that was saved, or the index is of another save. Fetch them anew, or remove "
                    "total_size "
                    "from the index if you trust the files."
                )

    def _read_index(self) -> tuple[dict[str, str] | None, Any]:
        """Tensor -> file, and the bytes of all tensors as the index has them; None where there is no such thing."""
        if not os.path.lexists(self.folder / INDEX):
            return None, None
        path = regular_file(self.folder, INDEX, follow_symlinks=self._follow)
        index = read_json(path, MAX_INDEX, "an index")
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{path} has no weight_map; expected tensor name -> file name")
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or not name.endswith(".safetensors") or not is_plain(name):
                raise ValueError(
                    f"{path}: tensor {tensor!r} is placed in {name!r}; expected the plain name of a "
                    ".safetensors file in the same folder. Refused."
                )
        metadata = index.get("metadata")
        return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None

    def _loose_files(self) -> list[str]:
        names = sorted(p.name for p in self.folder.glob("*.safetensors")) if self.folder.is_dir() else []
        shards = [n for n in names if n.startswith("model-")]
        if SINGLE in names:
            if shards:
                raise ValueError(
                    f"{self.folder} holds {SINGLE} and {len(shards)} shards but no {INDEX}: "
                    "which of them is the model? Remove the stale ones."
                )
            return [SINGLE]
        if not names:
            pickles = [p.name for p in self.folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
            hint = f" ({', '.join(pickles[:3])} can run code when read and is never opened)" if pickles else ""
            raise FileNotFoundError(f"{self.folder}: no {INDEX} and no .safetensors file{hint}")
        return shards or names

    def _add_file(self, name: str, weight_map: Mapping[str, str] | None) -> None:
        tensors, _ = read_header(self._paths[name])
        for tensor, (info, offset) in tensors.items():
            if weight_map is not None:
                owner = weight_map.get(tensor)
                if owner is None:
                    raise ValueError(
                        f"{self._paths[name]}: tensor {tensor!r} is in no line of {INDEX}; the index "
                        "is not of this folder"
                    )
                if owner != name:
                    note = f"tensor {tensor!r} is in {name} too; the index says {owner}, which is used"
                    self.notes.append(note)
                    warnings.warn(f"{self.folder}: {note}", stacklevel=2)
                    continue
            elif tensor in self.tensors:
                raise ValueError(
                    f"{self.folder}: tensor {tensor!r} is in {self.tensors[tensor].file} and in {name}, "
                    "and no index says which counts"
                )
            self.tensors[tensor] = TensorInfo(info.dtype, info.shape, name)
            self._places[tensor] = (name, offset)

    def read_rows(self, name: str, row: int, out: memoryview) -> None:
        """Fill `out` with the bytes of whole rows of `name` from `row` on."""
        file, offset = self._places[name]
        descriptor = self._files.descriptor(self._paths[file])
        pread_exactly(descriptor, out, offset + row * self.tensors[name].row_bytes, f"{file}: {name!r}")

    def close(self) -> None:
        """Close open files."""
        self._files.close()


def split_shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Tensors in order, cut into shards of at most `max_bytes`; a larger tensor gets a shard of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def index_bytes(files: Mapping[str, Iterable[str]], sizes: Mapping[str, int]) -> bytes:
    """The index of a sharded model: file -> tensors, tensor -> bytes. `total_size` counts tensor bytes."""
    weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
    index = {
        "metadata": {"total_size": sum(sizes[t] for t in weight_map)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(index, indent=2) + "\n").encode()


def header_bytes(tensors: Mapping[str, TensorInfo]) -> bytes:
    """Length and header of a file that holds these tensors in this order. Same tensors, same bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, info in tensors.items():
        header[name] = {
            "dtype": DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [position, position + info.nbytes],
        }
        position += info.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8, as the reference writer has it
    return struct.pack("<Q", len(text)) + text


def tensor_order(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Wider dtypes first, so that every tensor starts at a multiple of its element size."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
