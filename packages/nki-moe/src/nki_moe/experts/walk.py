"""What the expert kernels share: the way of a core through its experts and their tiles, and what moves on the way.

A core works through the slots of a list (tiling.py) in a loop on the device: load the expert's weights, run its tail
tile, run its full tiles. Nothing is unrolled to overlap one expert with the next. Weights are loaded in slices, each a
tensor of its own, in the order in which they are used: as the last tile of an expert lets go of a slice, the next
expert's can come in, and DMA, which takes its work in order, never waits long. All tables that steer are in SBUF from
the start.

Dimensions: R rows, T tokens, E experts, D model, F hidden, P = 128 partitions; C columns, the padded rows of tiling.py.
A buffer's suffix says where it is: _sb SBUF, _ps PSUM, _hbm scratch; arguments and results are in HBM.
"""

from collections.abc import Callable, Iterator
from typing import Any

from nki_moe.hardware import BANK, TILE, P
from nki_moe.tiling import (
    BLOCKS,
    COLUMN,
    EXPERT,
    FEW,
    FULL,
    MANY,
    ROW,
    TAIL_COLUMN,
    TAIL_ROW,
    TAIL_ROWS,
    TAILS,
)
from nki_moe.toolchain import nisa, nl


def pieces(first: int, total: int, size: int) -> list[tuple[int, int]]:
    """(start, length) of pieces of at most `size`."""
    return [(at, min(size, first + total - at)) for at in range(first, first + total, size)]


