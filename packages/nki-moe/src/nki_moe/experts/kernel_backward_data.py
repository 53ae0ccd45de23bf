"""Kernel: the gradients of the rows, and on the way those of gate and up (walk.py for what the words mean).

    for each share of F:  for each slot: load w2; for each tile: dhT = w2 dyT -> dgT, duT, kept
    for each share of D:  for each slot: load w1, w3; for each tile: dg^T w1 + du^T w3 -> dx

Where SBUF holds a whole expert (`whole`) both are one pass.
"""

from typing import Any

from nki_moe.experts.walk import Tile, Walk, combine
from nki_moe.hardware import D_SLICE, F_SLICE, TILE, P
from nki_moe.tiling import columns
from nki_moe.toolchain import nisa, nki, nl


@nki.jit
def backward_data(
    dy: Any,  # like x
    w1: Any,
    w2: Any,
    w3: Any,
    kept: Any,  # (3P, C, F / P)
    plan: Any,
    tails: Any,
    scale: Any,
    clear: Any,
    source: Any,
    score_rows: Any,  # (R, 1) score of each row
    inverse: Any,
    rows: int,
    fused: bool,
    f_splits: int,
    d_splits: int,
    whole: bool,
) -> Any:
    """dx like dy; (2P, C, F / P): the gradients of gate and up; (f_splits, C): each share's part of the scores'
    gradients.
    """
    (E, F, D), dtype = w1.shape, dy.dtype
    C = columns(rows, E)
    dkept = nl.ndarray((2 * P, C, F // P), dtype, buffer=nl.shared_hbm)
    dx = nl.ndarray(dy.shape, dtype, buffer=nl.shared_hbm)
    dx_rows = nl.ndarray((rows, D), dtype, buffer=nl.shared_hbm) if fused else dx
    dscores = nl.ndarray((f_splits, C), nl.float32, buffer=nl.shared_hbm)
    walk = Walk(plan, nl.program_id(0), tails, None, source, fused)
    if fused:
        ones_sb = nl.ndarray((P, 1), nl.float32 if dtype == nl.float32 else nl.bfloat16, buffer=nl.sbuf)
        nisa.memset(ones_sb, 1.0)

    def hidden(at: Tile, dyT_sb: Any, kept_sb: Any, slices: list[list[Any]], f0: int) -> Any:
        """dgT and duT: (P, 2, Fs / P, n)."""
        n = at.n
        parts = [(w2_sb, f) for (w2_sb,) in slices for f in range(0, w2_sb.shape[2], P)]
        dkept_sb = nl.ndarray((P, 2, len(parts), n), dtype, buffer=nl.sbuf)
        if fused:
            score_sb = at.scores(score_rows, scale)
            dscore_ps = nl.ndarray((1, n), nl.float32, buffer=nl.psum)
        for i, (w2_sb, f) in enumerate(parts):
            dh_ps = nl.ndarray((P, n), nl.float32, buffer=nl.psum)
            for d in range(D // P):
                nisa.nc_matmul(dh_ps, w2_sb[:, d, f : f + P], dyT_sb[:, d, :], accumulate=d > 0)
            dh = dh_ps
            if fused:  # <dy, y> = <w2 dy, h>
                part_sb = nl.ndarray((P, n), ones_sb.dtype, buffer=nl.sbuf)
                nisa.tensor_tensor(part_sb, dh_ps, kept_sb[:, 2, i, :], nl.multiply)
                nisa.nc_matmul(dscore_ps, ones_sb, part_sb, accumulate=i > 0)
                dh = nl.ndarray((P, n), nl.float32, buffer=nl.sbuf)
                nisa.tensor_tensor(dh, dh_ps, score_sb, nl.multiply)
            silu_sb = nl.ndarray((P, n), dtype, buffer=nl.sbuf)
            slope_sb, through_sb = (nl.ndarray((P, n), nl.float32, buffer=nl.sbuf) for _ in range(2))
            nisa.activation(silu_sb, nl.silu, kept_sb[:, 0, i, :])
            nisa.activation(slope_sb, nl.silu_dx, kept_sb[:, 0, i, :])
            nisa.tensor_tensor(dkept_sb[:, 1, i, :], dh, silu_sb, nl.multiply)
            nisa.tensor_tensor(through_sb, dh, kept_sb[:, 1, i, :], nl.multiply)
            nisa.tensor_tensor(dkept_sb[:, 0, i, :], through_sb, slope_sb, nl.multiply)
        at.keep(dkept, 0, f0, dkept_sb)
        if fused:
            dscore_sb = nl.ndarray((1, n), nl.float32, buffer=nl.sbuf)
            nisa.activation(dscore_sb, nl.copy, dscore_ps)
            offset = f0 * f_splits // F * C
            nisa.dma_copy(
                dscores.ap([[C, 1], [1, n]], offset=offset, scalar_offset=at.column, indirect_dim=1), dscore_sb
            )
        return dkept_sb

    kinds = 3 if fused else 2
    Fs, Ds = F // f_splits, D // d_splits
    for f0 in range(0, F, Fs):

        def first(f0: int = f0) -> None:
            w2_sbs = walk.columns((w2,), f0, Fs, F_SLICE)
            tail_sb = nl.ndarray((P, (D + kinds * Fs) // P * TILE), dtype, buffer=nl.sbuf)

            def inputs(at: Tile, buffer_sb: Any) -> tuple[Any, Any]:
                """dyT, and what forward kept."""
                both_sb = at.of_buffer(buffer_sb, (D + kinds * Fs) // P)
                return both_sb[:, : D // P], both_sb[:, D // P :].reshape_dim(1, (kinds, Fs // P))

            def load(at: Tile, buffer_sb: Any) -> None:
                dyT_sb, kept_sb = inputs(at, buffer_sb)
                at.read_transposed(dy, dyT_sb)
                at.recall(kept, 0, f0, kept_sb)

            def run(at: Tile, buffer_sb: Any) -> None:
                dkept_sb = hidden(at, *inputs(at, buffer_sb), w2_sbs, f0)
                if whole:
                    at.multiply(dx_rows, 0, [dkept_sb[:, 0], dkept_sb[:, 1]], w13_sbs)

            def full(at: Tile) -> None:
                buffer_sb = nl.ndarray(tail_sb.shape, dtype, buffer=nl.sbuf) if whole else tail_sb
                load(at, buffer_sb)
                run(at, buffer_sb)

            walk.tail(lambda at: load(at, tail_sb))
            w13_sbs = walk.columns((w1, w3), 0, D, D_SLICE) if whole else []
            walk.tail(lambda at: run(at, tail_sb))
            walk.full(full)

        walk.slots(first)

    for d0 in () if whole else range(0, D, Ds):

        def second(d0: int = d0) -> None:
            w13_sbs = walk.columns((w1, w3), d0, Ds, D_SLICE)

            def run(at: Tile) -> None:
                dkept_sb = nl.ndarray((P, 2, F // P, at.n), dtype, buffer=nl.sbuf)
                at.recall(dkept, 0, 0, dkept_sb)
                at.multiply(dx_rows, d0, [dkept_sb[:, 0], dkept_sb[:, 1]], w13_sbs)

            walk.tail(run)
            walk.full(run)

        walk.slots(second)

    if fused:
        combine(dx, dx_rows, inverse, None)
    else:
        walk.zero(dx, clear)
    return dx, dkept, dscores
