"""Routing as the kernels read it: a few small integer tables, computed in torch from the counts, so that no count is ever
part of a program.

An expert's rows are cut into tiles of TILE rows as often as they fit, and one tail tile, the smallest of TAIL_ROWS that holds the
rest. What a tail tile lacks is read as repetitions of the expert's last row (finite, whatever lies beyond) and never written.
What the kernels keep between passes lies in columns where each expert starts at a multiple of BLOCK.

R rows, E experts, T tokens, K experts a token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "FULL",
    "MANY",
    "NONE",
    "ODD",
    "PAIRS",
    "TAILS",
    "TAILS_AFTER",
    "TAILS_ALONE",
    "TAIL_ROWS",
    "TILE",
    "WIDTH",
    "Routing",
    "columns",
    "routing",
]

TILE, BLOCK = 512, 128
TAIL_ROWS = (32, 64, 128, 256, 384, 512)  # below 64 rows a matmul takes as long as with 64, but DMA does not
# A row of the plan: first row, first column, then how often each loop of an expert runs.
FULL, PAIRS, ODD = 2, 3, 4  # full tiles; or pairs of them and one more
TAILS = 5  # a tail tile of each size; the same where it is an expert's only tile, and where it is not
TAILS_ALONE = TAILS + len(TAIL_ROWS)
TAILS_AFTER = TAILS_ALONE + len(TAIL_ROWS)
NONE = TAILS_AFTER + len(TAIL_ROWS)  # the expert has no rows
MANY = NONE + 1  # it has full tiles
WIDTH = MANY + 1


def columns(rows: int, experts: int) -> int:
    """Columns that hold every expert's rows, each rounded up to a BLOCK, whatever the counts."""
    return -(-(rows + experts * (BLOCK - 1)) // BLOCK) * BLOCK


class Routing(NamedTuple):
    """The tables of one routing; all but `column_R` go to the kernels. Those of a fused edge are one zero without it."""

    plan: Tensor  # (E + 1, WIDTH) int32, one row for each expert, and one whose FULL are the BLOCKs that no expert owns
    load: Tensor  # (E, TILE) int32: the row, or token, that each row of a tail tile is read from
    store: Tensor  # (E, TILE) int32: the row it is written to, or R, which is skipped
    real: Tensor  # (E, TILE) float32: 1, or 0 where it only fills the tile
    clear: Tensor  # (R / BLOCK, BLOCK) int32: the rows of no expert, then R
    scale: Tensor  # (E, TILE) float32: real * score
    source: Tensor  # (R, 1) int32: token of each row
    score_rows: Tensor  # (R, 1) float32: score of each row
    inverse: Tensor  # (T, K) int32: row of each choice of a token
    scores: Tensor  # (T, K) float32
    column_R: Tensor  # column of each row


def routing(counts_E: Tensor, rows: int, order_R: Tensor | None, scores_TK: Tensor | None) -> Routing:
    """The tables for these counts over `rows` rows. With order_R (the (token, k) pair, flat, of each row) and scores_TK,
    rows are read from tokens."""
    counts, device = counts_E.long(), counts_E.device
    E = counts.shape[0]
    end = counts.cumsum(0)
    start = end - counts
    padded = -(-counts // BLOCK) * BLOCK
    column = padded.cumsum(0) - padded
    full = counts // TILE
    rest = counts - full * TILE
    sizes = torch.tensor((0, *TAIL_ROWS), device=device)
    tails = (rest[:, None] <= sizes[1:]) & (rest[:, None] > sizes[:-1])
    many = (full > 0)[:, None]
    plan = torch.cat(
        [
            torch.stack([start, column, full, full // 2, full % 2], dim=1),
            *(flag.long() for flag in (tails, tails & ~many, tails & many, (counts == 0)[:, None], many)),
        ],
        dim=1,
    )
    unowned = -(-(rows - end[-1]) // BLOCK)
    unowned_row = unowned * (torch.arange(WIDTH, device=device) == FULL)

    row = (start + full * TILE)[:, None] + torch.arange(TILE, device=device)
    real = row < end[:, None]
    read = torch.minimum(row, (end - 1)[:, None]).clamp(0, rows - 1)
    clear = end[-1] + torch.arange(-(-rows // BLOCK) * BLOCK, device=device).view(-1, BLOCK)
    one_zero = torch.zeros((1, 1), dtype=torch.int64, device=device)
    source, inverse, scores = one_zero, one_zero, one_zero.float()
    score_rows, load, scale = scores, read, real.float()
    if order_R is not None and scores_TK is not None:
        K = scores_TK.shape[1]
        scores = scores_TK.float()
        source, score_rows = (order_R // K)[:, None], scores.reshape(-1)[order_R][:, None]
        load, scale = source[read, 0], score_rows[read, 0] * real
        inverse = order_R.argsort().view(-1, K)
    every = torch.arange(rows, device=device)
    owner = torch.bucketize(every, end, right=True).clamp(max=E - 1)
    return Routing(
        plan=torch.cat([plan, unowned_row[None]]).int(),
        load=load.int(),
        store=torch.where(real, row, rows).int(),
        real=real.float(),
        clear=clear.clamp(max=rows).int(),
        scale=scale,
        source=source.int(),
        score_rows=score_rows,
        inverse=inverse.int(),
        scores=scores,
        column_R=every - start[owner] + column[owner],
    )