class Walk:
    """The way of one core through the slots of one list."""

    def __init__(self, plan: Any, number: int, tails: Any, factors: Any, source: Any, fused: bool) -> None:
        self.source, self.fused = source, fused
        _, slots, width = plan.shape
        self.plan_sb = nl.ndarray((1, slots, width), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(self.plan_sb, plan[number : number + 1])
        E = tails.shape[1]
        self.tails_sb = nl.ndarray((P, E, 2 * BLOCKS), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(self.tails_sb, tails)
        self.factors_sb: Any = None
        if factors is not None:
            self.factors_sb = nl.ndarray((P, E, 2 * BLOCKS), nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(self.factors_sb, factors)
        self.expert, self.trips, self.row, self.column = (nisa.register_alloc() for _ in range(4))
        self.step_sb = nl.ndarray((1, 2), nl.int32, buffer=nl.sbuf)
        nisa.memset(self.step_sb, TILE)
        self.slot_sb: Any = None  # the slot at hand
        self.at_sb: Any = None  # row and column of its next full tile

    # -- loops
    def slots(self, body: Callable[[], None]) -> None:
        """body() for each slot."""
        width = self.plan_sb.shape[2]

        def slot(i: Any) -> None:
            self.slot_sb = nl.ndarray((1, width), nl.int32, buffer=nl.sbuf)
            self.at_sb = nl.ndarray((1, 2), nl.int32, buffer=nl.sbuf)
            entry = self.plan_sb.ap(
                [[self.plan_sb.shape[1] * width, 1], [1, width]], offset=width, scalar_offset=i, indirect_dim=1
            )
            nisa.tensor_copy(self.slot_sb, entry, engine=nisa.engine.gpsimd)  # which nothing holds up
            nisa.tensor_copy(self.at_sb, self.slot_sb[:, ROW : COLUMN + 1], engine=nisa.engine.gpsimd)
            self.load(self.expert, EXPERT)
            body()

        self.times(self.plan_sb[:, 0, 0:1], slot)

    def load(self, register: Any, field: int) -> None:
        """A number of the slot."""
        nisa.register_load(register, self.slot_sb[:, field : field + 1])

    def times(self, count: Any, body: Callable[[Any], None]) -> None:
        """body as often as a number in SBUF says."""
        nisa.register_load(self.trips, count)
        nl.fori_loop(0, self.trips, body)

    def when(self, field: int, body: Callable[[], None]) -> None:
        """body() as often as the slot says."""
        self.times(self.slot_sb[:, field : field + 1], lambda _: body())

    def tail(self, body: Callable[["Tile"], None]) -> None:
        """The tail tile, if the slot has it."""
        for i, n in enumerate(TAIL_ROWS):

            def tail(n: int = n) -> None:
                self.load(self.row, TAIL_ROW)
                self.load(self.column, TAIL_COLUMN)
                body(Tile(self, n, tail=True))

            self.when(TAILS + i, tail)

    def full(self, body: Callable[["Tile"], None], field: int = FULL) -> None:
        """The full tiles; with MIDDLE, all but the last."""
        self.when(field, lambda: body(self.next()))

    def next(self) -> "Tile":
        """The next full tile."""
        nisa.register_load(self.row, self.at_sb[:, 0:1])
        nisa.register_load(self.column, self.at_sb[:, 1:2])
        nisa.tensor_tensor(self.at_sb, self.at_sb, self.step_sb, nl.add)  # of integers: on GpSimd
        return Tile(self, TILE, tail=False)

    # -- an expert's part of a tensor (E, ...)
    def of(self, tensor: Any, pattern: list[list[int]], offset: int = 0) -> Any:
        """A pattern in it."""
        return tensor.ap(pattern, offset=offset, scalar_offset=self.expert, indirect_dim=0)

    def rows_transposed(self, ws: tuple[Any, ...], first: int, count: int, size: int) -> list[list[Any]]:
        """Rows first... of matrices (rows, width), in slices (P, width / P, size) of each: columns on partitions. DMA
        transposes them on the way, at nine tenths of its rate; where an expert has so FEW rows that the Tensor Engine
        waits for DMA, that engine does.
        """
        width, parts = ws[0].shape[2], []
        for row, n in pieces(first, count, size):
            parts += [(w, nl.ndarray((P, width // P, n), w.dtype, buffer=nl.sbuf), row) for w in ws]

        def by_dma() -> None:
            for w, w_sb, row in parts:
                pattern = [[width, w_sb.shape[2]], [P, width // P], [1, P]]
                nisa.dma_transpose(dst=w_sb, src=self.of(w, pattern, row * width))

        def by_tensor_engine() -> None:
            most = 4 * BANK // P // (4 if ws[0].dtype == nl.float32 else 2)  # blocks of 128 columns in a PSUM bank
            for w, w_sb, row in parts:
                for r in range(0, w_sb.shape[2], P):
                    rows_sb = nl.ndarray((P, width), w.dtype, buffer=nl.sbuf)
                    nisa.dma_copy(rows_sb, self.of(w, [[width, P], [1, width]], (row + r) * width))
                    for turn, (c, n) in enumerate(pieces(0, width // P, most)):
                        turned_ps = nl.ndarray((P, n, P), w.dtype, buffer=nl.psum)
                        for i in range(n):
                            nisa.nc_transpose(turned_ps[:, i, :], rows_sb[:, (c + i) * P : (c + i + 1) * P])
                        empty(w_sb[:, c : c + n, r : r + P], turned_ps, turn + r // P)

        self.when(MANY, by_dma)
        self.when(FEW, by_tensor_engine)
        return [[w_sb for _, w_sb, _ in parts[i : i + len(ws)]] for i in range(0, len(parts), len(ws))]

    def columns(self, ws: tuple[Any, ...], first: int, count: int, size: int) -> list[list[Any]]:
        """Columns first... of matrices (rows, width), in slices (P, rows / P, size) of each: rows on partitions."""
        (_, rows, width), slices = ws[0].shape, []
        for column, n in pieces(first, count, size):
            slices.append([nl.ndarray((P, rows // P, n), w.dtype, buffer=nl.sbuf) for w in ws])
            for w, w_sb in zip(ws, slices[-1], strict=True):
                nisa.dma_copy(w_sb, self.of(w, [[width, P], [P * width, rows // P], [1, n]], column))
        return slices

    # -- rows of no expert
    def zero(self, y: Any, clear: Any) -> None:
        """Clear them; each core its share of D."""
        width = y.shape[1] // nl.num_programs(0)
        zero_sb = nl.ndarray((P, width), y.dtype, buffer=nl.sbuf)
        nisa.memset(zero_sb, 0.0)

        def block(i: Any) -> None:
            index_sb = nl.ndarray((P, 1), nl.int32, buffer=nl.sbuf)
            nisa.dma_copy(index_sb, clear.ap([[1, P], [1, 1]], scalar_offset=i, indirect_dim=0))
            scatter(y, nl.program_id(0) * width, zero_sb, index_sb)

        self.times(self.plan_sb[:, 0, 1:2], block)


class Tile:
    """`n` rows of one expert: blocks with the rows on `p` partitions, or n columns with a feature on each partition.

    A tail tile is the last of an expert, filled up with repetitions of the last row.
    """

    def __init__(self, walk: Walk, n: int, tail: bool) -> None:
        self.walk, self.n, self.tail, self.row, self.column = walk, n, tail, walk.row, walk.column
        self.p = min(n, P)
        self.blocks = -(-n // P)

    def size(self, block: int) -> int:
        """Rows of a block: P, or what is left for the last."""
        return min(P, self.n - block * P)

    def table(self, table_sb: Any, kind: int, engine: Any) -> Any:
        """(P, blocks) of this tail tile's part of a table in SBUF. GpSimd steers the loads and must not wait for what
        is stored.
        """
        part_sb = nl.ndarray((P, BLOCKS), table_sb.dtype, buffer=nl.sbuf)
        pattern = [[table_sb.shape[1] * 2 * BLOCKS, P], [1, BLOCKS]]
        part = table_sb.ap(pattern, offset=kind * BLOCKS, scalar_offset=self.walk.expert, indirect_dim=1)
        nisa.tensor_copy(part_sb, part, engine=engine)
        return part_sb

    def of_buffer(self, buffer_sb: Any, *dimensions: int) -> Any:
        """What a tile of this size takes of a (P, most) buffer: (P, *dimensions, n)."""
        size = self.n
        for d in dimensions:
            size *= d
        return buffer_sb[:, 0:size].reshape_dim(1, (*dimensions, self.n))

    # -- rows, in HBM as (rows, features)
    def rows(self, tensor: Any, pattern: list[list[int]], offset: int = 0) -> Any:
        """A pattern from this tile's first row."""
        return tensor.ap(pattern, offset=offset, scalar_offset=self.row, indirect_dim=0)

    def indices(self) -> Any:
        """Which rows of the input the tile is made of, (P, blocks); None when they simply follow each other."""
        if self.tail:
            return self.table(self.walk.tails_sb, 0, nisa.engine.gpsimd)[: self.p, : self.blocks]
        if not self.walk.fused:
            return None
        index_sb = nl.ndarray((P, self.blocks), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(index_sb, self.rows(self.walk.source, [[1, P], [P, self.blocks]]))
        return index_sb

    def read(self, x: Any, index_sb: Any, d0: int, buffer_sb: Any) -> Any:
        """(p, blocks, width) of a buffer (P, BLOCKS, width): rows on partitions, columns d0... of them."""
        D, p, width = x.shape[1], self.p, buffer_sb.shape[2]
        x_sb = buffer_sb[:p, : self.blocks, :]
        if index_sb is None:
            nisa.dma_copy(x_sb, self.rows(x, [[D, p], [p * D, self.blocks], [1, width]], d0))
            return x_sb
        for b in range(self.blocks):
            self.read_block(x, x_sb[: self.size(b), b, :], index_sb, b, d0)
        return x_sb

    def read_block(self, x: Any, x_sb: Any, index_sb: Any, block: int, d0: int) -> None:
        """The rows of a block that an index names, columns d0... of them."""
        index, (size, width) = index_sb[: self.size(block), block : block + 1], x_sb.shape
        nisa.dma_copy(x_sb, x.ap([[x.shape[1], size], [1, width]], offset=d0, vector_offset=index, indirect_dim=0))

    def read_transposed(self, x: Any, xT_sb: Any) -> None:
        """The rows transposed to (P, D / P, n): features on partitions."""
        D, index_sb = x.shape[1], self.indices()
        pattern = [[D, self.n], [P, D // P], [1, P]]
        if index_sb is None:
            nisa.dma_transpose(dst=xT_sb, src=self.rows(x, pattern))
        elif x.dtype == nl.float32:  # DMA gathers and transposes two-byte types at once, wider ones in two steps
            for b in range(self.blocks):
                x_sb = nl.ndarray((self.size(b), D), x.dtype, buffer=nl.sbuf)
                self.read_block(x, x_sb, index_sb, b, 0)
                block_sb = xT_sb[:, :, b * P : b * P + self.size(b)]
                nisa.dma_transpose(dst=block_sb, src=x_sb.reshape_dim(1, (D // P, P)))
        else:
            nisa.dma_transpose(dst=xT_sb, src=x.ap(pattern, vector_offset=index_sb.view(nl.uint32), indirect_dim=0))

    def multiply(self, y: Any, d0: int, lefts: list[Any], slices: list[list[Any]]) -> None:
        """The sum of left^T right to columns d0... of y: lefts (P, K / P, n), in each slice a right (P, K / P, width)
        for each left. Rows that only fill the tile are skipped.
        """
        D, dtype, width = y.shape[1], y.dtype, sum(rights[0].shape[2] for rights in slices)
        whole = (
            self.blocks - self.tail
        )  # blocks stored as they lie; of the last one of a tail, only the rows that are real
        last_sb: Any = nl.ndarray((self.size(whole), 1, width), dtype, buffer=nl.sbuf) if self.tail else None
        done = 0
        for rights in slices:
            columns = rights[0].shape[2]
            y_sb: Any = nl.ndarray((P, whole, columns), dtype, buffer=nl.sbuf) if whole else None
            for b in range(self.blocks):
                rows = self.size(b)
                to_sb = y_sb[:, b, :] if b < whole else last_sb[:, 0, done : done + columns]
                for d, size in pieces(0, columns, BANK):
                    y_ps = nl.ndarray((rows, size), nl.float32, buffer=nl.psum)
                    terms = [
                        (left, right, k)
                        for left, right in zip(lefts, rights, strict=True)
                        for k in range(left.shape[1])
                    ]
                    for i, (left, right, k) in enumerate(terms):
                        part_sb = left[:, k, b * P : b * P + rows]
                        nisa.nc_matmul(y_ps, part_sb, right[:, k, d : d + size], accumulate=i > 0)
                    empty(to_sb[:, d : d + size], y_ps, b + d // BANK)
            if whole:
                nisa.dma_copy(self.rows(y, [[D, P], [P * D, whole], [1, columns]], d0 + done), y_sb)
            done += columns
        if self.tail:
            index_sb = self.table(self.walk.tails_sb, 1, nisa.engine.vector)
            scatter(y, d0, last_sb[:, 0, :], index_sb[: self.size(whole), whole : whole + 1])

    # -- what passes keep, in HBM as (kinds x P, C, F / P): tile by tile, each partition's features and rows end to end
    def kept(self, kept: Any, kind: int, kinds: int, f0: int, features: int) -> Any:
        """This tile's part of kept, (P, kinds, features / P, n)."""
        _, C, blocks = kept.shape
        pitch, n = C * blocks, self.n
        offset = kind * P * pitch + f0 // P * n
        pattern = [[pitch, P], [P * pitch, kinds], [n, features // P], [1, n]]
        return kept.ap(pattern, offset=offset, scalar_offset=self.column, indirect_dim=1)

    def keep(self, kept: Any, kind: int, f0: int, value_sb: Any) -> None:
        """(P, kinds, features / P, n) to features f0... of kept."""
        _, kinds, blocks, _ = value_sb.shape
        nisa.dma_copy(self.kept(kept, kind, kinds, f0, blocks * P), value_sb)

    def recall(self, kept: Any, kind: int, f0: int, value_sb: Any) -> None:
        """The same way back."""
        _, kinds, blocks, _ = value_sb.shape
        nisa.dma_copy(value_sb, self.kept(kept, kind, kinds, f0, blocks * P))

    def recall_transposed(self, kept: Any, kind: int, f0: int, buffer_sb: Any) -> Any:
        """(p, features / P, blocks, P) of a buffer (P, features / P, BLOCKS, P): rows on partitions."""
        value_sb, features = buffer_sb[: self.p, :, : self.blocks, :], buffer_sb.shape[1] * P
        _, C, blocks = kept.shape
        pitch, n = C * blocks, self.n
        offset = kind * P * pitch + f0 // P * n
        even = n // self.p  # blocks of p rows; then one of fewer
        for first, blocks, size in ((0, even, self.p), (even, 1, n - even * self.p)):
            if size:
                pattern = [[pitch, P], [n, features // P], [P, blocks], [1, size]]
                part = kept.ap(pattern, offset=offset + first * P, scalar_offset=self.column, indirect_dim=1)
                nisa.dma_transpose(dst=value_sb[:size, :, first : first + blocks, :], src=part)
        return value_sb

    # -- one number a row
    def scores(self, score_rows: Any, scale: Any) -> Any:
        """(P, n): the rows' scores, the same on every partition; zero where they only fill the tile."""
        score_sb, pattern = nl.ndarray((P, self.n), nl.float32, buffer=nl.sbuf), [[0, P], [1, self.n]]
        nisa.dma_copy(score_sb, self.walk.of(scale, pattern) if self.tail else self.rows(score_rows, pattern))
        return score_sb

    def weigh(self, value_sb: Any, score_rows: Any) -> None:
        """Multiply rows (p, blocks, width) by their scores (or 1, without), and by zero those that only fill the tile:
        all in its last block.
        """
        scored = score_rows is not None
        blocks: Any = range(self.blocks) if scored else (self.blocks - 1,) if self.tail else ()
        if not blocks:
            return
        if self.tail:
            factor_sb = self.table(self.walk.factors_sb, 1 if scored else 0, nisa.engine.vector)
        else:
            factor_sb = nl.ndarray((P, self.blocks), nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(factor_sb, self.rows(score_rows, [[1, P], [P, self.blocks]]))
        for b in blocks:
            row_sb = value_sb[: self.size(b), b, :]
            nisa.tensor_scalar(row_sb, row_sb, nl.multiply, factor_sb[: self.size(b), b : b + 1])


def empty(to_sb: Any, from_ps: Any, turn: int) -> None:
    """Copy a PSUM tile out; two engines take turns."""
    if turn % 2:
        nisa.activation(to_sb, nl.copy, from_ps)
    else:
        nisa.tensor_copy(to_sb, from_ps)


def scatter(y: Any, d0: int, row_sb: Any, index_sb: Any) -> None:
    """Row p to y[index[p], d0:]; an index past the end is skipped."""
    D, (p, width) = y.shape[1], row_sb.shape
    to = y.ap([[D, p], [1, width]], offset=d0, vector_offset=index_sb, indirect_dim=0)
    nisa.dma_copy(to, row_sb, oob_mode=nisa.oob_mode.skip)


def combine(y: Any, rows: Any, inverse: Any, scores: Any) -> None:
    """y[t] = sum over k of scores[t, k] * rows[inverse[t, k]], in float32; without scores, the plain sum. Each core has
    a share of D, of all rows: the other's must be there.
    """
    cores = nl.num_programs(0)
    if cores == 2:
        nisa.core_barrier(rows, (0, 1))
    (T, K), D = inverse.shape, y.shape[1]
    width = D // cores
    d0 = nl.program_id(0) * width

    def tokens(t: Any, n: int) -> None:
        index_sb = nl.ndarray((n, K), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(index_sb, inverse.ap([[K, n], [1, K]], scalar_offset=t, indirect_dim=0))
        if scores is not None:
            score_sb = nl.ndarray((n, K), nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(score_sb, scores.ap([[K, n], [1, K]], scalar_offset=t, indirect_dim=0))
        sum_sb = nl.ndarray((n, width), nl.float32, buffer=nl.sbuf)
        for k in range(K):
            row_sb = nl.ndarray((n, width), y.dtype, buffer=nl.sbuf)
            nisa.dma_copy(
                row_sb, rows.ap([[D, n], [1, width]], offset=d0, vector_offset=index_sb[:, k : k + 1], indirect_dim=0)
            )
            if k == 0 and scores is None:
                nisa.tensor_copy(sum_sb, row_sb)
            elif k == 0:
                nisa.tensor_scalar(sum_sb, row_sb, nl.multiply, score_sb[:, k : k + 1])
            elif scores is None:
                nisa.tensor_tensor(sum_sb, sum_sb, row_sb, nl.add)
            else:
                nisa.scalar_tensor_tensor(sum_sb, row_sb, nl.multiply, score_sb[:, k : k + 1], nl.add, sum_sb)
        y_sb = nl.ndarray((n, width), y.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(y_sb, sum_sb)
        nisa.dma_copy(y.ap([[D, n], [1, width]], offset=d0, scalar_offset=t, indirect_dim=0), y_sb)

    if T >= P:
        nl.fori_loop(0, T - T % P, lambda t: tokens(t, P), step=P)
    if T % P:
        tokens(nisa.register_alloc(T - T % P), T % P)


class Rows:
    """A matmul operand that contracts the rows of a tile: (p, blocks, D) in SBUF."""

    def __init__(self, at: Tile, value_sb: Any) -> None:
        self.at, self.value_sb = at, value_sb

    def part(self, block: int, start: int, size: int) -> Any:
        """Columns start... of the rows of a block."""
        return self.value_sb[: self.at.size(block), block, start : start + size]


class Features(Rows):
    """The same for what was kept: (p, F / P, blocks, P)."""

    def part(self, block: int, start: int, size: int) -> Any:
        """Columns start... of the rows of a block."""
        return self.value_sb[: self.at.size(block), start // P : (start + size) // P, block, :]


def outer_product(left: Rows, right: Rows, m: int, width: int) -> Iterator[tuple[int, Any]]:
    """left^T right for 128 columns of left from m P on: (first column, PSUM tile) of each bank's width."""
    for n, size in pieces(0, width, BANK):
        part_ps = nl.ndarray((P, size), nl.float32, buffer=nl.psum)
        for b in range(left.at.blocks):
            nisa.nc_matmul(part_ps, left.part(b, m * P, P), right.part(b, n, size), accumulate=b > 0)
        yield n, part_ps
