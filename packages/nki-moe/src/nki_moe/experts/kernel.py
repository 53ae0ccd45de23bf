"""The expert MLP as three NKI kernels: forward, backward for the data, backward for the weights.

One program serves every routing: each kernel walks the experts in a loop on the device, reads an expert's place and
number of tiles from tables (tiling.py), and loads its weights once. Both cores of an LNC2 pair run all rows, so any
routing is balanced; what they divide is the weights: F in the first pass, then, behind one barrier, D in the second.

    forward          g = w1 x, u = w3 x, h = silu(g) u   [F, rows], kept   |  y  = h w2
    backward_data    dh = w2 dy, dg, du                  [F, rows], kept   |  dx = dg w1 + du w3
    backward_weights dw1 = dg^T x, dw3 = du^T x, dw2 = dy^T h, summed in float32 in SBUF, rounded once

Fused, rows are gathered from tokens by indirect DMA, and a last pass sums each token's K rows in float32: a gather again, so that
no two writes ever meet.

Dimensions: R rows, T tokens, E experts, D model, F hidden, P = 128 partitions; C columns, the padded rows of tiling.py.
A buffer's suffix says where it is: _sb SBUF, _ps PSUM, _hbm scratch; arguments and results are in HBM.
"""

from collections.abc import Callable, Iterator
from typing import Any

from nki_moe.tiling import (
    FULL,
    MANY,
    NONE,
    ODD,
    PAIRS,
    TAIL_ROWS,
    TAILS,
    TAILS_AFTER,
    TAILS_ALONE,
    TILE,
    WIDTH,
    columns,
)
from nki_moe.toolchain import nisa, nki, nl

P = 128
BANK = 512  # float32 of one PSUM bank: the widest matmul


