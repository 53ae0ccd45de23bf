"""Kernel: the gradients of the weights, dw1 = dg^T x, dw3 = du^T x, dw2 = dy^T h, summed in float32, rounded once.

    experts of several tiles (every core, its share of F):
        tail: sums = ... (float32, SBUF); full tiles: sums += ...; the last: sums + ... -> dw
    experts of one tile (each core its own, all of F):
        ... -> dw, straight from PSUM; no rows: zeros -> dw
"""

from collections.abc import Callable, Iterator
from typing import Any

from nki_moe.experts.walk import Features, P, Rows, Tile, Walk, empty, outer_product, pieces
from nki_moe.tiling import MIDDLE, NONE, lists
from nki_moe.toolchain import nisa, nki, nl

Finish = Callable[[int, Any, Any, int], None]  # finish(gradient, where to, PSUM tile, its number)


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
) -> Any:
    """dw1 (E, F, D), dw2 (E, D, F), dw3 (E, F, D)."""
    E, F, D, dtype = experts, kept.shape[2] * P, x.shape[1], x.dtype
    core, cores = nl.program_id(0), nl.num_programs(0)
    dw1, dw2, dw3 = (nl.ndarray(s, dtype, buffer=nl.shared_hbm) for s in ((E, F, D), (E, D, F), (E, F, D)))
    _, of_one, of_several = lists(cores)
    zero_sb = nl.ndarray((P, max(D, F)), dtype, buffer=nl.sbuf)
    nisa.memset(zero_sb, 0.0)

    class Share:
        """Features f0 to f0 + Fs of all three gradients of the expert at hand."""

        def __init__(self, walk: Walk, f0: int, Fs: int) -> None:
            self.walk, self.f0, self.Fs = walk, f0, Fs
            self.shapes = ((Fs // P, D), (Fs // P, D), (D // P, Fs))  # rows / 128, columns of each

        def operands(self, at: Tile) -> list[tuple[Rows, Rows]]:
            """The factors of each gradient, loaded in the order in which they are used."""
            f0, Fs = self.f0, self.Fs
            dg = Features(at, at.recall_transposed(dkept, 0, f0, Fs))
            index_sb = at.indices()
            x_sb = at.read(x, index_sb)
            du = Features(at, at.recall_transposed(dkept, 1, f0, Fs))
            h = Features(at, at.recall_transposed(kept, 2, f0, Fs))
            dy_sb = at.read(dy, index_sb)
            at.weigh(x_sb, dy_sb, score_rows)
            return [(dg, Rows(at, x_sb)), (du, Rows(at, x_sb)), (Rows(at, dy_sb), h)]

        def products(self, at: Tile) -> Iterator[tuple[int, int, int, Any]]:
            """(gradient, its 128 rows, first column, PSUM tile) of all of a tile's products."""
            for i, (left, right) in enumerate(self.operands(at)):
                for m in range(self.shapes[i][0]):
                    for n, part_ps in outer_product(left, right, m, self.shapes[i][1]):
                        yield i, m, n, part_ps

        def store(self, at: Tile, out: Callable[[Any, int, int, int, Any], None]) -> None:
            """out(where to, gradient, 128 rows, column, PSUM tile) for each product; then to HBM, about a row of D at a time."""
            out_sb: Any = None
            for i, m, n, part_ps in self.products(at):
                rows, width = self.shapes[i]
                size = max(1, D // width)
                if not n and not m % size:
                    out_sb = nl.ndarray((P, min(size, rows - m), width), dtype, buffer=nl.sbuf)
                out(out_sb[:, m % size, n : n + part_ps.shape[1]], i, m, n, part_ps)
                if n + part_ps.shape[1] == width and m % size == out_sb.shape[1] - 1:
                    self.write(i, m // size * size, out_sb)

        def write(self, i: int, m: int, out_sb: Any) -> None:
            """(P, count, width) to gradient i, from 128 rows m on."""
            dw, length, first = ((dw1, D, self.f0 * D), (dw3, D, self.f0 * D), (dw2, F, self.f0))[i]
            pattern = [[length, P], [P * length, out_sb.shape[1]], [1, out_sb.shape[2]]]
            nisa.dma_copy(self.walk.of(dw, pattern, first + m * P * length), out_sb)

    def several(share: Share) -> None:
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

    def one(share: Share) -> None:
        turns = iter(range(1 << 30))
        share.walk.tail(lambda at: share.store(at, lambda to_sb, i, m, n, part_ps: empty(to_sb, part_ps, next(turns))))

        def none() -> None:
            for i, (rows, width) in enumerate(share.shapes):
                zeros = zero_sb[:, 0:width].expand_dim(1).broadcast(1, rows)
                share.write(i, 0, zeros)

        share.walk.when(NONE, none)

    Fs = F // (cores * f_splits)
    walk = Walk(plan, of_several, tails, factors, source, fused)
    for split in range(f_splits):
        share = Share(walk, (split * cores + core) * Fs, Fs)
        walk.slots(lambda share=share: several(share))  # type: ignore[misc]

    walk = Walk(plan, of_one[core], tails, factors, source, fused)
    for f0, Fs in pieces(0, F, F // f_splits_alone):
        share = Share(walk, f0, Fs)
        walk.slots(lambda share=share: one(share))  # type: ignore[misc]
    return dw1, dw2, dw3
