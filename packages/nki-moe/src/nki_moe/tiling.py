"""Routing as the kernels read it: a few small integer tables, computed in torch from the counts, so that no count is
ever part of a program.

An expert's rows are cut into full tiles of TILE rows and, last, one tail tile: the smallest of TAIL_ROWS that holds the
rest, which is never empty. What a tail tile lacks is read as repetitions of the expert's last row (finite, whatever
lies beyond) and never written. What the kernels keep between passes lies in columns where each expert starts at a
multiple of BLOCK.

A core's work is a list of slots, an expert (or some of its tiles) each. There are three kinds of lists:

    data     all tiles, in order, cut between the cores where half the work is done: at most one expert is on both
    alone    experts that are one tile or none, whole, dealt to the cores by size
    many     experts of several tiles; every core has them all, and a share of F

R rows, E experts, T tokens, K experts a token, P = 128 partitions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nki_moe.hardware import TILE, P

__all__ = [
    "BLOCK",
    "BLOCKS",
    "COLUMN",
    "EXPERT",
    "FEW",
    "FULL",
    "MANY",
    "MIDDLE",
    "NONE",
    "ROW",
    "TAILS",
    "TAIL_COLUMN",
    "TAIL_ROW",
    "TAIL_ROWS",
    "WEIGHTS",
    "WIDTH",
    "Routing",
    "columns",
    "lists",
    "routing",
]

BLOCK = P
BLOCKS = TILE // BLOCK
# Below 64 rows a matmul takes as long as with 64, but DMA does not.
TAIL_ROWS = (32, 64, 128, 192, 256, 288, 320, 384, 512)
# A slot: whose it is, where its first full tile and its tail are, and how often each loop of a kernel runs.
EXPERT, ROW, COLUMN, TAIL_ROW, TAIL_COLUMN = range(5)
# Full tiles; all but one; no, few, or more rows; a tail of each size.
FULL, MIDDLE, NONE, FEW, MANY, TAILS = range(5, 11)
WIDTH = TAILS + len(TAIL_ROWS)
FEW_ROWS = 64  # so few leave the Tensor Engine time to transpose weights
WEIGHTS = 256  # an expert with fewer rows takes as long as with these: loading its weights does


def columns(rows: int, experts: int) -> int:
    """Columns that hold every expert's rows, each rounded up to a BLOCK, whatever the counts."""
    return -(-(rows + experts * (BLOCK - 1)) // BLOCK) * BLOCK


def lists(cores: int) -> tuple[range, range, int]:
    """The numbers of each core's list for the data, each core's of single tiles, and the one that all share."""
    return range(cores), range(cores, 2 * cores), 2 * cores


class Routing(NamedTuple):
    """The tables of one routing; all but `column_R` go to the kernels. Those of a fused edge are one zero without
    it.
    """

    # (lists, 1 + E, WIDTH) int32: in the first row the number of slots, and of BLOCKs that no expert owns; then slots
    plan: Tensor
    # (P, E, 2, BLOCKS) int32: for each row of a tail tile the row (or token) that it is read from, and the row that it
    # is written to, or R, which is skipped. Rows of a block are on partitions.
    tails: Tensor
    factors: Tensor  # (P, E, 2, BLOCKS) float32: 1, or 0 where the row only fills the tile; that times the score
    clear: Tensor  # (R / BLOCK, BLOCK) int32: the rows of no expert, then R
    scale: Tensor  # (E, TILE) float32: the second of factors, row after row
    source: Tensor  # (R, 1) int32: token of each row
    score_rows: Tensor  # (R, 1) float32: score of each row
    inverse: Tensor  # (T, K) int32: row of each choice of a token
    scores: Tensor  # (T, K) float32
    column_R: Tensor  # column of each row


def routing(counts_E: Tensor, rows: int, order_R: Tensor | None, scores_TK: Tensor | None, cores: int) -> Routing:
    """The tables for these counts over `rows` rows. With order_R (the (token, k) pair, flat, of each row) and
    scores_TK, rows are read from tokens.
    """
    counts, device = counts_E.long(), counts_E.device
    end = counts.cumsum(0)
    start = end - counts
    padded = -(-counts // BLOCK) * BLOCK
    column = padded.cumsum(0) - padded
    full = (counts - 1).clamp(min=0) // TILE

    row = (start + full * TILE)[:, None] + torch.arange(TILE, device=device)
    real = row < end[:, None]
    read = torch.minimum(row, (end - 1)[:, None]).clamp(0, rows - 1)
    clear = end[-1] + torch.arange(-(-rows // BLOCK) * BLOCK, device=device).view(-1, BLOCK)
    one_zero = torch.zeros((1, 1), dtype=torch.int64, device=device)
    source, inverse, scores = one_zero, one_zero, one_zero.float()
    score_rows, scale, load = scores, scores, read
    if order_R is not None and scores_TK is not None:
        K = scores_TK.shape[1]
        scores = scores_TK.float()
        source, score_rows = (order_R // K)[:, None], scores.reshape(-1)[order_R][:, None]
        load, scale = source[read, 0], score_rows[read, 0] * real
        inverse = order_R.argsort().view(-1, K)
    every = torch.arange(rows, device=device)
    owner = torch.bucketize(every, end, right=True).clamp(max=counts.shape[0] - 1)
    return Routing(
        plan=_plan(counts, start, column, full, -(-(rows - end[-1]) // BLOCK), cores),
        tails=_by_partition(load, torch.where(real, row, rows)).int(),
        factors=_by_partition(real.float(), scale if order_R is not None else real.float()),
        clear=clear.clamp(max=rows).int(),
        scale=scale,
        source=source.int(),
        score_rows=score_rows,
        inverse=inverse.int(),
        scores=scores,
        column_R=every - start[owner] + column[owner],
    )


def _plan(counts: Tensor, start: Tensor, column: Tensor, full: Tensor, unowned: Tensor, cores: int) -> Tensor:
    E, device = counts.shape[0], counts.device
    sizes = torch.tensor((0, *TAIL_ROWS), device=device)
    rest = (counts - full * TILE)[:, None]
    tails = (rest <= sizes[1:]) & (rest > sizes[:-1])

    def slots(active: Tensor, row: Tensor, column: Tensor, full: Tensor, tail: Tensor) -> Tensor:
        """A list of those experts."""
        place = (torch.arange(E, device=device), row, column, tail_row, tail_column)
        few = (full == 0) & (counts <= FEW_ROWS)
        trips = (full, (full - 1).clamp(min=0), (counts == 0).long(), few.long(), (~few).long())
        table = torch.cat([torch.stack([*place, *trips], dim=1), (tails & tail[:, None]).long()], dim=1)
        header = torch.zeros(WIDTH, dtype=torch.int64, device=device)
        header[0], header[1] = active.sum(), unowned
        return torch.cat([header[None], table[(~active).int().argsort(stable=True)]])

    some, several = counts > 0, full > 0
    tail_row, tail_column = start + full * TILE, column + full * TILE
    tail_cost = (tails * sizes[1:]).sum(dim=1)
    tail_cost = torch.where(several | ~some, tail_cost, tail_cost.clamp(min=WEIGHTS))
    cost = full * TILE + tail_cost
    before = cost.cumsum(0) - cost
    share = cost.sum() // cores
    first = torch.minimum(((share - before + TILE // 2) // TILE).clamp(min=0), full)  # the first core's full tiles
    tail_first = some & (before + full * TILE + tail_cost // 2 <= share)
    data = [slots((first > 0) | tail_first, start, column, first, tail_first)]
    if cores == 2:
        skipped, others = first * TILE, full - first
        tail_second = some & ~tail_first
        data.append(slots((others > 0) | tail_second, start + skipped, column + skipped, others, tail_second))

    rank = torch.where(several, -1, counts).argsort(descending=True, stable=True).argsort()
    dealt = ((rank + 1) // 2) % 2 if cores == 2 else torch.zeros_like(rank)  # 0 1 1 0 0 1 1 0 ...
    alone = [slots(~several & (dealt == core), start, column, full, some) for core in range(cores)]
    return torch.stack([*data, *alone, slots(several, start, column, full, some)]).int()


def _by_partition(first: Tensor, second: Tensor) -> Tensor:
    """Two tables (E, TILE) as (P, E, 2, BLOCKS)."""
    pair = torch.stack([first, second], dim=1)
    return pair.view(*pair.shape[:2], BLOCKS, BLOCK).permute(3, 0, 1, 2).contiguous()
