"""What the expert kernels move.

Rows by index, weights of one expert, blocks that the Tensor Engine transposes, and results out of PSUM.

A buffer's suffix says where it is: _sb SBUF, _ps PSUM; arguments and results of kernels are in HBM. P = 128 partitions.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from nki_moe.hardware import BANK, BANK_BYTES, CHUNK, P
from nki_moe.tables import CLEARED
from nki_moe.toolchain import nisa, nl

__all__ = ["Item", "Moves", "loop", "pieces"]


def pieces(total: int, size: int) -> list[tuple[int, int]]:
    """(start, length) of pieces of at most `size`."""
    return [(at, min(size, total - at)) for at in range(0, total, size)]


def loop(passes: Any, which: int, body: Callable[[Any], None]) -> None:
    """body(i) on the device, as often as a table says; the bound has a register of its own that nothing else writes."""
    passes_sb = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(passes_sb, passes[:, which : which + 1])
    bound = nisa.register_alloc()
    nisa.register_load(bound, passes_sb)
    nl.fori_loop(0, bound, body)


class Item:
    """One item of a list: the register with its expert, and which rows its blocks are."""

    def __init__(self, expert: Any, rows: Any, reads: Any, i: Any, number: int) -> None:
        """Load them from the tables' row `i`, which has an item for each core: this is the `number`th."""
        self.size = rows.shape[1] // expert.shape[1]
        self.blocks = self.size // P
        expert_sb = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(expert_sb, expert.ap([[1, 1], [1, 1]], offset=number, scalar_offset=i, indirect_dim=0))
        self.expert = nisa.register_alloc()
        nisa.register_load(self.expert, expert_sb)
        self.rows_sb, self.reads_sb = self._load(rows, i, number), self._load(reads, i, number)

    def _load(self, table: Any, i: Any, number: int) -> Any:
        index_sb = nl.ndarray((P, self.blocks), nl.int32, buffer=nl.sbuf)
        pattern = [[self.blocks, P], [1, self.blocks]]
        nisa.dma_copy(index_sb, table.ap(pattern, offset=number * self.size, scalar_offset=i, indirect_dim=0))
        return index_sb

    def row(self, block: int) -> Any:
        """(P, 1): where a block's rows are kept and written."""
        return self.rows_sb[:, block : block + 1]

    def read(self, block: int) -> Any:
        """(P, 1): where a block's rows are read: tokens, when rows are gathered."""
        return self.reads_sb[:, block : block + 1]

    def part(self, w: Any, pattern: list[list[int]], offset: int) -> Any:
        """A pattern in the expert's part of a tensor (E, ...)."""
        return w.ap(pattern, offset=offset, scalar_offset=self.expert, indirect_dim=0)


