"""The rows of a plan's outputs as blocks of bytes, read ahead by one thread while the caller writes.

The reading thread reads, compares, casts and hashes; the caller's thread writes (and sums the zip of a DCP
file). All of these leave the interpreter free for the other thread.

Memory: `POOL` + 2 buffers (one to cast from, one to compare with) of `BLOCK` bytes or of one row, whichever
is larger. No tensor is held whole, so it depends on the width of a tensor and not on the size of the model.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from .formats.tensors import WEIGHT_DTYPES, TensorSource, buffer
from .plan import Output, Read

__all__ = ["BLOCK", "POOL", "Block", "blocks", "cast_into", "different_head", "stream"]

# Small enough that a block is still in the processor's cache when it is hashed and written.
BLOCK = 1 << 20
POOL = 8


@dataclass(frozen=True)
class Block:
    """The next bytes of `output`; `checksum` is the sha256 of all its bytes, given with its last block.

    `not_finite` counts NaN and infinity in it, `vanished` the numbers that are not zero before the cast and zero after.
    """

    output: Output
    data: memoryview
    checksum: str | None
    not_finite: int = 0
    vanished: int = 0


def _rows(output: Output) -> int:
    """Rows in a block: at most BLOCK bytes before and after the cast, at least one."""
    row = output.info.cols * max(output.stored.itemsize, output.info.dtype.itemsize)
    return min(max(1, BLOCK // row), output.info.rows)


def _fill(
    source: TensorSource, reads: Iterable[Read], row_bytes: int, memory: Callable[[], memoryview]
) -> Iterator[memoryview]:
    """Read rows into one memory after another; yields each when it is full, and the rest."""
    target, filled = None, 0
    for read in reads:
        row, left = read.row, read.rows
        while left:
            if target is None:
                target, filled = memory(), 0
            take = min(left, (len(target) - filled) // row_bytes)
            part = target[filled : filled + take * row_bytes]
            if read.tensor is None:
                part[:] = bytes(len(part))
            else:
                source.read_rows(read.tensor, row, part)
            row, left, filled = row + take, left - take, filled + len(part)
            if filled == len(target):
                yield target
                target = None
    if target is not None:
        yield target[:filled]


def blocks(source: TensorSource, output: Output, reads: tuple[Read, ...]) -> Iterator[tuple[memoryview, torch.Tensor]]:
    """Read rows block by block.

    Args:
        source: what is read.
        output: for the dtype and the width of its rows.
        reads: which rows.

    Returns:
        Each block in the stored dtype, as bytes and as a tensor [n, cols] on the same memory, which the next block
        uses again.
    """
    data, tensor = buffer(output.stored, (_rows(output), output.info.cols))
    row_bytes = output.info.cols * output.stored.itemsize
    for view in _fill(source, reads, row_bytes, lambda: data):
        yield view, tensor[: len(view) // row_bytes]


class _Differs:
    """Compare an output's blocks with its witness's, block by block."""

    def __init__(self, source: TensorSource, output: Output) -> None:
        self._others = blocks(source, output, output.witness)
        self._output = output
        self.worst: float | None = None

    def look(self, data: memoryview, tensor: torch.Tensor) -> None:
        other = next(self._others, None)
        if other is None:
            return  # padding, which the witness does not have
        rows = min(len(tensor), len(other[1]))
        size = rows * len(data) // len(tensor)
        if data[:size] != other[0][:size]:
            gap = (tensor[:rows].double() - other[1][:rows].double()).abs().max()
            self.worst = max(self.worst or 0.0, float(gap))

    def finish(self) -> None:
        if self.worst is not None:
            raise different_head(self._output, self.worst)


def different_head(output: Output, worst: float) -> ValueError:
    """The error for an embedding that its witness, the tied head, contradicts."""
    return ValueError(
        f"config.json ties lm_head to the embedding, but {output.witness[0].tensor!r} and "
        f"{output.reads[0].tensor!r} differ by up to {worst:.6g}. Choose with on_untied "
        "(--on-untied): untie keeps both and says so in the config, drop throws the head away."
    )


def cast_into(result: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
    """Cast into `result`; a finite number that its dtype cannot hold is an error, not an infinity."""
    result.copy_(tensor)
    if result.dtype == tensor.dtype:
        return
    narrower = torch.finfo(result.dtype).max < torch.finfo(tensor.dtype).max
    if narrower and not bool((result.isfinite() | ~tensor.isfinite()).all()):
        raise ValueError(f"{name!r} holds values up to {tensor.abs().max():.3g}; {result.dtype} cannot hold that")


def _not_finite(tensor: torch.Tensor) -> int:
    """How many NaN and infinities are in a block of weights."""
    if tensor.dtype not in WEIGHT_DTYPES:
        return 0
    low, high = torch.aminmax(tensor)  # much faster than isfinite, and not finite when anything is not
    return 0 if low.isfinite() and high.isfinite() else int((~tensor.isfinite()).sum())


class _CallerGone(Exception):
    """The writing thread stopped asking."""


class _Reader(threading.Thread):
    """Puts blocks into `ready`, in memory taken from `free`; also an exception, and None at the end."""

    def __init__(self, source: TensorSource, outputs: Iterable[Output]) -> None:
        super().__init__(name="checkpoint reader", daemon=True)
        self.ready: queue.Queue[Block | BaseException | None] = queue.Queue()
        self.free: queue.Queue[bytearray | None] = queue.Queue()
        for _ in range(POOL):
            self.free.put(bytearray(BLOCK))
        self._source, self._outputs = source, outputs

    def run(self) -> None:
        try:
            for output in self._outputs:
                self._read(output)
            self.ready.put(None)
        except _CallerGone:
            pass
        except BaseException as error:  # handed to the writing thread, which raises it
            self.ready.put(error)

    def _memory(self, size: int) -> memoryview:
        memory = self.free.get()
        if memory is None:
            raise _CallerGone
        return memoryview(memory if len(memory) >= size else bytearray(size))[:size]

    def _read(self, output: Output) -> None:
        checksum, left = hashlib.sha256(), output.info.nbytes
        compare = _Differs(self._source, output) if output.witness else None
        rows, cols = _rows(output), output.info.cols
        for data, *odd in self._cast_blocks(output, rows, cols, compare):
            checksum.update(data)
            left -= len(data)
            if not left and compare is not None:
                compare.finish()
            self.ready.put(Block(output, data, None if left else checksum.hexdigest(), *odd))
        assert left == 0, (output.name, left)

    def _cast_blocks(
        self, output: Output, rows: int, cols: int, compare: _Differs | None
    ) -> Iterator[tuple[memoryview, int, int]]:
        """Bytes to write, and in them the numbers that are not finite and those that the cast made zero."""
        if output.info.dtype == output.stored:
            row_bytes = cols * output.stored.itemsize
            for data in _fill(self._source, output.reads, row_bytes, lambda: self._memory(rows * row_bytes)):
                tensor = torch.frombuffer(data, dtype=output.stored).view(-1, cols)
                if compare is not None:
                    compare.look(data, tensor)
                yield data, _not_finite(tensor), 0
            return
        for before, tensor in blocks(self._source, output, output.reads):
            if compare is not None:
                compare.look(before, tensor)
            data = self._memory(tensor.numel() * output.info.dtype.itemsize)
            result = torch.frombuffer(data, dtype=output.info.dtype).view(-1, cols)
            cast_into(result, tensor, output.name)
            yield data, _not_finite(tensor), int(tensor.count_nonzero() - result.count_nonzero())


def stream(source: TensorSource, outputs: Iterable[Output]) -> Iterator[Block]:
    """All blocks of all outputs in order. A block's memory is used again once the next block is asked for.

    Raises:
        ValueError: a witness differs, a cast overflows, or the source turns out to be broken.
    """
    reader = _Reader(source, outputs)
    reader.start()
    try:
        while True:
            block = reader.ready.get()
            if block is None:
                return
            if isinstance(block, BaseException):
                raise block
            yield block
            base = block.data.obj
            assert isinstance(base, bytearray)
            reader.free.put(base)
    finally:
        reader.free.put(None)
        reader.join()
