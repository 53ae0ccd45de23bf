"""Kernel: the gradients of the weights, dw1 = dg^T x, dw3 = du^T x, dw2 = dy^T h, summed in float32, rounded once.

experts of several tiles (every core, its share of F):
    tail: sums = ... (float32, SBUF); full tiles: sums += ...; the last: sums + ... -> dw
experts of one tile (each core its own, all of F):
    ... -> dw, straight from PSUM; no rows: zeros -> dw
"""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from nki_moe.experts.walk import Features, Rows, Tile, Walk, empty, outer_product, pieces
from nki_moe.hardware import P
from nki_moe.tiling import BLOCKS, MIDDLE, NONE, lists
from nki_moe.toolchain import nisa, nki, nl


@nki.jit
def backward_weights(
    dy: Any,
    x: Any,
    kept: Any,  # (3P, C, F / P)
    dkept: Any,  # (2P, C, F / P)
    plan: Any,
    tails: Any,
    factors: Any,
    source: Any,
    score_rows: Any,
    experts: int,
    fused: bool,
    f_splits: int,
    f_splits_alone: int,
    d_splits: int,
) -> Any:
    """dw1 (E, F, D), dw2 (E, D, F), dw3 (E, F, D)."""
    E, F, D, dtype = experts, kept.shape[2] * P, x.shape[1], x.dtype
    core, cores = nl.program_id(0), nl.num_programs(0)
    results = [nl.ndarray(s, dtype, buffer=nl.shared_hbm) for s in ((E, F, D), (E, D, F), (E, F, D))]
    inputs = (dy, x, kept, dkept, score_rows)
    _, of_one, of_several = lists(cores)

    walk = Walk(plan, of_several, tails, factors, source, fused)
    for f0, Fs in pieces(0, F, F // (cores * f_splits))[core::cores]:
        for d0, Ds in pieces(0, D, D // d_splits):
            share = Share(walk, inputs, results, f0, Fs, d0, Ds)
            walk.slots(lambda share=share: several(share))  # type: ignore[misc]

    walk = Walk(plan, of_one[core], tails, factors, source, fused)
    zero_sb = nl.ndarray((P, max(D // d_splits, F // f_splits_alone)), dtype, buffer=nl.sbuf)
    nisa.memset(zero_sb, 0.0)
    for f0, Fs in pieces(0, F, F // f_splits_alone):
        for d0, Ds in pieces(0, D, D // d_splits):
            share = Share(walk, inputs, results, f0, Fs, d0, Ds)
            walk.slots(lambda share=share: one(share, zero_sb))  # type: ignore[misc]
    return tuple(results)


class Share:
    """Features f0... of F and d0... of D of all three gradients, of the expert at hand."""

    def __init__(
        self, walk: Walk, inputs: tuple[Any, ...], results: list[Any], f0: int, Fs: int, d0: int, Ds: int
    ) -> None:
        self.walk, self.inputs, self.results = walk, inputs, results
        self.f0, self.Fs, self.d0, self.Ds = f0, Fs, d0, Ds
        self.shapes = ((Fs // P, Ds), (Ds // P, Fs), (Fs // P, Ds))  # rows / 128, columns of each

    def allocate(self) -> None:
        """Buffers for a tile of any size."""
        x, features = (P, BLOCKS, self.Ds), (P, self.Fs // P, BLOCKS, P)
        self.buffers = [
            nl.ndarray(s, self.inputs[1].dtype, buffer=nl.sbuf) for s in (features, x, features, features, x)
        ]

    def products(self, at: Tile) -> Iterator[tuple[int, int, int, Any]]:
        """(gradient, its 128 rows, first column, PSUM tile) of all of a tile's products: dw1, dw3, dw2, and so are the
        factors loaded, that the next tile's first can come in as early as possible.
        """
        dy, x, kept, dkept, score_rows = self.inputs
        dg_sb, x_sb, du_sb, h_sb, dy_sb = self.buffers
        dg = Features(at, at.recall_transposed(dkept, 0, self.f0, dg_sb))
        index_sb = at.indices()
        x_sb = at.read(x, index_sb, self.d0, x_sb)
        du = Features(at, at.recall_transposed(dkept, 1, self.f0, du_sb))
        h = Features(at, at.recall_transposed(kept, 2, self.f0, h_sb))
        dy_sb = at.read(dy, index_sb, self.d0, dy_sb)
        at.weigh(x_sb, None)
        for i, left, right in ((0, dg, Rows(at, x_sb)), (2, du, Rows(at, x_sb)), (1, Rows(at, dy_sb), h)):
            if i == 1:
                at.weigh(dy_sb, score_rows if self.walk.fused else None)
            for m in range(self.shapes[i][0]):
                for n, part_ps in outer_product(left, right, m, self.shapes[i][1]):
                    yield i, m, n, part_ps

    def store(self, at: Tile, out: Callable[[Any, int, int, int, Any], None]) -> None:
        """out(where to, gradient, 128 rows, column, PSUM tile) for each product; then to HBM, about a row of D at a
        time.
        """
        out_sb: Any = None
        for i, m, n, part_ps in self.products(at):
            rows, width = self.shapes[i]
            size = max(1, self.Ds // width)
            if not n and not m % size:
                out_sb = nl.ndarray((P, min(size, rows - m), width), self.results[i].dtype, buffer=nl.sbuf)
            out(out_sb[:, m % size, n : n + part_ps.shape[1]], i, m, n, part_ps)
            if n + part_ps.shape[1] == width and m % size == out_sb.shape[1] - 1:
                self.write(i, m // size * size, out_sb)

    def write(self, i: int, m: int, out_sb: Any) -> None:
        """(P, count, width) to gradient i, from 128 rows m on."""
        dw, (row, column) = self.results[i], (self.d0, self.f0) if i == 1 else (self.f0, self.d0)
        length, (_, count, width) = dw.shape[2], out_sb.shape
        pattern = [[length, P], [P * length, count], [1, width]]
        nisa.dma_copy(self.walk.of(dw, pattern, (row + m * P) * length + column), out_sb)


def several(share: Share) -> None:
    """An expert of several tiles."""
    share.allocate()
    sum_sbs = [nl.ndarray((P, m, n), nl.float32, buffer=nl.sbuf) for m, n in share.shapes]

    def total(i: int, m: int, n: int, part_ps: Any) -> Any:
        return sum_sbs[i][:, m, n : n + part_ps.shape[1]]

    def begin(at: Tile) -> None:
        for turn, (i, m, n, part_ps) in enumerate(share.products(at)):
            empty(total(i, m, n, part_ps), part_ps, turn)

    def add(at: Tile) -> None:
        for i, m, n, part_ps in share.products(at):
            total_sb = total(i, m, n, part_ps)
            nisa.tensor_tensor(total_sb, total_sb, part_ps, nl.add)

    def end(to_sb: Any, i: int, m: int, n: int, part_ps: Any) -> None:
        nisa.tensor_tensor(to_sb, total(i, m, n, part_ps), part_ps, nl.add)

    share.walk.tail(begin)
    share.walk.full(add, MIDDLE)
    share.store(share.walk.next(), end)


def one(share: Share, zero_sb: Any) -> None:
    """An expert of one tile, or of none."""
    share.allocate()
    turns = count()
    share.walk.tail(lambda at: share.store(at, lambda to_sb, i, m, n, part_ps: empty(to_sb, part_ps, next(turns))))

    def none() -> None:
        for i, (rows, width) in enumerate(share.shapes):
            share.write(i, 0, zero_sb[:, 0:width].expand_dim(1).broadcast(1, rows))

    share.walk.when(NONE, none)