@nki.jit
def forward(
    x: Any,  # (R, D), or (T, D) when fused
    w1: Any,  # (E, F, D)
    w2: Any,  # (E, D, F)
    w3: Any,  # (E, F, D)
    plan: Any,
    load: Any,
    store: Any,
    clear: Any,
    source: Any,  # (R, 1) token of each row
    inverse: Any,  # (T, K) row of each choice
    scores: Any,  # (T, K)
    rows: int,
    fused: bool,
    save: bool,
    f_splits: int,
    d_splits: int,
    ahead: bool,
) -> Any:
    """y like x, and with `save` (3P, C, F / P): gate, up and h, as Tile.keep lays them out.

    Pseudocode, of each core:
        for its share of F:    for each expert: load w1, w3 transposed; for each tile: gT, uT -> hT -> HBM
        barrier
        for its share of D:    for each expert: load w2 transposed; for each tile: h^T w2 -> y
        fused: for each 128 tokens: y = sum of score * row
    """
    (E, F, D), core, cores = w1.shape, nl.program_id(0), nl.num_programs(0)
    C, dtype = columns(rows, E), x.dtype
    kept = nl.ndarray((3 * P if save else P, C, F // P), dtype, buffer=nl.shared_hbm)
    y = nl.ndarray(x.shape, dtype, buffer=nl.shared_hbm)
    y_rows = nl.ndarray((rows, D), dtype, buffer=nl.shared_hbm) if fused else y
    first_h = 2 if save else 0
    walk = Walk(plan, load, store, source, fused, ahead)

    Fs = F // (cores * f_splits)
    for split in range(f_splits):
        f0 = (split * cores + core) * Fs

        w1T_sbs, w3T_sbs = (walk.buffers((P, D // P, Fs), dtype) for _ in range(2))

        def gate_up(
            expert: Expert, f0: int = f0, w1T_sbs: tuple[Any, ...] = w1T_sbs, w3T_sbs: tuple[Any, ...] = w3T_sbs
        ) -> None:
            w1T_sb, w3T_sb = w1T_sbs[expert.second], w3T_sbs[expert.second]
            for w, w_sb in ((w1, w1T_sb), (w3, w3T_sb)):
                nisa.dma_transpose(dst=w_sb, src=expert.of(w, [[D, Fs], [P, D // P], [1, P]], f0 * D))

            def tile(at: Tile) -> Callable[[], None]:
                n, xT_sb = at.n, at.read_transposed(x)
                return lambda: compute(at, n, xT_sb)

            def compute(at: Tile, n: int, xT_sb: Any) -> None:
                h_sb = nl.ndarray((P, Fs // P, n), dtype, buffer=nl.sbuf)
                g_sb: Any = nl.ndarray((P, Fs // P, n), dtype, buffer=nl.sbuf) if save else None
                u_sb: Any = nl.ndarray((P, Fs // P, n), dtype, buffer=nl.sbuf) if save else None
                for f in range(Fs // P):
                    g_ps = nl.ndarray((P, n), nl.float32, buffer=nl.psum)
                    u_ps = nl.ndarray((P, n), nl.float32, buffer=nl.psum)
                    for ps, w_sb in ((g_ps, w1T_sb), (u_ps, w3T_sb)):
                        for d in range(D // P):
                            nisa.nc_matmul(ps, w_sb[:, d, f * P : (f + 1) * P], xT_sb[:, d, :], accumulate=d > 0)
                    silu_sb = nl.ndarray((P, n), nl.float32, buffer=nl.sbuf)
                    nisa.activation(silu_sb, nl.silu, g_ps)
                    nisa.tensor_tensor(h_sb[:, f, :], silu_sb, u_ps, nl.multiply)
                    if save:
                        nisa.activation(g_sb[:, f, :], nl.copy, g_ps)
                        nisa.tensor_copy(u_sb[:, f, :], u_ps)
                at.keep(kept, first_h, f0, h_sb)
                if save:
                    at.keep(kept, 0, f0, g_sb)
                    at.keep(kept, 1, f0, u_sb)

            walk.tiles(expert, tile)

        walk.experts(E, gate_up)

    if cores == 2:
        nisa.core_barrier(kept, (0, 1))

    Ds = D // (cores * d_splits)
    for split in range(d_splits):
        d0 = (split * cores + core) * Ds

        w2T_sbs = walk.buffers((P, F // P, Ds), dtype)

        def down(expert: Expert, d0: int = d0, w2T_sbs: tuple[Any, ...] = w2T_sbs) -> None:
            w2T_sb = w2T_sbs[expert.second]
            nisa.dma_transpose(dst=w2T_sb, src=expert.of(w2, [[F, Ds], [P, F // P], [1, P]], d0 * F))

            def tile(at: Tile) -> Callable[[], None]:
                h_sb = at.recall(kept, first_h, 0, F)
                return lambda: at.write(y_rows, d0, product(((h_sb, w2T_sb),), at.n, Ds, dtype))

            walk.tiles(expert, tile)

        walk.experts(E, down)
        if fused:
            combine(y, y_rows, inverse, scores, d0, Ds)
        else:
            walk.zero(y, clear, d0, Ds)
    return (y, kept) if save else (y,)


@nki.jit
def backward_data(
    dy: Any,  # like x
    w1: Any,
    w2: Any,
    w3: Any,
    kept: Any,  # (3P, C, F / P)
    plan: Any,
    load: Any,
    store: Any,
    scale: Any,
    clear: Any,
    source: Any,
    score_rows: Any,  # (R, 1) score of each row
    inverse: Any,
    rows: int,
    fused: bool,
    f_splits: int,
    d_splits: int,
    ahead: bool,
) -> Any:
    """dx like dy; (2P, C, F / P): the gradients of gate and up; (cores * splits, C): each share's part of the scores' gradients."""
    (E, F, D), core, cores = w1.shape, nl.program_id(0), nl.num_programs(0)
    C, dtype = columns(rows, E), dy.dtype
    dkept = nl.ndarray((2 * P, C, F // P), dtype, buffer=nl.shared_hbm)
    dx = nl.ndarray(dy.shape, dtype, buffer=nl.shared_hbm)
    dx_rows = nl.ndarray((rows, D), dtype, buffer=nl.shared_hbm) if fused else dx
    dscores = nl.ndarray((cores * f_splits, C), nl.float32, buffer=nl.shared_hbm)
    walk = Walk(plan, load, store, source, fused, ahead)
    if fused:
        ones_sb = nl.ndarray((P, 1), nl.float32 if dtype == nl.float32 else nl.bfloat16, buffer=nl.sbuf)
        nisa.memset(ones_sb, 1.0)

    Fs = F // (cores * f_splits)
    for split in range(f_splits):
        share = split * cores + core
        f0 = share * Fs

        w2_sbs = walk.buffers((P, D // P, Fs), dtype)

        def hidden(expert: Expert, f0: int = f0, share: int = share, w2_sbs: tuple[Any, ...] = w2_sbs) -> None:
            w2_sb = w2_sbs[expert.second]
            nisa.dma_copy(w2_sb, expert.of(w2, [[F, P], [P * F, D // P], [1, Fs]], f0))

            def tile(at: Tile) -> Callable[[], None]:
                dyT_sb = at.read_transposed(dy)
                g_sb, u_sb = at.recall(kept, 0, f0, Fs), at.recall(kept, 1, f0, Fs)
                h_sb = at.recall(kept, 2, f0, Fs) if fused else None
                score_sb = at.scores(score_rows, scale) if fused else None
                return lambda: compute(at, at.n, dyT_sb, g_sb, u_sb, h_sb, score_sb)

            def compute(at: Tile, n: int, dyT_sb: Any, g_sb: Any, u_sb: Any, h_sb: Any, score_sb: Any) -> None:
                dg_sb = nl.ndarray((P, Fs // P, n), dtype, buffer=nl.sbuf)
                du_sb = nl.ndarray((P, Fs // P, n), dtype, buffer=nl.sbuf)
                if fused:
                    dscore_ps = nl.ndarray((1, n), nl.float32, buffer=nl.psum)
                for f in range(Fs // P):
                    dh_ps = nl.ndarray((P, n), nl.float32, buffer=nl.psum)
                    for d in range(D // P):
                        nisa.nc_matmul(dh_ps, w2_sb[:, d, f * P : (f + 1) * P], dyT_sb[:, d, :], accumulate=d > 0)
                    dh = dh_ps
                    if fused:  # <dy, y> = <w2 dy, h>
                        part_sb = nl.ndarray((P, n), ones_sb.dtype, buffer=nl.sbuf)
                        nisa.tensor_tensor(part_sb, dh_ps, h_sb[:, f, :], nl.multiply)
                        nisa.nc_matmul(dscore_ps, ones_sb, part_sb, accumulate=f > 0)
                        dh = nl.ndarray((P, n), nl.float32, buffer=nl.sbuf)
                        nisa.tensor_tensor(dh, dh_ps, score_sb, nl.multiply)
                    silu_sb = nl.ndarray((P, n), dtype, buffer=nl.sbuf)
                    slope_sb = nl.ndarray((P, n), nl.float32, buffer=nl.sbuf)
                    through_sb = nl.ndarray((P, n), nl.float32, buffer=nl.sbuf)
                    nisa.activation(silu_sb, nl.silu, g_sb[:, f, :])
                    nisa.activation(slope_sb, nl.silu_dx, g_sb[:, f, :])
                    nisa.tensor_tensor(du_sb[:, f, :], dh, silu_sb, nl.multiply)
                    nisa.tensor_tensor(through_sb, dh, u_sb[:, f, :], nl.multiply)
                    nisa.tensor_tensor(dg_sb[:, f, :], through_sb, slope_sb, nl.multiply)
                at.keep(dkept, 0, f0, dg_sb)
                at.keep(dkept, 1, f0, du_sb)
                if fused:
                    dscore_sb = nl.ndarray((1, n), nl.float32, buffer=nl.sbuf)
                    nisa.activation(dscore_sb, nl.copy, dscore_ps)
                    to = dscores.ap([[C, 1], [1, n]], offset=share * C, scalar_offset=at.column, indirect_dim=1)
                    nisa.dma_copy(to, dscore_sb)

            walk.tiles(expert, tile)

        walk.experts(E, hidden)

    if cores == 2:
        nisa.core_barrier(dkept, (0, 1))

    Ds = D // (cores * d_splits)
    for split in range(d_splits):
        d0 = (split * cores + core) * Ds

        w1_sbs, w3_sbs = (walk.buffers((P, F // P, Ds), dtype) for _ in range(2))

        def outwards(
            expert: Expert, d0: int = d0, w1_sbs: tuple[Any, ...] = w1_sbs, w3_sbs: tuple[Any, ...] = w3_sbs
        ) -> None:
            w1_sb, w3_sb = w1_sbs[expert.second], w3_sbs[expert.second]
            for w, w_sb in ((w1, w1_sb), (w3, w3_sb)):
                nisa.dma_copy(w_sb, expert.of(w, [[D, P], [P * D, F // P], [1, Ds]], d0))

            def tile(at: Tile) -> Callable[[], None]:
                dg_sb, du_sb = at.recall(dkept, 0, 0, F), at.recall(dkept, 1, 0, F)
                return lambda: at.write(dx_rows, d0, product(((dg_sb, w1_sb), (du_sb, w3_sb)), at.n, Ds, dtype))

            walk.tiles(expert, tile)

        walk.experts(E, outwards)
        if fused:
            combine(dx, dx_rows, inverse, None, d0, Ds)
        else:
            walk.zero(dx, clear, d0, Ds)
    return dx, dkept, dscores


@nki.jit
def backward_weights(
    dy: Any,
    x: Any,
    kept: Any,  # (3P, C, F / P)
    dkept: Any,  # (2P, C, F / P)
    plan: Any,
    load: Any,
    store: Any,
    scale: Any,
    real: Any,
    source: Any,
    score_rows: Any,
    experts: int,
    rows: int,
    fused: bool,
    f_splits: int,
    ahead: bool,
) -> Any:
    """dw1 (E, F, D), dw2 (E, D, F), dw3 (E, F, D).

    Pseudocode, for each share of F of this core and each expert:
        no rows:   store zeros
        one tile:  store [dg | du]^T x, dy^T h, straight from PSUM
        more:      sums = 0 (float32, SBUF); for each tile: sums += ...; cast and store
    """
    E, F, D, dtype = experts, kept.shape[2] * P, x.shape[1], x.dtype
    core, cores = nl.program_id(0), nl.num_programs(0)
    dw1 = nl.ndarray((E, F, D), dtype, buffer=nl.shared_hbm)
    dw2 = nl.ndarray((E, D, F), dtype, buffer=nl.shared_hbm)
    dw3 = nl.ndarray((E, F, D), dtype, buffer=nl.shared_hbm)
    zero_sb = nl.ndarray((P, max(D, F // cores)), dtype, buffer=nl.sbuf)
    nisa.memset(zero_sb, 0.0)
    walk = Walk(plan, load, store, source, fused, ahead)

    Fs = F // (cores * f_splits)
    for split in range(f_splits):
        f0 = (split * cores + core) * Fs

        def sums(expert: Expert, f0: int = f0) -> None:
            walk.open(expert)
            results = (  # gradient, its row length, where this share begins, and as many rows of 128 x so many columns
                (dw1, D, f0 * D, Fs // P, D),
                (dw2, F, f0, D // P, Fs),
                (dw3, D, f0 * D, Fs // P, D),
            )
            sum_sbs = [nl.ndarray((P, m, n), nl.float32, buffer=nl.sbuf) for *_, m, n in results]

            def operands(at: Tile) -> list[tuple[Any, Any]]:
                x_sb, dy_sb = at.read(x), at.read(dy)
                dg, du = (Features(at.recall_transposed(dkept, i, f0, Fs)) for i in (0, 1))
                h = Features(at.recall_transposed(kept, 2, f0, Fs))
                at.weigh(x_sb, dy_sb, real, scale, score_rows)
                return [(dg, Rows(x_sb)), (Rows(dy_sb), h), (du, Rows(x_sb))]

            def store(i: int, m: int, out_sb: Any) -> None:
                dw, width, first, _, n = results[i]
                nisa.dma_copy(expert.of(dw, [[width, P], [1, n]], first + m * P * width), out_sb)

            def alone(at: Tile) -> Callable[[], None]:
                pairs = operands(at)

                def compute() -> None:
                    for i, (left, right) in enumerate(pairs):
                        for m in range(results[i][3]):
                            out_sb = nl.ndarray((P, results[i][4]), dtype, buffer=nl.sbuf)
                            for n, part_ps in outer_product(left, right, m, results[i][4], at.blocks):
                                empty(out_sb[:, n : n + part_ps.shape[1]], part_ps, m + n // BANK)
                            store(i, m, out_sb)

                return compute

            def add(at: Tile) -> Callable[[], None]:
                pairs = operands(at)

                def compute() -> None:
                    for i, (left, right) in enumerate(pairs):
                        for m in range(results[i][3]):
                            for n, part_ps in outer_product(left, right, m, results[i][4], at.blocks):
                                total_sb = sum_sbs[i][:, m, n : n + part_ps.shape[1]]
                                nisa.tensor_tensor(total_sb, total_sb, part_ps, nl.add)

                return compute

            def begin(_: Any) -> None:
                for sum_sb in sum_sbs:
                    for m in range(
                        sum_sb.shape[1]
                    ):  # in pieces, so that the first can be ready before the last is free
                        nisa.memset(sum_sb[:, m, :], 0.0, engine=nisa.engine.gpsimd)

            def end(_: Any) -> None:
                for i, (*_rest, rows_of, n) in enumerate(results):
                    for m in range(rows_of):
                        out_sb = nl.ndarray((P, n), dtype, buffer=nl.sbuf)
                        nisa.activation(out_sb, nl.copy, sum_sbs[i][:, m, :])
                        store(i, m, out_sb)

            def nothing(_: Any) -> None:
                for i, (*_rest, rows_of, n) in enumerate(results):
                    for m in range(rows_of):
                        store(i, m, zero_sb[:, 0:n])

            walk.loop(NONE, nothing)
            walk.tails(expert, alone, TAILS_ALONE)
            walk.loop(MANY, begin)
            walk.full(expert, add)
            walk.tails(expert, add, TAILS_AFTER)
            walk.loop(MANY, end)

        walk.experts(E, sums)
    return dw1, dw2, dw3


class Expert:
    """An expert of a loop on the device: the one in register `e`, or the one after it."""

    def __init__(self, e: Any, second: int) -> None:
        self.e, self.second = e, second

    def of(self, tensor: Any, pattern: list[list[int]], offset: int = 0) -> Any:
        """A pattern in this expert's part of a tensor (E, ...)."""
        size = 1
        for n in tensor.shape[1:]:
            size *= n
        return tensor.ap(pattern, offset=offset + self.second * size, scalar_offset=self.e, indirect_dim=0)


class Walk:
    """The way of one core through experts and tiles.

    With `ahead`, two experts and two tiles are in flight: each has its own buffers, and the second's loads are issued before the
    first's matmuls, so that DMA and the Tensor Engine overlap.
    """

    def __init__(self, plan: Any, load: Any, store: Any, source: Any, fused: bool, ahead: bool) -> None:
        self.plan, self.load, self.store, self.source, self.fused, self.ahead = plan, load, store, source, fused, ahead
        self.trips = nisa.register_alloc()
        self.places = [(nisa.register_alloc(), nisa.register_alloc()) for _ in range(2)]
        self.step_sb = nl.ndarray((1, 2), nl.int32, buffer=nl.sbuf)
        nisa.memset(self.step_sb, TILE)
        self.plan_sb: Any = None  # of the expert at hand
        self.at_sb: Any = None

    def buffers(self, shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
        """A buffer for each expert in flight."""
        first = nl.ndarray(shape, dtype, buffer=nl.sbuf)
        return (first, nl.ndarray(shape, dtype, buffer=nl.sbuf) if self.ahead else first)

    def experts(self, E: int, body: Callable[[Expert], None]) -> None:
        """body(expert) for each, on the device."""

        def two(e: Any) -> None:
            body(Expert(e, 0))
            body(Expert(e, 1))

        together = E - E % 2 if self.ahead else 0
        if together:
            nl.fori_loop(0, together, two, step=2)
        if together < E:
            nl.fori_loop(together, E, lambda e: body(Expert(e, 0)))

    def open(self, expert: Expert) -> None:
        """Fetch where an expert's rows are."""
        self.plan_sb = nl.ndarray((1, WIDTH), nl.int32, buffer=nl.sbuf)
        self.at_sb = nl.ndarray((1, 2), nl.int32, buffer=nl.sbuf)  # row, column
        nisa.dma_copy(self.plan_sb, expert.of(self.plan, [[WIDTH, 1], [1, WIDTH]]))
        nisa.tensor_copy(self.at_sb, self.plan_sb[:, 0:2], engine=nisa.engine.gpsimd)

    def loop(self, times: int, body: Callable[[Any], None]) -> None:
        """body as often as the expert's plan says in column `times`."""
        nisa.register_load(self.trips, self.plan_sb[:, times : times + 1])
        nl.fori_loop(0, self.trips, body)

    def tiles(self, expert: Expert, tile: Callable[["Tile"], Callable[[], None]]) -> None:
        """For each tile of an expert: load = tile(at), which returns what computes."""
        self.open(expert)
        self.full(expert, tile)
        self.tails(expert, tile, TAILS)

    def full(self, expert: Expert, tile: Callable[["Tile"], Callable[[], None]]) -> None:
        """The full tiles."""

        def two(_: Any) -> None:
            first, second = self.start(expert, tile, TILE, 0), self.start(expert, tile, TILE, 1)
            first()
            second()

        if self.ahead:
            self.loop(PAIRS, two)
        self.loop(ODD if self.ahead else FULL, lambda _: self.start(expert, tile, TILE, 0)())

    def tails(self, expert: Expert, tile: Callable[["Tile"], Callable[[], None]], first: int) -> None:
        """The tail tile, by the flags from column `first` on."""
        for i, n in enumerate(TAIL_ROWS):
            self.loop(first + i, lambda _, n=n: self.start(expert, tile, n, 1, tail=True)())  # type: ignore[misc]

    def start(
        self, expert: Expert, tile: Callable[["Tile"], Callable[[], None]], n: int, place: int, tail: bool = False
    ) -> Callable[[], None]:
        """Load the next tile; what computes it is returned."""
        row, column = self.places[place]
        nisa.register_load(row, self.at_sb[:, 0:1])
        nisa.register_load(column, self.at_sb[:, 1:2])
        nisa.tensor_tensor(
            self.at_sb, self.at_sb, self.step_sb, nl.add
        )  # of integers: on GpSimd, which nothing holds up
        return tile(Tile(self, expert, n, tail, row, column))

    def zero(self, y: Any, clear: Any, d0: int, width: int) -> None:
        """Clear the rows that belong to no expert."""
        zero_sb = nl.ndarray((P, width), y.dtype, buffer=nl.sbuf)
        nisa.memset(zero_sb, 0.0)
        plan_sb = nl.ndarray((1, WIDTH), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(plan_sb, self.plan[self.plan.shape[0] - 1 : self.plan.shape[0], :])
        nisa.register_load(self.trips, plan_sb[:, FULL : FULL + 1])

        def tile(i: Any) -> None:
            index_sb = nl.ndarray((P, 1), nl.int32, buffer=nl.sbuf)
            nisa.dma_copy(index_sb, clear.ap([[1, P], [1, 1]], scalar_offset=i, indirect_dim=0))
            scatter(y, d0, zero_sb, index_sb)

        nl.fori_loop(0, self.trips, tile)


class Tile:
    """`n` rows of one expert: blocks with the rows on `p` partitions, or n columns with a feature on each partition.

    A tail tile is the last of an expert, filled up with repetitions of the last row.
    """

    def __init__(self, walk: Walk, expert: Expert, n: int, tail: bool, row: Any, column: Any) -> None:
        self.walk, self.expert, self.n, self.tail, self.row, self.column = walk, expert, n, tail, row, column
        self.p = min(n, P)
        self.blocks = n // self.p

    # -- rows, in HBM as (rows, features) ------------------------------------------------------------------------------
    def rows(self, tensor: Any, pattern: list[list[int]], offset: int = 0) -> Any:
        """A pattern from this tile's first row."""
        return tensor.ap(pattern, offset=offset, scalar_offset=self.row, indirect_dim=0)

    def indices(self) -> Any:
        """Which rows of the input the tile is made of, (p, blocks); None when they simply follow each other."""
        pattern = [[1, self.p], [P, self.blocks]]
        if self.tail:
            table = self.expert.of(self.walk.load, pattern)
        elif self.walk.fused:
            table = self.rows(self.walk.source, pattern)
        else:
            return None
        index_sb = nl.ndarray((self.p, self.blocks), nl.uint32, buffer=nl.sbuf)
        nisa.dma_copy(index_sb, table)
        return index_sb

    def read(self, x: Any) -> Any:
        """(p, blocks, D): rows on partitions."""
        D, p, index_sb = x.shape[1], self.p, self.indices()
        x_sb = nl.ndarray((p, self.blocks, D), x.dtype, buffer=nl.sbuf)
        if index_sb is None:
            nisa.dma_copy(x_sb, self.rows(x, [[D, p], [p * D, self.blocks], [1, D]]))
            return x_sb
        for b in range(self.blocks):
            nisa.dma_copy(x_sb[:, b, :], x.ap([[D, p], [1, D]], vector_offset=index_sb[:, b : b + 1], indirect_dim=0))
        return x_sb

    def read_transposed(self, x: Any) -> Any:
        """(P, D / P, n): features on partitions."""
        D = x.shape[1]
        xT_sb = nl.ndarray((P, D // P, self.n), x.dtype, buffer=nl.sbuf)
        pattern = [[D, self.n], [P, D // P], [1, P]]
        if not self.tail and not self.walk.fused:
            nisa.dma_transpose(dst=xT_sb, src=self.rows(x, pattern))
        elif x.dtype == nl.float32:  # DMA gathers and transposes two-byte types at once, wider ones in two steps
            x_sb = self.read(x)
            for b in range(self.blocks):
                block_sb = xT_sb[:, :, b * P : b * P + self.p]
                nisa.dma_transpose(dst=block_sb, src=x_sb[:, b, :].reshape_dim(1, (D // P, P)))
        else:
            nisa.dma_transpose(dst=xT_sb, src=x.ap(pattern, vector_offset=self.indices(), indirect_dim=0))
        return xT_sb

    def write(self, y: Any, d0: int, y_sb: Any) -> None:
        """Rows (p, blocks, width) to columns d0... of y; rows that only fill the tile are skipped."""
        D, p, width = y.shape[1], self.p, y_sb.shape[2]
        if not self.tail:
            nisa.dma_copy(self.rows(y, [[D, p], [p * D, self.blocks], [1, width]], d0), y_sb)
            return
        index_sb = nl.ndarray((p, self.blocks), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(index_sb, self.expert.of(self.walk.store, [[1, p], [P, self.blocks]]))
        for b in range(self.blocks):
            scatter(y, d0, y_sb[:, b, :], index_sb[:, b : b + 1])

    # -- what passes keep, in HBM as (kinds x P, C, F / P): tile by tile, each partition's features and rows end to end ----------
    def kept(self, kept: Any, kind: int, f0: int, features: int) -> Any:
        """This tile's part of kept, (P, features / P, n)."""
        _, C, blocks = kept.shape
        pitch, n = C * blocks, self.n
        offset = kind * P * pitch + f0 // P * n
        pattern = [[pitch, P], [n, features // P], [1, n]]
        return kept.ap(pattern, offset=offset, scalar_offset=self.column, indirect_dim=1)

    def keep(self, kept: Any, kind: int, f0: int, value_sb: Any) -> None:
        """(P, features / P, n) to features f0... of kept."""
        nisa.dma_copy(self.kept(kept, kind, f0, value_sb.shape[1] * P), value_sb)

    def recall(self, kept: Any, kind: int, f0: int, features: int) -> Any:
        """(P, features / P, n)."""
        value_sb = nl.ndarray((P, features // P, self.n), kept.dtype, buffer=nl.sbuf)
        nisa.dma_copy(value_sb, self.kept(kept, kind, f0, features))
        return value_sb

    def recall_transposed(self, kept: Any, kind: int, f0: int, features: int) -> Any:
        """(p, features / P, blocks, P): rows on partitions."""
        value_sb = nl.ndarray((self.p, features // P, self.blocks, P), kept.dtype, buffer=nl.sbuf)
        _, C, blocks = kept.shape
        pitch, n = C * blocks, self.n
        pattern = [[pitch, P], [n, features // P], [P, self.blocks], [1, self.p]]
        offset = kind * P * pitch + f0 // P * n
        nisa.dma_transpose(dst=value_sb, src=kept.ap(pattern, offset=offset, scalar_offset=self.column, indirect_dim=1))
        return value_sb

    # -- one number a row -------------------------------------------------------------------------------------------------
    def per_row(self, score_rows: Any, scale: Any, pattern: list[list[int]], offset: int = 0) -> Any:
        """Scores of the tile's rows, zero where they only fill it."""
        return self.expert.of(scale, pattern, offset) if self.tail else self.rows(score_rows, pattern, offset)

    def scores(self, score_rows: Any, scale: Any) -> Any:
        """(P, n): the rows' scores, the same on every partition."""
        score_sb = nl.ndarray((P, self.n), nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(score_sb, self.per_row(score_rows, scale, [[0, P], [1, self.n]]))
        return score_sb

    def weigh(self, x_sb: Any, dy_sb: Any, real: Any, scale: Any, score_rows: Any) -> None:
        """Multiply rows of dy by their scores, and by zero in x and dy those that only fill the tile."""
        if self.tail or self.walk.fused:
            factor_sb = nl.ndarray((self.p, self.blocks), nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(factor_sb, self.per_row(score_rows, scale, [[1, self.p], [P, self.blocks]]))
            for b in range(self.blocks) if self.walk.fused else (self.blocks - 1,):
                nisa.tensor_scalar(dy_sb[:, b, :], dy_sb[:, b, :], nl.multiply, factor_sb[:, b : b + 1])
        if self.tail:
            last, real_sb = self.blocks - 1, nl.ndarray((self.p, 1), nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(real_sb, self.expert.of(real, [[1, self.p], [1, 1]], last * P))
            nisa.tensor_scalar(x_sb[:, last, :], x_sb[:, last, :], nl.multiply, real_sb)


class Rows:
    """A matmul operand that contracts rows: (p, blocks, D) in SBUF."""

    def __init__(self, value_sb: Any) -> None:
        self.value_sb = value_sb

    def part(self, block: int, start: int, size: int) -> Any:
        return self.value_sb[:, block, start : start + size]


class Features(Rows):
    """The same for what was kept: (p, F / P, blocks, P)."""

    def part(self, block: int, start: int, size: int) -> Any:
        part_sb = self.value_sb[:, start // P : (start + size) // P, block, :]
        return part_sb


def outer_product(left: Rows, right: Rows, m: int, width: int, blocks: int) -> Iterator[tuple[int, Any]]:
    """left^T right for 128 columns of left from m P on: (first column, PSUM tile) of each bank's width."""
    for n in range(0, width, BANK):
        size = min(BANK, width - n)
        part_ps = nl.ndarray((P, size), nl.float32, buffer=nl.psum)
        for b in range(blocks):
            nisa.nc_matmul(part_ps, left.part(b, m * P, P), right.part(b, n, size), accumulate=b > 0)
        yield n, part_ps


def product(pairs: tuple[tuple[Any, Any], ...], n: int, width: int, dtype: Any) -> Any:
    """sum of left^T right over pairs of (P, K / P, n) and (P, K / P, width): rows on partitions, (p, blocks, width)."""
    p = min(n, P)
    y_sb = nl.ndarray((p, n // p, width), dtype, buffer=nl.sbuf)
    for b in range(n // p):
        for d in range(0, width, BANK):
            size = min(BANK, width - d)
            y_ps = nl.ndarray((p, size), nl.float32, buffer=nl.psum)
            started = False
            for left_sb, right_sb in pairs:
                for k in range(left_sb.shape[1]):
                    nisa.nc_matmul(
                        y_ps, left_sb[:, k, b * P : b * P + p], right_sb[:, k, d : d + size], accumulate=started
                    )
                    started = True
            empty(y_sb[:, b, d : d + size], y_ps, b + d // BANK)
    return y_sb


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


def combine(y: Any, rows: Any, inverse: Any, scores: Any, d0: int, width: int) -> None:
    """y[t, d0:] = sum over k of scores[t, k] * rows[inverse[t, k], d0:], in float32; without scores, the plain sum."""
    (T, K), D = inverse.shape, y.shape[1]

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
