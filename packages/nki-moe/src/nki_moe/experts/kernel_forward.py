"""Kernel: y = (silu(x w1) * (x w3)) w2, expert by expert (walk.py for what the words mean).

    for each share of F:  for each slot: load w1, w3 transposed; for each tile: gT, uT -> hT, kept
    for each share of D:  for each slot: load w2 transposed; for each tile: h^T w2 -> y

Where SBUF holds a whole expert (`whole`) both are one pass, and h goes from one to the other in SBUF. Fused, a last
pass sums each token's K rows in float32: a gather again, so that no two writes ever meet.
"""

from typing import Any

from nki_moe.experts.walk import Tile, Walk, combine
from nki_moe.hardware import D_SLICE, F_SLICE, TILE, P
from nki_moe.tiling import columns
from nki_moe.toolchain import nisa, nki, nl


@nki.jit
def forward(
    x: Any,  # (R, D), or (T, D) when fused
    w1: Any,  # (E, F, D)
    w2: Any,  # (E, D, F)
    w3: Any,  # (E, F, D)
    plan: Any,
    tails: Any,
    clear: Any,
    source: Any,  # (R, 1) token of each row
    inverse: Any,  # (T, K) row of each choice
    scores: Any,  # (T, K)
    rows: int,
    fused: bool,
    save: bool,
    f_splits: int,
    d_splits: int,
    whole: bool,
) -> Any:
    """y like x, and with `save` (3P, C, F / P): gate, up and h, as Tile.keep lays them out."""
    (E, F, D), dtype = w1.shape, x.dtype
    kinds = 3 if save else 1
    kept = nl.ndarray((kinds * P, columns(rows, E), F // P), dtype, buffer=nl.shared_hbm)
    y = nl.ndarray(x.shape, dtype, buffer=nl.shared_hbm)
    y_rows = nl.ndarray((rows, D), dtype, buffer=nl.shared_hbm) if fused else y
    walk = Walk(plan, nl.program_id(0), tails, None, source, fused)

    def hidden(at: Tile, xT_sb: Any, slices: list[list[Any]], f0: int) -> Any:
        """gT, uT and hT, or hT alone: (P, kinds, Fs / P, n)."""
        parts = [(w1_sb, w3_sb, f) for w1_sb, w3_sb in slices for f in range(0, w1_sb.shape[2], P)]
        kept_sb = nl.ndarray((P, kinds, len(parts), at.n), dtype, buffer=nl.sbuf)
        for i, (w1_sb, w3_sb, f) in enumerate(parts):
            g_ps, u_ps = (nl.ndarray((P, at.n), nl.float32, buffer=nl.psum) for _ in range(2))
            for ps, w_sb in ((g_ps, w1_sb), (u_ps, w3_sb)):
                for d in range(D // P):
                    nisa.nc_matmul(ps, w_sb[:, d, f : f + P], xT_sb[:, d, :], accumulate=d > 0)
            silu_sb = nl.ndarray((P, at.n), nl.float32, buffer=nl.sbuf)
            nisa.activation(silu_sb, nl.silu, g_ps)
            nisa.tensor_tensor(kept_sb[:, kinds - 1, i, :], silu_sb, u_ps, nl.multiply)
            if save:
                nisa.activation(kept_sb[:, 0, i, :], nl.copy, g_ps)
                nisa.tensor_copy(kept_sb[:, 1, i, :], u_ps)
        if save or not whole:
            at.keep(kept, 0, f0, kept_sb)
        return kept_sb[:, kinds - 1]

    Fs, Ds = F // f_splits, D // d_splits
    for f0 in range(0, F, Fs):

        def first(f0: int = f0) -> None:
            w13_sbs = walk.rows_transposed((w1, w3), f0, Fs, F_SLICE)
            tail_sb = nl.ndarray((P, D // P * TILE), dtype, buffer=nl.sbuf)
            walk.tail(lambda at: at.read_transposed(x, at.of_buffer(tail_sb, D // P)))
            w2_sbs = walk.rows_transposed((w2,), 0, D, D_SLICE) if whole else []

            def run(at: Tile, xT_sb: Any) -> None:
                h_sb = hidden(at, xT_sb, w13_sbs, f0)
                if whole:
                    at.multiply(y_rows, 0, [h_sb], w2_sbs)

            def full(at: Tile) -> None:
                xT_sb = at.of_buffer(nl.ndarray(tail_sb.shape, dtype, buffer=nl.sbuf) if whole else tail_sb, D // P)
                at.read_transposed(x, xT_sb)
                run(at, xT_sb)

            walk.tail(lambda at: run(at, at.of_buffer(tail_sb, D // P)))
            walk.full(full)

        walk.slots(first)

    for d0 in () if whole else range(0, D, Ds):

        def second(d0: int = d0) -> None:
            w2_sbs = walk.rows_transposed((w2,), d0, Ds, D_SLICE)

            def run(at: Tile) -> None:
                h_sb = nl.ndarray((P, 1, F // P, at.n), dtype, buffer=nl.sbuf)
                at.recall(kept, kinds - 1, 0, h_sb)
                at.multiply(y_rows, d0, [h_sb[:, 0]], w2_sbs)

            walk.tail(run)
            walk.full(run)

        walk.slots(second)

    if fused:
        combine(y, y_rows, inverse, scores)
    else:
        walk.zero(y, clear)
    return (y, kept) if save else (y,)
