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

from collections.abc import Callable
from typing import Any

from nki_moe.tiling import BLOCK, TILE, columns
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
) -> Any:
    """y like x, and with `save` (3F, C): gate, up and h.

    Pseudocode, of each core:
        for its share of F:    for each expert: load w1, w3 transposed; for each tile: gT, uT -> hT -> HBM
        barrier
        for its share of D:    for each expert: load w2 transposed; for each tile: h^T w2 -> y
        fused: for each 128 tokens: y = sum of score * row
    """
    (E, F, D), core, cores = w1.shape, nl.program_id(0), nl.num_programs(0)
    C, dtype = columns(rows, E), x.dtype
    kept = nl.ndarray((3 * F if save else F, C), dtype, buffer=nl.shared_hbm)
    y = nl.ndarray(x.shape, dtype, buffer=nl.shared_hbm)
    y_rows = nl.ndarray((rows, D), dtype, buffer=nl.shared_hbm) if fused else y
    first_h = 2 * F if save else 0
    walk = Walk(plan, load, store, source, fused)

    Fs = F // (cores * f_splits)
    for split in range(f_splits):
        f0 = (split * cores + core) * Fs

        def gate_up(e: Any, f0: int = f0) -> None:
            w1T_sb = nl.ndarray((P, D // P, Fs), dtype, buffer=nl.sbuf)
            w3T_sb = nl.ndarray((P, D // P, Fs), dtype, buffer=nl.sbuf)
            for w, w_sb in ((w1, w1T_sb), (w3, w3T_sb)):
                nisa.dma_transpose(
                    dst=w_sb,
                    src=w.ap([[D, Fs], [P, D // P], [1, P]], offset=f0 * D, scalar_offset=e, indirect_dim=0),
                )

            def tile(n: int) -> None:
                xT_sb = walk.read_transposed(x, n)
                h_sb = nl.ndarray((P, Fs // P, n), dtype, buffer=nl.sbuf)
                g_sb = nl.ndarray((P, Fs // P, n), dtype, buffer=nl.sbuf) if save else None
                u_sb = nl.ndarray((P, Fs // P, n), dtype, buffer=nl.sbuf) if save else None
                for f in range(Fs // P):
                    g_ps = nl.ndarray((P, n), nl.float32, buffer=nl.psum)
                    u_ps = nl.ndarray((P, n), nl.float32, buffer=nl.psum)
                    for ps, w_sb in ((g_ps, w1T_sb), (u_ps, w3T_sb)):
                        for d in range(D // P):
                            nisa.nc_matmul(
                                ps, w_sb[:, d, f * P : (f + 1) * P], xT_sb[:, d, :], accumulate=d > 0
                            )
                    silu_sb = nl.ndarray((P, n), nl.float32, buffer=nl.sbuf)
                    nisa.activation(silu_sb, nl.silu, g_ps)
                    nisa.tensor_tensor(h_sb[:, f, :], silu_sb, u_ps, nl.multiply)
                    if save:
                        nisa.activation(g_sb[:, f, :], nl.copy, g_ps)
                        nisa.tensor_copy(u_sb[:, f, :], u_ps)
                walk.keep(kept, first_h + f0, h_sb)
                if save:
                    walk.keep(kept, f0, g_sb)
                    walk.keep(kept, F + f0, u_sb)

            walk.tiles(e, tile)

        nl.fori_loop(0, E, gate_up)

    if cores == 2:
        nisa.core_barrier(kept, (0, 1))

    Ds = D // (cores * d_splits)
    for split in range(d_splits):
        d0 = (split * cores + core) * Ds

        def down(e: Any, d0: int = d0) -> None:
            w2T_sb = nl.ndarray((P, F // P, Ds), dtype, buffer=nl.sbuf)
            nisa.dma_transpose(
                dst=w2T_sb, src=w2.ap([[F, Ds], [P, F // P], [1, P]], offset=d0 * F, scalar_offset=e, indirect_dim=0)
            )

            def tile(n: int) -> None:
                h_sb = walk.recall(kept, first_h, F, n)
                walk.write(y_rows, d0, product(((h_sb, w2T_sb),), n, Ds, dtype))

            walk.tiles(e, tile)

        nl.fori_loop(0, E, down)
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
    kept: Any,  # (3F, C)
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
) -> Any:
    """dx like dy; (2F, C): the gradients of gate and up; (cores * splits, C): each share's part of the scores' gradients."""
    (E, F, D), core, cores = w1.shape, nl.program_id(0), nl.num_programs(0)
    C, dtype = columns(rows, E), dy.dtype
    dkept = nl.ndarray((2 * F, C), dtype, buffer=nl.shared_hbm)
    dx = nl.ndarray(dy.shape, dtype, buffer=nl.shared_hbm)
    dx_rows = nl.ndarray((rows, D), dtype, buffer=nl.shared_hbm) if fused else dx
    dscores = nl.ndarray((cores * f_splits, C), nl.float32, buffer=nl.shared_hbm)
    walk = Walk(plan, load, store, source, fused)
    if fused:
        ones_sb = nl.ndarray((P, 1), nl.float32 if dtype == nl.float32 else nl.bfloat16, buffer=nl.sbuf)
        nisa.memset(ones_sb, 1.0)

    Fs = F // (cores * f_splits)
    for split in range(f_splits):
        share = split * cores + core
        f0 = share * Fs

        def hidden(e: Any, f0: int = f0, share: int = share) -> None:
            w2_sb = nl.ndarray((P, D // P, Fs), dtype, buffer=nl.sbuf)
            nisa.dma_copy(
                w2_sb, w2.ap([[F, P], [P * F, D // P], [1, Fs]], offset=f0, scalar_offset=e, indirect_dim=0)
            )

            def tile(n: int) -> None:
                dyT_sb = walk.read_transposed(dy, n)
                g_sb, u_sb = walk.recall(kept, f0, Fs, n), walk.recall(kept, F + f0, Fs, n)
                dg_sb = nl.ndarray((P, Fs // P, n), dtype, buffer=nl.sbuf)
                du_sb = nl.ndarray((P, Fs // P, n), dtype, buffer=nl.sbuf)
                if fused:
                    h_sb = walk.recall(kept, 2 * F + f0, Fs, n)
                    score_sb = walk.scores(score_rows, scale, n)
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
                walk.keep(dkept, f0, dg_sb)
                walk.keep(dkept, F + f0, du_sb)
                if fused:
                    dscore_sb = nl.ndarray((1, n), nl.float32, buffer=nl.sbuf)
                    nisa.activation(dscore_sb, nl.copy, dscore_ps)
                    nisa.dma_copy(walk.at_column(dscores, [[C, 1], [1, n]], share * C), dscore_sb)

            walk.tiles(e, tile)

        nl.fori_loop(0, E, hidden)

    if cores == 2:
        nisa.core_barrier(dkept, (0, 1))

    Ds = D // (cores * d_splits)
    for split in range(d_splits):
        d0 = (split * cores + core) * Ds

        def outwards(e: Any, d0: int = d0) -> None:
            w1_sb = nl.ndarray((P, F // P, Ds), dtype, buffer=nl.sbuf)
            w3_sb = nl.ndarray((P, F // P, Ds), dtype, buffer=nl.sbuf)
            for w, w_sb in ((w1, w1_sb), (w3, w3_sb)):
                nisa.dma_copy(
                    w_sb, w.ap([[D, P], [P * D, F // P], [1, Ds]], offset=d0, scalar_offset=e, indirect_dim=0)
                )

            def tile(n: int) -> None:
                dg_sb, du_sb = walk.recall(dkept, 0, F, n), walk.recall(dkept, F, F, n)
                walk.write(dx_rows, d0, product(((dg_sb, w1_sb), (du_sb, w3_sb)), n, Ds, dtype))

            walk.tiles(e, tile)

        nl.fori_loop(0, E, outwards)
        if fused:
            combine(dx, dx_rows, inverse, None, d0, Ds)
        else:
            walk.zero(dx, clear, d0, Ds)
    return dx, dkept, dscores


@nki.jit
def backward_weights(
    dy: Any,
    x: Any,
    kept: Any,  # (3F, C)
    dkept: Any,  # (2F, C)
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
) -> Any:
    """dw1 (E, F, D), dw2 (E, D, F), dw3 (E, F, D).

    Pseudocode, for each share of F of this core and each expert:
        sums = 0 (float32, SBUF)
        for each tile: sums += [dg | du]^T x, dy^T h    (matmuls over up to 512 rows in PSUM, one addition each)
        cast and store
    """
    E, F, D, dtype = experts, kept.shape[0] // 3, x.shape[1], x.dtype
    core, cores = nl.program_id(0), nl.num_programs(0)
    dw1 = nl.ndarray((E, F, D), dtype, buffer=nl.shared_hbm)
    dw2 = nl.ndarray((E, D, F), dtype, buffer=nl.shared_hbm)
    dw3 = nl.ndarray((E, F, D), dtype, buffer=nl.shared_hbm)
    walk = Walk(plan, load, store, source, fused)

    Fs = F // (cores * f_splits)
    for split in range(f_splits):
        f0 = (split * cores + core) * Fs

        def expert(e: Any, f0: int = f0) -> None:
            sum1_sb = nl.ndarray((P, Fs // P, D), nl.float32, buffer=nl.sbuf)
            sum2_sb = nl.ndarray((P, D // P, Fs), nl.float32, buffer=nl.sbuf)
            sum3_sb = nl.ndarray((P, Fs // P, D), nl.float32, buffer=nl.sbuf)
            for sum_sb in (sum1_sb, sum2_sb, sum3_sb):
                nisa.memset(sum_sb, 0.0, engine=nisa.engine.gpsimd)

            def tile(n: int) -> None:
                x_sb, dy_sb = walk.read(x, n), walk.read(dy, n)
                walk.weigh(x_sb, dy_sb, real, scale, score_rows, n)
                dg_sb = walk.recall_transposed(dkept, f0, Fs, n)
                du_sb = walk.recall_transposed(dkept, F + f0, Fs, n)
                h_sb = walk.recall_transposed(kept, 2 * F + f0, Fs, n)
                add_product(sum1_sb, dg_sb, x_sb)
                add_product(sum2_sb, dy_sb, h_sb)
                add_product(sum3_sb, du_sb, x_sb)

            walk.tiles(e, tile)
            for sum_sb, dw, width, first in ((sum1_sb, dw1, D, f0 * D), (sum2_sb, dw2, F, f0), (sum3_sb, dw3, D, f0 * D)):
                for m in range(sum_sb.shape[1]):
                    n = sum_sb.shape[2]
                    out_sb = nl.ndarray((P, n), dtype, buffer=nl.sbuf)
                    nisa.activation(out_sb, nl.copy, sum_sb[:, m, :])
                    nisa.dma_copy(
                        dw.ap([[width, P], [1, n]], offset=first + m * P * width, scalar_offset=e, indirect_dim=0), out_sb
                    )

        nl.fori_loop(0, E, expert)
    return dw1, dw2, dw3


class Walk:
    """Where one core is in the rows: the tiles of an expert, and what is read and written at each.

    A tile of `n` rows is `n // P` blocks with the rows on partitions, or n columns with a feature on each partition.
    """

    def __init__(self, plan: Any, load: Any, store: Any, source: Any, fused: bool) -> None:
        self.plan, self.load, self.store, self.source, self.fused = plan, load, store, source, fused
        self.row, self.column = nisa.register_alloc(), nisa.register_alloc()
        self.trips = nisa.register_alloc()
        self.step_sb = nl.ndarray((1, 2), nl.int32, buffer=nl.sbuf)
        nisa.memset(self.step_sb, TILE)
        self.expert: Any = None
        self.tail = False

    def tiles(self, e: Any, tile: Callable[[int], None]) -> None:
        """tile(TILE) for each full tile of expert e, then tile(n) once for what remains, in BLOCKs."""
        plan_sb = nl.ndarray((1, 8), nl.int32, buffer=nl.sbuf)
        at_sb = nl.ndarray((1, 2), nl.int32, buffer=nl.sbuf)  # row, column
        nisa.dma_copy(plan_sb, self.plan.ap([[8, 1], [1, 8]], scalar_offset=e, indirect_dim=0))
        nisa.tensor_copy(at_sb, plan_sb[:, 0:2])
        self.expert = e

        def run(n: int) -> None:
            nisa.register_load(self.row, at_sb[:, 0:1])
            nisa.register_load(self.column, at_sb[:, 1:2])
            tile(n)

        def full(_: Any) -> None:
            self.tail = False
            run(TILE)
            nisa.tensor_tensor(at_sb, at_sb, self.step_sb, nl.add)

        nisa.register_load(self.trips, plan_sb[:, 3:4])
        nl.fori_loop(0, self.trips, full)
        for blocks in range(1, TILE // BLOCK + 1):

            def tail(_: Any, n: int = blocks * BLOCK) -> None:
                self.tail = True
                run(n)

            nisa.register_load(self.trips, plan_sb[:, 3 + blocks : 4 + blocks])
            nl.fori_loop(0, self.trips, tail)

    # -- rows, in HBM as (rows, features) ------------------------------------------------------------------------------
    def indices(self, n: int) -> Any:
        """Which rows of the input a tile is made of, (P, n / P); None when they simply follow each other."""
        if not self.tail and not self.fused:
            return None
        index_sb = nl.ndarray((P, n // P), nl.uint32, buffer=nl.sbuf)
        if self.tail:
            nisa.dma_copy(index_sb, self.load.ap([[1, P], [P, n // P]], scalar_offset=self.expert, indirect_dim=0))
        else:
            nisa.dma_copy(index_sb, self.source.ap([[1, P], [P, n // P]], scalar_offset=self.row, indirect_dim=0))
        return index_sb

    def read(self, x: Any, n: int) -> Any:
        """(P, n / P, D): rows on partitions."""
        D, index_sb = x.shape[1], self.indices(n)
        x_sb = nl.ndarray((P, n // P, D), x.dtype, buffer=nl.sbuf)
        if index_sb is None:
            nisa.dma_copy(x_sb, x.ap([[D, P], [P * D, n // P], [1, D]], scalar_offset=self.row, indirect_dim=0))
        else:
            for b in range(n // P):
                nisa.dma_copy(x_sb[:, b, :], x.ap([[D, P], [1, D]], vector_offset=index_sb[:, b : b + 1], indirect_dim=0))
        return x_sb

    def read_transposed(self, x: Any, n: int) -> Any:
        """(P, D / P, n): features on partitions."""
        D = x.shape[1]
        xT_sb = nl.ndarray((P, D // P, n), x.dtype, buffer=nl.sbuf)
        pattern = [[D, n], [P, D // P], [1, P]]
        if not self.tail and not self.fused:
            nisa.dma_transpose(dst=xT_sb, src=x.ap(pattern, scalar_offset=self.row, indirect_dim=0))
        elif x.dtype == nl.float32:  # DMA gathers and transposes two-byte types at once, wider ones in two steps
            x_sb = self.read(x, n)
            for b in range(n // P):
                nisa.dma_transpose(
                    dst=xT_sb[:, :, b * P : (b + 1) * P], src=x_sb[:, b, :].reshape_dim(1, (D // P, P))
                )
        else:
            nisa.dma_transpose(dst=xT_sb, src=x.ap(pattern, vector_offset=self.indices(n), indirect_dim=0))
        return xT_sb

    def write(self, y: Any, d0: int, y_sb: Any) -> None:
        """Rows (P, n / P, width) to columns d0... of y; rows that only fill a tile are skipped."""
        D, blocks, width = y.shape[1], y_sb.shape[1], y_sb.shape[2]
        if not self.tail:
            to = y.ap([[D, P], [P * D, blocks], [1, width]], offset=d0, scalar_offset=self.row, indirect_dim=0)
            nisa.dma_copy(to, y_sb)
            return
        index_sb = nl.ndarray((P, blocks), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(index_sb, self.store.ap([[1, P], [P, blocks]], scalar_offset=self.expert, indirect_dim=0))
        for b in range(blocks):
            scatter(y, d0, y_sb[:, b, :], index_sb[:, b : b + 1])

    def zero(self, y: Any, clear: Any, d0: int, width: int) -> None:
        """Clear the rows that belong to no expert."""
        zero_sb = nl.ndarray((P, width), y.dtype, buffer=nl.sbuf)
        nisa.memset(zero_sb, 0.0)
        plan_sb = nl.ndarray((1, 8), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(plan_sb, self.plan[self.plan.shape[0] - 1 : self.plan.shape[0], :])
        nisa.register_load(self.trips, plan_sb[:, 3:4])

        def tile(i: Any) -> None:
            index_sb = nl.ndarray((P, 1), nl.int32, buffer=nl.sbuf)
            nisa.dma_copy(index_sb, clear.ap([[1, P], [1, 1]], scalar_offset=i, indirect_dim=0))
            scatter(y, d0, zero_sb, index_sb)

        nl.fori_loop(0, self.trips, tile)

    # -- what passes keep, in HBM as (features, columns) ------------------------------------------------------------------
    def at_column(self, kept: Any, pattern: list[list[int]], offset: int) -> Any:
        return kept.ap(pattern, offset=offset, scalar_offset=self.column, indirect_dim=1)

    def keep(self, kept: Any, first: int, value_sb: Any) -> None:
        """(P, features / P, n) to rows first... of kept."""
        C, (_, blocks, n) = kept.shape[1], value_sb.shape
        nisa.dma_copy(self.at_column(kept, [[C, P], [P * C, blocks], [1, n]], first * C), value_sb)

    def recall(self, kept: Any, first: int, features: int, n: int) -> Any:
        """(P, features / P, n)."""
        C, blocks = kept.shape[1], features // P
        value_sb = nl.ndarray((P, blocks, n), kept.dtype, buffer=nl.sbuf)
        nisa.dma_copy(value_sb, self.at_column(kept, [[C, P], [P * C, blocks], [1, n]], first * C))
        return value_sb

    def recall_transposed(self, kept: Any, first: int, features: int, n: int) -> Any:
        """(P, n / P, features): rows on partitions."""
        C = kept.shape[1]
        value_sb = nl.ndarray((P, n // P, features), kept.dtype, buffer=nl.sbuf)
        nisa.dma_transpose(dst=value_sb, src=self.at_column(kept, [[C, features], [P, n // P], [1, P]], first * C))
        return value_sb

    # -- one number a row -------------------------------------------------------------------------------------------------
    def scores(self, score_rows: Any, scale: Any, n: int) -> Any:
        """(P, n): the rows' scores, the same on every partition."""
        score_sb = nl.ndarray((P, n), nl.float32, buffer=nl.sbuf)
        table, at = (scale, self.expert) if self.tail else (score_rows, self.row)
        nisa.dma_copy(score_sb, table.ap([[0, P], [1, n]], scalar_offset=at, indirect_dim=0))
        return score_sb

    def weigh(self, x_sb: Any, dy_sb: Any, real: Any, scale: Any, score_rows: Any, n: int) -> None:
        """Multiply rows of dy by their scores, and by zero in x and dy those that only fill a tile."""
        blocks = n // P

        def multiply(row_sb: Any, table: Any, at: Any, b: int) -> None:
            factor_sb = nl.ndarray((P, 1), nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(factor_sb, table.ap([[1, P], [1, 1]], offset=b * P, scalar_offset=at, indirect_dim=0))
            nisa.tensor_scalar(row_sb[:, b, :], row_sb[:, b, :], nl.multiply, factor_sb)

        if self.tail:
            multiply(x_sb, real, self.expert, blocks - 1)
        if self.fused:
            table, at = (scale, self.expert) if self.tail else (score_rows, self.row)
            for b in range(blocks):
                multiply(dy_sb, table, at, b)
        elif self.tail:
            multiply(dy_sb, real, self.expert, blocks - 1)


def product(pairs: tuple[tuple[Any, Any], ...], n: int, width: int, dtype: Any) -> Any:
    """sum of left^T right over pairs of (P, K / P, n) and (P, K / P, width): rows on partitions, (P, n / P, width)."""
    y_sb = nl.ndarray((P, n // P, width), dtype, buffer=nl.sbuf)
    for b in range(n // P):
        for d in range(0, width, BANK):
            size = min(BANK, width - d)
            y_ps = nl.ndarray((P, size), nl.float32, buffer=nl.psum)
            started = False
            for left_sb, right_sb in pairs:
                for k in range(left_sb.shape[1]):
                    nisa.nc_matmul(
                        y_ps, left_sb[:, k, b * P : (b + 1) * P], right_sb[:, k, d : d + size], accumulate=started
                    )
                    started = True
            if (b + d // BANK) % 2:  # two engines empty PSUM in turn
                nisa.activation(y_sb[:, b, d : d + size], nl.copy, y_ps)
            else:
                nisa.tensor_copy(y_sb[:, b, d : d + size], y_ps)
    return y_sb


def add_product(sum_sb: Any, left_sb: Any, right_sb: Any) -> None:
    """sum (P, M / P, N) += left^T right, contracting rows: left (P, blocks, M), right (P, blocks, N)."""
    blocks, M, N = left_sb.shape[1], left_sb.shape[2], right_sb.shape[2]
    for m in range(M // P):
        for n in range(0, N, BANK):
            size = min(BANK, N - n)
            part_ps = nl.ndarray((P, size), nl.float32, buffer=nl.psum)
            for b in range(blocks):
                nisa.nc_matmul(
                    part_ps, left_sb[:, b, m * P : (m + 1) * P], right_sb[:, b, n : n + size], accumulate=b > 0
                )
            total_sb = sum_sb[:, m, n : n + size]
            nisa.tensor_tensor(total_sb, total_sb, part_ps, nl.add)


def scatter(y: Any, d0: int, row_sb: Any, index_sb: Any) -> None:
    """Row p to y[index[p], d0:]; an index past the end is skipped."""
    D, width = y.shape[1], row_sb.shape[-1]
    to = y.ap([[D, P], [1, width]], offset=d0, vector_offset=index_sb, indirect_dim=0)
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
