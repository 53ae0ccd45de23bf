"""Kernel: every gradient of the expert MLP, in one launch: two loops over items of an expert's rows (tables.py).

The first takes the items in turns with the other core and makes the gradients of rows, of scores, and of gate and up.
The second adds up the gradients of weights, over all items: each core has its share of them, in float32, in SBUF from
item to item of an expert.
"""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from nki_moe.experts.moves import Item, Moves, loop, pieces
from nki_moe.hardware import BANK, CHUNK, P
from nki_moe.limits import data_columns, widest
from nki_moe.toolchain import nisa, nki, nl


@nki.jit
def backward(
    dy: Any,
    x: Any,
    w1: Any,
    w2: Any,
    w3: Any,
    kept: Any,
    passes: Any,
    data_expert: Any,
    data_rows: Any,
    data_reads: Any,
    sum_expert: Any,
    sum_rows: Any,
    sum_reads: Any,
    sum_keep: Any,
    clear: Any,
    row_TK: Any,
    score_R: Any,
    rows: int,
    fused: bool,
    weights: bool,
    f_share: int,
    d_share: int,
    by_dma: bool,
) -> Any:
    """Gradients of rows or tokens, of their scores, and of the weights.

    Dimensions:
        R rows, T tokens, K choices of a token, E experts, D model, F hidden; D and F multiples of 128, of 256 on two
        cores.

    Args (all in HBM):
        dy, x: (R, D), or (T, D) when fused; bfloat16 or float32.
        w1, w2, w3: (E, F, D), (E, D, F), (E, F, D), of x's dtype.
        kept: (R, 2 F): gate and up, as forward returned them.
        passes, data_*, sum_*, clear, row_TK, score_R: as in tables.Tables.
        rows: R. fused: whether dy and x are tokens. weights: whether their gradients are wanted. by_dma: who
        transposes (assumptions.py).
        f_share, d_share: for how many columns of F a core holds the sums of dw1 and dw3 at a time, and for how many
        rows of D those of dw2: divisors of F / cores and D / cores.

    Returns:
        dx: like x. Rows of no expert are zero.
        dscore: (R, 1) float32, when fused.
        dw1, dw2, dw3: with `weights`, like the weights.

    Notes:
        dg, du and h of a row go from the first loop to the second through HBM, 3 F numbers: the sums of 3 D F
        float32 and the weights do not fit into SBUF together (at D 2048, F 768: 144 and 72 KiB of the 202 that a
        partition has). An item that begins an expert multiplies the sums by 0, so the last item of an expert leaves
        them whole; each item writes them, and the last to write is the last item.

    Pseudocode:
        for item of this core:
            for F: w2; for block: dh = dy w2; dg, du, h -> HBM
            for D: w1, w3; for block: dx[rows] = dg w1 + du w3
        for item: sums = keep * sums + (dg^T x, dy^T h, du^T x); dw[expert] = sums
    """
    (_, F, D), dtype = w1.shape, dy.dtype
    core, cores = nl.program_id(0), nl.num_programs(0)
    dx = nl.ndarray(dy.shape, dtype, buffer=nl.shared_hbm)
    dx_rows = nl.ndarray((rows, D), dtype, buffer=nl.shared_hbm) if fused else dx
    dgu = nl.ndarray((rows, 2 * F), dtype, buffer=nl.shared_hbm) if weights else None
    h = nl.ndarray((rows, F), dtype, buffer=nl.shared_hbm) if weights else None
    dscore = nl.ndarray((rows, 1), nl.float32, buffer=nl.shared_hbm) if fused else None
    move, columns = Moves(by_dma), widest(F // cores, BANK)
    wide = columns * max(n for n in range(1, max(CHUNK // columns, 1) + 1) if F // columns % n == 0)

    def data_pass(i: Any) -> None:
        item = Item(data_expert, data_rows, data_reads, i, core)
        dyT_sb = nl.ndarray((P, D // P, item.size), dtype, buffer=nl.sbuf)
        move.read_turned(item, dy, dyT_sb)
        scores = Scores(move, item, score_R) if fused else None

        dgT_sb, duT_sb = (nl.ndarray((P, F // P, item.size), dtype, buffer=nl.sbuf) for _ in range(2))
        for f0 in range(0, F, wide):
            w2_sb = move.columns(item, w2, f0, wide)
            for f in range(f0, f0 + wide, columns):
                for b in range(item.blocks):
                    dh_ps = nl.ndarray((P, columns), nl.float32, buffer=nl.psum)
                    for d in range(D // P):
                        w_sb = w2_sb[:, d, f - f0 : f - f0 + columns]
                        nisa.nc_matmul(dh_ps, dyT_sb[:, d, b * P : (b + 1) * P], w_sb, accumulate=d > 0)
                    dgu_sb, h_sb = _through_silu(move, item, kept, b, f, dh_ps, scores)
                    if weights:
                        move.scatter(dgu, item.row(b), 2 * f, dgu_sb)
                        move.scatter(h, item.row(b), f, h_sb)
                    for first, to_sb in ((0, dgT_sb), (columns, duT_sb)):
                        block_sb = to_sb[:, f // P : (f + columns) // P, b * P : (b + 1) * P]
                        move.turn(dgu_sb[:, first : first + columns], block_sb)
        if scores:
            for b in range(item.blocks):
                move.scatter(dscore, item.row(b), 0, scores.sum_sbs[b])

        for d, width in pieces(D, data_columns(F, D, 4 if dtype == nl.float32 else 2)):
            w_sbs = [move.columns(item, w, d, width) for w in (w1, w3)]
            for b in range(item.blocks):
                dx_sb = nl.ndarray((P, width), dtype, buffer=nl.sbuf)
                for c, size in pieces(width, BANK):
                    dx_ps = nl.ndarray((P, size), nl.float32, buffer=nl.psum)
                    terms = [(v, w, f) for v, w in zip((dgT_sb, duT_sb), w_sbs, strict=True) for f in range(F // P)]
                    for n, (value_sb, w_sb, f) in enumerate(terms):
                        block_sb = value_sb[:, f, b * P : (b + 1) * P]
                        nisa.nc_matmul(dx_ps, block_sb, w_sb[:, f, c : c + size], accumulate=n > 0)
                    move.empty(dx_sb[:, c : c + size], dx_ps)
                move.scatter(dx_rows, item.row(b), d, dx_sb)

    loop(passes, 0, data_pass)
    if fused:
        move.combine(dx, dx_rows, row_TK)
    else:
        move.clear(dx, clear, passes)
    results = (dx, dscore) if fused else (dx,)
    if not weights:
        return results if fused else dx

    if cores == 2:
        nisa.core_barrier(h, (0, 1))
    dws = tuple(nl.ndarray(w.shape, dtype, buffer=nl.shared_hbm) for w in (w1, w2, w3))
    f_parts, d_parts = (
        [(first, share) for first in range(core * n // cores, (core + 1) * n // cores, share)]
        for n, share in ((F, f_share), (D, d_share))
    )
    for f_part, d_part in zip_longest(f_parts, d_parts, fillvalue=(0, 0)):
        sums = Sums(move, dws, f_part, d_part, columns)

        def sum_pass(i: Any, sums: Sums = sums) -> None:
            sums.add(Item(sum_expert, sum_rows, sum_reads, i, 0), i, dy, x, dgu, h, sum_keep)

        loop(passes, 1, sum_pass)
    return (*results, *dws)


class Scores:
    """The scores of an item's rows, and their gradients as they add up over F: each block's a column, float32."""

    def __init__(self, move: Moves, item: Item, score_R: Any) -> None:
        self.score_sbs, self.sum_sbs = ([nl.ndarray((P, 1), nl.float32) for _ in range(item.blocks)] for _ in range(2))
        for b in range(item.blocks):
            move.gather(score_R, item.row(b), 0, self.score_sbs[b])
            nisa.memset(self.sum_sbs[b], 0.0)

    def apply(self, move: Moves, block: int, dh_ps: Any, h_sb: Any) -> Any:
        """dh times the score, as is h; <dy, y> = <dh, h> joins the score's gradient."""
        shape, score_sb = h_sb.shape, self.score_sbs[block]
        product_sb, scaled_sb = (nl.ndarray(shape, nl.float32, buffer=nl.sbuf) for _ in range(2))
        part_sb = nl.ndarray((P, 1), nl.float32, buffer=nl.sbuf)
        move.product(product_sb, dh_ps, h_sb)
        nisa.tensor_reduce(part_sb, nl.add, product_sb, axis=1)
        nisa.tensor_tensor(self.sum_sbs[block], self.sum_sbs[block], part_sb, nl.add)
        move.empty(scaled_sb, dh_ps, score_sb)
        nisa.tensor_scalar(h_sb, h_sb, nl.multiply, score_sb)
        return scaled_sb


def _through_silu(
    move: Moves, item: Item, kept: Any, block: int, f: int, dh_ps: Any, scores: Scores | None
) -> tuple[Any, Any]:
    """dg and du side by side, (P, 2 columns), and h, (P, columns), of a block's columns f... of F."""
    (_, n), dtype = dh_ps.shape, kept.dtype
    gu_sb, dgu_sb = (nl.ndarray((P, 2 * n), dtype, buffer=nl.sbuf) for _ in range(2))
    h_sb = nl.ndarray((P, n), dtype, buffer=nl.sbuf)
    silu_sb, slope_sb, through_sb = (nl.ndarray((P, n), nl.float32, buffer=nl.sbuf) for _ in range(3))
    move.gather(kept, item.row(block), 2 * f, gu_sb)
    g_sb, u_sb = gu_sb[:, 0:n], gu_sb[:, n:]
    move.activate(silu_sb, nl.silu, g_sb)
    move.activate(slope_sb, nl.silu_dx, g_sb)
    move.product(h_sb, silu_sb, u_sb, on_gpsimd=True)
    dh = scores.apply(move, block, dh_ps, h_sb) if scores else dh_ps
    move.product(dgu_sb[:, n:], dh, silu_sb)
    move.product(through_sb, dh, u_sb)
    move.product(dgu_sb[:, 0:n], through_sb, slope_sb, on_gpsimd=True)
    return dgu_sb, h_sb


class Sums:
    """A core's share of the gradients of weights, for the expert at hand, in float32.

    It is dw1 and dw3 for some columns of F, and dw2 for some rows of D, so that each is written by whole rows.
    """

    def __init__(
        self, move: Moves, dws: tuple[Any, ...], f_part: tuple[int, int], d_part: tuple[int, int], columns: int
    ) -> None:
        self.move, self.dws, self.columns = move, dws, columns
        (self.f0, self.f_share), (self.d0, self.d_share) = f_part, d_part
        D, F = dws[1].shape[1:]
        blocks = (self.f_share // P, self.d_share // P, self.f_share // P)
        self.sum_sbs: list[Any] = [
            nl.ndarray((P, n, width), nl.float32, buffer=nl.sbuf) if n else None
            for n, width in zip(blocks, (D, F, D), strict=True)
        ]
        for sum_sb in self.sum_sbs:
            if sum_sb is not None:
                nisa.memset(sum_sb, 0.0)

    def add(self, item: Item, i: Any, dy: Any, x: Any, dgu: Any, h: Any, sum_keep: Any) -> None:
        """One item's rows, added to what is there if the item is not its expert's first; and the sums to HBM."""
        keep_sb = nl.ndarray((P, 1), nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(keep_sb, sum_keep.ap([[0, P], [1, 1]], scalar_offset=i, indirect_dim=0))
        if self.f_share:
            dgu_sbs = self._hidden_gradients(item, dgu)
            x_sbs = self._rows(item, x, item.read, 0, x.shape[1])
            for which, kind in ((0, 0), (2, 1)):
                lefts = [[gradients[kind] for gradients in block] for block in dgu_sbs]
                self._outer(item, which, lefts, x_sbs, keep_sb)
        if self.d_share:
            dy_sbs = self._rows(item, dy, item.read, self.d0, self.d_share)
            h_sbs = self._rows(item, h, item.row, 0, h.shape[1])
            lefts = [[dy_sb[:, m : m + P] for m in range(0, self.d_share, P)] for dy_sb in dy_sbs]
            self._outer(item, 1, lefts, h_sbs, keep_sb)

    def _rows(self, item: Item, source: Any, index: Callable[[int], Any], first: int, count: int) -> list[Any]:
        """Columns first... of each block's rows, (P, count)."""
        sbs = [nl.ndarray((P, count), source.dtype, buffer=nl.sbuf) for _ in range(item.blocks)]
        for b, to_sb in enumerate(sbs):
            self.move.gather(source, index(b), first, to_sb)
        return sbs

    def _hidden_gradients(self, item: Item, dgu: Any) -> list[list[tuple[Any, Any]]]:
        """Yield dg and du of each P columns of the share for each block, (P, P) each.

        Columns lie in HBM by groups: the group's dg, then its du.
        """
        blocks: list[list[tuple[Any, Any]]] = [[] for _ in range(item.blocks)]
        at = self.f0
        while at < self.f0 + self.f_share:
            group, within = at // self.columns * self.columns, at % self.columns
            n = min(self.columns - within, self.f0 + self.f_share - at)
            if n == self.columns:  # a whole group: one piece of memory
                pairs = [(sb[:, 0:n], sb[:, n:]) for sb in self._rows(item, dgu, item.row, 2 * group, 2 * n)]
            else:
                firsts = (2 * group + within, 2 * group + self.columns + within)
                pairs = list(zip(*(self._rows(item, dgu, item.row, first, n) for first in firsts), strict=True))
            for block, (dg_sb, du_sb) in zip(blocks, pairs, strict=True):
                block += [(dg_sb[:, m : m + P], du_sb[:, m : m + P]) for m in range(0, n, P)]
            at += n
        return blocks

    def _outer(self, item: Item, which: int, lefts: list[list[Any]], right_sbs: list[Any], keep_sb: Any) -> None:
        """left^T right, over all blocks, to a gradient's sums; lefts has each block's (P, P) pieces."""
        dw, sum_sb = self.dws[which], self.sum_sbs[which]
        _, count, width = sum_sb.shape
        first = self.d0 if which == 1 else self.f0
        for m in range(count):
            out_sb = nl.ndarray((P, width), dw.dtype, buffer=nl.sbuf)
            for n, size in pieces(width, BANK):
                part_ps = nl.ndarray((P, size), nl.float32, buffer=nl.psum)
                for b in range(item.blocks):
                    nisa.nc_matmul(part_ps, lefts[b][m], right_sbs[b][:, n : n + size], accumulate=b > 0)
                total_sb = sum_sb[:, m, n : n + size]
                nisa.activation(total_sb, nl.copy, total_sb, scale=keep_sb)
                nisa.tensor_tensor(total_sb, total_sb, part_ps, nl.add)
                nisa.tensor_copy(out_sb[:, n : n + size], total_sb, engine=nisa.engine.gpsimd)
            nisa.dma_copy(item.part(dw, [[width, P], [1, width]], (first + m * P) * width), out_sb)
