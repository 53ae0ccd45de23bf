"""Write a torch DCP checkpoint as a stream: files of tensor chunks, then `.metadata`.

A tensor larger than CHUNK is cut along its first dimension into several chunks, as if that many ranks had saved it:
whoever loads it reads pieces of that size too. Two names may point at the same bytes, which is how a tied head costs
nothing. `torch_zip.py` writes a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .dcp_records import Chunk, Index, Metadata, Properties, StorageInfo, StorageMeta, Tensor, to_pickle
from .tensors import TensorInfo

__all__ = ["CHUNK", "SavedChunk", "chunk_starts", "metadata_bytes"]

CHUNK = 64 << 20
VERSION = "1.0.0"  # CURRENT_DCP_VERSION of torch 2.14


@dataclass(frozen=True)
class SavedChunk:
    """A chunk on disk: `count` indices of the first dimension from `start` on, and its bytes in `file`."""

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


def metadata_bytes(
    tensors: Mapping[str, TensorInfo], chunks: Mapping[str, Sequence[SavedChunk]], aliases: Mapping[str, str]
) -> bytes:
    """The content of `.metadata`.

    Args:
        tensors: name -> dtype and shape.
        chunks: name -> where its chunks lie, in order.
        aliases: further name -> name of the tensor whose bytes it shares.
    """
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
