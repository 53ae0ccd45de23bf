"""A DCP folder as TorchTitan saves it: files of tensor chunks, `.metadata`, and an `assets/` folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .folder import Folder
from .formats.dcp_write import SavedChunk, chunk_starts, metadata_bytes
from .formats.files import ASSETS, METADATA, chunk_file
from .formats.tensors import TensorInfo, TensorSource
from .formats.torch_zip import tensor_zip
from .plan import Output
from .side_state import side_names, tensor_bytes
from .stream import Block

__all__ = ["TitanFolder"]


class TitanFolder(Folder):
    """Files of tensor chunks, `.metadata`, and an `assets/` folder from which it can be exported again."""

    kind = "dcp"

    def file_names(self, count: int) -> list[str]:
        """Names of `count` files of tensors."""
        return [chunk_file(i) for i in range(count)]

    def write_file(self, name: str, outputs: list[Output], source: TensorSource, count: Callable[[int], None]) -> None:
        """Write one file of tensors and note it; `count` is told the bytes of each block."""
        sums: dict[str, str] = {}
        chunks: dict[str, list[tuple[int, int, int, int]]] = {}
        offset = 0
        with self.staging.file(name) as file:
            bytes_in_order = _Bytes(self.stream(source, outputs), sums)
            for output in outputs:
                for start, length in chunk_starts(output.info):
                    shape = (length, *output.info.shape[1:]) if output.info.shape else ()
                    with tensor_zip(file, output.info.dtype, shape) as (write, written):
                        for part in bytes_in_order.take(torch.Size(shape).numel() * output.info.dtype.itemsize):
                            write(part)
                            count(len(part))
                    chunks.setdefault(output.name, []).append((start, length, offset, written()))
                    offset += written()
            bytes_in_order.finish()
        self.staging.note(name, {"sums": sums, "chunks": chunks})

    def write_rest(self) -> None:
        """Write native-only state, config, tokenizer and, last, the metadata."""
        infos = {o.name: o.info for o in self.plan.outputs}
        chunks = {
            tensor: [SavedChunk(start, count, file, offset, length) for start, count, offset, length in boxes]
            for file, note in self.staging.done.items()
            for tensor, boxes in note["chunks"].items()
        }
        side = side_names(self.side, self.plan)
        if side:
            name, offset = chunk_file(len(self.files)), 0
            with self.staging.file(name) as file:
                for tensor, value in side.items():
                    info = TensorInfo(value.dtype, tuple(value.shape))
                    with tensor_zip(file, info.dtype, info.shape) as (write, written):
                        write(memoryview(tensor_bytes(value)))
                    infos[tensor] = info
                    count = info.shape[0] if info.shape else 1
                    chunks[tensor] = [SavedChunk(0, count, name, offset, written())]
                    offset += written()
        self.write_assets(ASSETS)
        with self.staging.file(METADATA) as file:
            file.write(metadata_bytes(infos, chunks, self.plan.aliases))


class _Bytes:
    """The bytes of a stream of blocks, cut where chunks end; notes each tensor's checksum in `sums`."""

    def __init__(self, blocks: Iterator[Block], sums: dict[str, str]) -> None:
        self._blocks, self._sums = blocks, sums
        self._left = memoryview(b"")

    def take(self, want: int) -> Iterator[memoryview]:
        """The next `want` bytes, in parts."""
        while want:
            if not self._left:
                block = next(self._blocks)
                self._left = block.data
                if block.checksum is not None:
                    self._sums[block.output.name] = block.checksum
            part, self._left = self._left[:want], self._left[want:]
            yield part
            want -= len(part)

    def finish(self) -> None:
        """Let the stream end, which it must."""
        assert not self._left and next(self._blocks, None) is None