class Moves:
    """Moves of one kernel.

    What leaves PSUM goes through whichever of the Vector and Scalar Engines has had less to do so far.

    With `by_dma`, DMA transposes what it gathers (assumptions.py); without, the Tensor Engine does.
    """

    def __init__(self, by_dma: bool) -> None:
        self.by_dma = by_dma
        self.numbers: dict[tuple[int, int], Any] = {}  # (E, rows) -> the numbers of all rows of such matrices, in HBM
        self.vector = self.scalar = 0.0  # ns given to each, by the formulas of nki-sim's cost.py

    # -- rows by index
    def gather(self, x: Any, index_sb: Any, first: int, to_sb: Any) -> None:
        """Columns first... of rows x[index[p]] to partition p, zeros where the index is past the end."""
        nisa.memset(to_sb, 0.0, engine=nisa.engine.gpsimd)
        part = x.ap([[x.shape[1], P], [1, to_sb.shape[1]]], offset=first, vector_offset=index_sb, indirect_dim=0)
        nisa.dma_copy(to_sb, part, oob_mode=nisa.oob_mode.skip)

    def read_turned(self, item: Item, x: Any, to_sb: Any) -> None:
        """The item's rows of x to (P, D / P, rows), features on partitions; zeros where there is no row."""
        D = x.shape[1]
        if self.by_dma:
            nisa.memset(to_sb, 0.0, engine=nisa.engine.gpsimd)
            for d in range(D // P):
                self._gather_turned(x, item.reads_sb, d * P, item.size, to_sb[:, d, :])
            return
        for b in range(item.blocks):
            x_sb = nl.ndarray((P, D), x.dtype, buffer=nl.sbuf)
            self.gather(x, item.read(b), 0, x_sb)
            self.turn(x_sb, to_sb[:, :, b * P : (b + 1) * P])

    def _gather_turned(self, x: Any, index_sb: Any, first: int, count: int, to_sb: Any) -> None:
        """P columns of `count` rows x[index], transposed to (P, count)."""
        index = index_sb.view(nl.uint32)
        part = x.ap([[x.shape[1], count], [1, P]], offset=first, vector_offset=index, indirect_dim=0)
        nisa.dma_transpose(dst=to_sb, src=part, oob_mode=nisa.oob_mode.skip)

    def scatter(self, y: Any, index_sb: Any, first: int, from_sb: Any) -> None:
        """Partition p to columns first... of y[index[p]]; an index past the end is skipped."""
        part = y.ap([[y.shape[1], P], [1, from_sb.shape[1]]], offset=first, vector_offset=index_sb, indirect_dim=0)
        nisa.dma_copy(part, from_sb, oob_mode=nisa.oob_mode.skip)

    def clear(self, y: Any, rows: Any, passes: Any) -> None:
        """Zero the rows of no expert; each core has its share of the columns."""
        width = y.shape[1] // nl.num_programs(0)
        zero_sb = nl.ndarray((P, width), y.dtype, buffer=nl.sbuf)
        nisa.memset(zero_sb, 0.0)

        def some(i: Any) -> None:
            index_sb = nl.ndarray((P, CLEARED), nl.int32, buffer=nl.sbuf)
            nisa.dma_copy(index_sb, rows.ap([[CLEARED, P], [1, CLEARED]], scalar_offset=i, indirect_dim=0))
            for c in range(CLEARED):
                self.scatter(y, index_sb[:, c : c + 1], nl.program_id(0) * width, zero_sb)

        loop(passes, 2, some)

    def combine(self, y: Any, rows: Any, row_TK: Any) -> None:
        """y[t] = the sum of rows[row_TK[t, k]] over k, added up in PSUM by an identity matrix.

        Each core has its share of the columns, of rows that both have written.
        """
        cores, (T, K), D = nl.num_programs(0), row_TK.shape, y.shape[1]
        if cores == 2:
            nisa.core_barrier(rows, (0, 1))
        width = D // cores
        d0 = nl.program_id(0) * width
        eye_sb = nl.shared_identity_matrix(P, dtype=y.dtype)

        def tokens(n: int, **where: Any) -> None:
            index_sb = nl.ndarray((n, K), nl.int32, buffer=nl.sbuf)
            nisa.dma_copy(index_sb, row_TK.ap([[K, n], [1, K]], **_scaled(where, K)))
            row_sbs = [nl.ndarray((n, width), y.dtype, buffer=nl.sbuf) for _ in range(K)]
            for k, row_sb in enumerate(row_sbs):
                index = index_sb[:, k : k + 1]
                nisa.dma_copy(row_sb, rows.ap([[D, n], [1, width]], offset=d0, vector_offset=index, indirect_dim=0))
            y_sb = nl.ndarray((n, width), y.dtype, buffer=nl.sbuf)
            for d, size in pieces(width, BANK):
                sum_ps = nl.ndarray((n, size), nl.float32, buffer=nl.psum)
                for k, row_sb in enumerate(row_sbs):
                    nisa.nc_matmul(sum_ps, eye_sb[:n, :n], row_sb[:, d : d + size], accumulate=k > 0)
                self.empty(y_sb[:, d : d + size], sum_ps)
            nisa.dma_copy(y.ap([[D, n], [1, width]], **_scaled(where, D, d0)), y_sb)

        if T >= P:
            nl.fori_loop(0, T - T % P, lambda t: tokens(P, scalar_offset=t), step=P)
        if T % P:
            tokens(T % P, offset=T - T % P)

    # -- weights of an item's expert
    def columns(self, item: Item, w: Any, first: int, count: int) -> Any:
        """(P, rows / P, count): columns first... of a matrix (rows, width), its rows on partitions."""
        _, rows, width = w.shape
        w_sb = nl.ndarray((P, rows // P, count), w.dtype, buffer=nl.sbuf)
        nisa.dma_copy(w_sb, item.part(w, [[width, P], [P * width, rows // P], [1, count]], first))
        return w_sb

    def rows_turned(self, item: Item, w: Any, first: int, count: int) -> Any:
        """(P, width / P, count): rows first... of a matrix (rows, width), its columns on partitions."""
        E, rows, width = w.shape
        wT_sb = nl.ndarray((P, width // P, count), w.dtype, buffer=nl.sbuf)
        if self.by_dma:
            if (E, rows) not in self.numbers:
                # a partition's numbers end to end: DMA moves them at once
                numbers = np.arange(E * rows, dtype=np.int32).reshape(E, rows // P, P).transpose(0, 2, 1)
                self.numbers[E, rows] = nl.shared_constant(np.ascontiguousarray(numbers))
            index_sb = nl.ndarray((P, count // P), nl.int32, buffer=nl.sbuf)
            pattern = [[rows // P, P], [1, count // P]]
            nisa.dma_copy(index_sb, item.part(self.numbers[E, rows], pattern, first // P))
            flat = w.reshape((E * rows, width))
            for c in range(width // P):
                self._gather_turned(flat, index_sb, c * P, count, wT_sb[:, c, :])
            return wT_sb
        for r in range(0, count, P):
            for c, size in pieces(width, CHUNK * 2):
                w_sb = nl.ndarray((P, size), w.dtype, buffer=nl.sbuf)
                nisa.dma_copy(w_sb, item.part(w, [[width, P], [1, size]], (first + r) * width + c))
                self.turn(w_sb, wT_sb[:, c // P : (c + size) // P, r : r + P])
        return wT_sb

    # -- the Tensor Engine's transpositions, and the way out of PSUM
    def turn(self, from_sb: Any, to_sb: Any) -> None:
        """(P, n P) to (P, n, P): each block of P columns transposed, by the Tensor Engine."""
        bytes_ = 4 if from_sb.dtype == nl.float32 else 2
        for c, n in pieces(to_sb.shape[1], BANK_BYTES // (P * bytes_)):
            turned_ps = nl.ndarray((P, n, P), from_sb.dtype, buffer=nl.psum)
            for i in range(n):
                nisa.nc_transpose(turned_ps[:, i, :], from_sb[:, (c + i) * P : (c + i + 1) * P])
            self.empty(to_sb[:, c : c + n, :], turned_ps)

    def empty(self, to_sb: Any, from_ps: Any, scale_sb: Any = None) -> None:
        """Copy a PSUM tile to SBUF, times one number a partition if there is one."""
        columns = 1
        for n in from_ps.shape[1:]:
            columns *= n
        on_vector = max(64, columns / (2 if from_ps.dtype == nl.bfloat16 else 1)) / 0.96
        on_scalar = max(64, columns) / 1.2
        if self.vector + on_vector <= self.scalar + on_scalar:
            self.vector += on_vector
            if scale_sb is None:
                nisa.tensor_copy(to_sb, from_ps, engine=nisa.engine.vector)
            else:
                nisa.tensor_scalar(to_sb, from_ps, nl.multiply, scale_sb)
        else:
            self.scalar += on_scalar
            nisa.activation(to_sb, nl.copy, from_ps, scale=1.0 if scale_sb is None else scale_sb)

    def activate(self, to_sb: Any, op: Any, data: Any) -> None:
        """A function of the Scalar Engine."""
        self.scalar += data.shape[-1] / 1.2
        nisa.activation(to_sb, op, data)

    def product(self, to_sb: Any, left: Any, right: Any, on_gpsimd: bool = False) -> None:
        """left * right, element by element, on the Vector Engine, or on GpSimd where both are in SBUF."""
        if on_gpsimd:
            nisa.tensor_tensor(to_sb, left, right, nl.multiply, engine=nisa.engine.gpsimd)
        else:
            self.vector += left.shape[-1] / 0.96
            nisa.tensor_tensor(to_sb, left, right, nl.multiply)


def _scaled(where: dict[str, Any], stride: int, first: int = 0) -> dict[str, Any]:
    """Arguments of .ap() for a row that is known now (offset) or a register's (scalar_offset)."""
    if "offset" in where:
        return {"offset": where["offset"] * stride + first}
    return {"offset": first, "indirect_dim": 0, **where}
