"""Kernel: y = (silu(x w1) * (x w3)) w2, one item of an expert's rows at a time (tables.py).

Weights stream through the Tensor Engine, which transposes them a few rows at a time between its matmuls, while the
item's rows stay in SBUF: no DMA transposes anything, and SBUF never holds a whole expert.
"""

from typing import Any

from nki_moe.experts.moves import Item, Moves, loop, pieces
from nki_moe.hardware import BANK, CHUNK, P
from nki_moe.limits import widest
from nki_moe.toolchain import nisa, nki, nl


@nki.jit
def forward(
    x: Any,
    w1: Any,
    w2: Any,
    w3: Any,
    passes: Any,
    data_expert: Any,
    data_rows: Any,
    data_reads: Any,
    clear: Any,
    row_TK: Any,
    score_R: Any,
    rows: int,
    fused: bool,
    save: bool,
    by_dma: bool,
) -> Any:
    """The expert MLP of all rows, or, fused, of tokens: gathered, and summed over their choices, by score.

    Dimensions:
        R rows, T tokens, K choices of a token, E experts, D model, F hidden; D and F multiples of 128, of 256 on two
        cores.

    Args (all in HBM):
        x: (R, D), or (T, D) when fused; bfloat16 or float32.
        w1, w2, w3: (E, F, D), (E, D, F), (E, F, D), of x's dtype.
        passes, data_expert, data_rows, data_reads, clear, row_TK, score_R: as in tables.Tables.
        rows: R. fused: whether x are tokens. save: whether backward follows. by_dma: who transposes (assumptions.py).

    Returns:
        y: like x. Rows of no expert are zero.
        kept: with `save`, (R, 2 F): gate and up of each row, by groups of columns of F: a group's gate, its up, the
        next group's.

    Notes:
        Scores are applied in float32, as an expert's output leaves PSUM; a token's K rows are added up in PSUM.
        Cores write different rows; the barrier before the combine is the only meeting.

    Pseudocode:
        for item of this core:
            for F: w1^T, w3^T; for block: g, u = x w1^T, x w3^T; h = silu(g) u
            for D: w2^T; for block: y[rows] = h w2^T (times the score)
        for tokens: y[t] = sum of its rows, or: y[rows of no expert] = 0
    """
    (_, F, D), dtype = w1.shape, x.dtype
    y = nl.ndarray(x.shape, dtype, buffer=nl.shared_hbm)
    y_rows = nl.ndarray((rows, D), dtype, buffer=nl.shared_hbm) if fused else y
    kept = nl.ndarray((rows, 2 * F), dtype, buffer=nl.shared_hbm) if save else None
    move, columns = Moves(by_dma), widest(F // nl.num_programs(0), BANK)

    def item_pass(i: Any) -> None:
        item = Item(data_expert, data_rows, data_reads, i, nl.program_id(0))
        xT_sb = nl.ndarray((P, D // P, item.size), dtype, buffer=nl.sbuf)
        move.read_turned(item, x, xT_sb)
        score_sbs = [nl.ndarray((P, 1), nl.float32, buffer=nl.sbuf) for _ in range(item.blocks if fused else 0)]
        for b, score_sb in enumerate(score_sbs):
            move.gather(score_R, item.row(b), 0, score_sb)

        hT_sb = nl.ndarray((P, F // P, item.size), dtype, buffer=nl.sbuf)
        for f in range(0, F, columns):
            w1T_sb, w3T_sb = (move.rows_turned(item, w, f, columns) for w in (w1, w3))
            for b in range(item.blocks):
                g_ps, u_ps = (nl.ndarray((P, columns), nl.float32, buffer=nl.psum) for _ in range(2))
                for d in range(D // P):
                    block_sb = xT_sb[:, d, b * P : (b + 1) * P]
                    nisa.nc_matmul(g_ps, block_sb, w1T_sb[:, d, :], accumulate=d > 0)
                    nisa.nc_matmul(u_ps, block_sb, w3T_sb[:, d, :], accumulate=d > 0)
                silu_sb = nl.ndarray((P, columns), nl.float32, buffer=nl.sbuf)
                h_sb = nl.ndarray((P, columns), dtype, buffer=nl.sbuf)
                move.activate(silu_sb, nl.silu, g_ps)
                move.product(h_sb, silu_sb, u_ps)
                if save:
                    both_sb = nl.ndarray((P, 2 * columns), dtype, buffer=nl.sbuf)
                    move.empty(both_sb[:, 0:columns], g_ps)
                    move.empty(both_sb[:, columns:], u_ps)
                    move.scatter(kept, item.row(b), 2 * f, both_sb)
                move.turn(h_sb, hT_sb[:, f // P : (f + columns) // P, b * P : (b + 1) * P])

        for d, width in pieces(D, CHUNK):
            w2T_sb = move.rows_turned(item, w2, d, width)
            for b in range(item.blocks):
                y_sb = nl.ndarray((P, width), dtype, buffer=nl.sbuf)
                for c, size in pieces(width, BANK):
                    y_ps = nl.ndarray((P, size), nl.float32, buffer=nl.psum)
                    for f in range(F // P):
                        block_sb = hT_sb[:, f, b * P : (b + 1) * P]
                        nisa.nc_matmul(y_ps, block_sb, w2T_sb[:, f, c : c + size], accumulate=f > 0)
                    move.empty(y_sb[:, c : c + size], y_ps, score_sbs[b] if fused else None)
                move.scatter(y_rows, item.row(b), d, y_sb)

    loop(passes, 0, item_pass)
    if fused:
        move.combine(y, y_rows, row_TK)
    else:
        move.clear(y, clear, passes)
    return (y, kept) if save else y
