"""Rows of a fixed number for tokens that choose experts: where each choice goes, tokens to rows, and rows back to
tokens.

No shape depends on the routing. Rows that hold no choice are zero in what `take_rows` returns when they lie between the
experts' own, undefined after the last expert's, and never contribute to a result or a gradient, whatever they hold.

Both ways are gathers, backward too: a token's choices are found by index, so that nothing is added up in memory by row.

Shapes: T = tokens, K = choices a token, N = T*K choices, G = groups (experts or ranks), R = rows, D = model dim.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

__all__ = ["Placement", "combine_rows", "pack", "pack_all", "packed_rows", "segment", "take_rows"]

BLOCKS, BLOCK_ROWS = 16, 1024
"""What is worked out from all rows goes through them in so many blocks at most, of about so many rows at least."""


class Placement(NamedTuple):
    """Which row each choice has, and which choice each row."""

    row_TK: torch.Tensor
    """Row of each choice; 0 where it has none."""
    choice_R: torch.Tensor
    """Choice (t*K + k) of each row; some choice where it has none."""
    here_TK: torch.Tensor | None
    """Whether the choice has a row. None: all have."""
    filled_R: torch.Tensor | None
    """Whether the row has a choice. None: all have."""
    between: bool
    """Rows without a choice lie between those with one, not only after them."""


def _number(group_N: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of each choice within its group, in order of choices; and the groups' sizes.

    A cumulative sum over a group's one-hot column numbers its choices: on Trainium a sort would wait for the host.
    """
    chosen_NG = group_N[:, None] == torch.arange(groups, device=group_N.device)
    counted_NG = chosen_NG.cumsum(0, dtype=torch.int32)
    counts_G = counted_NG[-1] if len(group_N) else chosen_NG.sum(0)
    return counted_NG.gather(1, group_N[:, None].long())[:, 0].long() - 1, counts_G.long()


def _placement(row_N: torch.Tensor, here_N: torch.Tensor, rows: int, choices: int, between: bool) -> Placement:
    N = row_N.numel()
    every_N = torch.arange(N, device=row_N.device)
    # one more than there are: it takes the choices without a row
    choice_R = torch.full((rows + 1,), N, dtype=torch.int64, device=row_N.device)
    choice_R = choice_R.scatter_(0, torch.where(here_N, row_N, rows), every_N)[:rows]
    filled_R = choice_R < N
    row_TK, here_TK = torch.where(here_N, row_N, 0).view(-1, choices), here_N.view(-1, choices)
    return Placement(row_TK, torch.where(filled_R, choice_R, 0), here_TK, filled_R, between)


def pack(expert_TK: torch.Tensor, experts: int, rows: int, block: int = 1) -> tuple[Placement, torch.Tensor]:
    """Rows sorted by expert, those of an expert in whole blocks of `block`; and the rows of each expert, blocks filled
    up.

    Args:
        expert_TK: 0 to experts - 1, or `experts` for a choice that gets no row.
        experts: number of experts.
        rows: at least what the fullest routing needs, see `packed_rows`.
        block: rows of a block.
    """
    choices = expert_TK.shape[1]
    expert_N = expert_TK.reshape(-1)
    number_N, counts_G = _number(expert_N, experts + 1)
    counts_E = counts_G[:experts]
    filled_E = (counts_E + block - 1) // block * block
    starts_G = torch.cat([torch.zeros_like(counts_E[:1]), filled_E.cumsum(0)])
    row_N = starts_G[expert_N] + number_N
    return _placement(row_N, expert_N < experts, rows, choices, block > 1), filled_E


def pack_all(expert_TK: torch.Tensor, experts: int) -> Placement:
    """Do what `pack` does, for choices that all get a row and blocks of 1: T*K rows, none of them empty."""
    expert_N = expert_TK.reshape(-1)
    number_N, counts_E = _number(expert_N, experts)
    row_N = (counts_E.cumsum(0) - counts_E)[expert_N] + number_N
    every_N = torch.arange(expert_N.numel(), device=expert_N.device)
    choice_R = torch.empty_like(every_N).scatter_(0, row_N, every_N)
    return Placement(row_N.view(expert_TK.shape), choice_R, None, None, False)


def segment(group_TK: torch.Tensor, groups: int, capacity: int) -> Placement:
    """`capacity` rows for each group, in order of tokens; a choice that finds its group full gets no row."""
    number_N, _ = _number(group_TK.reshape(-1), groups)
    row_N = group_TK.reshape(-1) * capacity + number_N
    return _placement(row_N, number_N < capacity, groups * capacity, group_TK.shape[1], True)


def packed_rows(choices: int, experts: int, block: int) -> int:
    """Rows that any routing of `choices` to `experts` fits into, each expert's in whole blocks."""
    return (choices + min(choices, experts) * (block - 1)) // block * block


def _rows(x_TD: torch.Tensor, p: Placement) -> torch.Tensor:
    x_RD = x_TD.index_select(0, p.choice_R // p.row_TK.shape[1])
    if p.filled_R is not None and p.between:
        x_RD.masked_fill_(~p.filled_R[:, None], 0)
    return x_RD


def _choices(y_RD: torch.Tensor, p: Placement) -> torch.Tensor:
    y_ND = y_RD.index_select(0, p.row_TK.view(-1))
    if p.here_TK is not None:
        y_ND.masked_fill_(~p.here_TK.view(-1, 1), 0)
    return y_ND.view(*p.row_TK.shape, y_RD.shape[1])


def take_rows(x_TD: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The token of each row: [T, D] -> [R, D]. Backward adds up a token's rows."""
    out: torch.Tensor = _TakeRows.apply(x_TD, *placement)
    return out


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, *placement: Any) -> torch.Tensor:
        _keep(ctx, placement)
        return _rows(x_TD, Placement(*placement))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_RD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        placement, _ = _kept(ctx)
        return _sums(dx_RD, placement), *(None for _ in placement)


def combine_rows(y_RD: torch.Tensor, placement: Placement, scores_TK: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of a token's rows, each times its score (in float32): [R, D] -> [T, D] in y's dtype."""
    out: torch.Tensor = _CombineRows.apply(y_RD, scores_TK, *placement)
    return out


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: torch.Tensor, scores_TK: torch.Tensor | None, *placement: Any) -> torch.Tensor:
        _keep(ctx, placement, *(() if scores_TK is None else (y_RD, scores_TK)))
        return _sums(y_RD, Placement(*placement), scores_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        placement, scored = _kept(ctx)
        dy_RD, dscores_TK = _rows(dout_TD, placement), None
        if scored:
            y_RD, scores_TK = scored
            score_R = scores_TK.reshape(-1).index_select(0, placement.choice_R)
            products_R = torch.empty_like(score_R, dtype=torch.float32)
            for some in _blocks(len(dy_RD), BLOCK_ROWS):
                dy_nD = dy_RD[some].float()
                # a row without a choice may give NaN here: `_choices` leaves it out
                products_R[some] = (dy_nD * y_RD[some].float()).sum(1)
                dy_RD[some] = dy_nD * score_R[some, None].float()
            dscores_TK = _choices(products_R[:, None], placement)[..., 0].to(scores_TK.dtype)
        if placement.filled_R is not None and not placement.between:  # else there is none, or `_rows` saw to it
            dy_RD.masked_fill_(~placement.filled_R[:, None], 0)  # no expert learns from a row without a choice
        return dy_RD, dscores_TK, *(None for _ in placement)


def _sums(y_RD: torch.Tensor, p: Placement, scores_TK: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of each token's rows, times its scores in float32 if there are any: [R, D] -> [T, D] in y's dtype."""
    tokens, k = p.row_TK.shape
    sum_TD = y_RD.new_empty(tokens, y_RD.shape[1])
    for some in _blocks(tokens, max(1, BLOCK_ROWS // k)):
        here_nK = None if p.here_TK is None else p.here_TK[some]
        y_nKD = _choices(y_RD, p._replace(row_TK=p.row_TK[some], here_TK=here_nK))
        if scores_TK is None:
            sum_TD[some] = y_nKD.sum(1)
        else:
            # not bmm: selective checkpointing keeps the results of those, here all tokens of the group in float32
            nothing = y_nKD.new_zeros((), dtype=torch.float32)
            sum_TD[some] = torch.baddbmm(nothing, scores_TK[some, None].float(), y_nKD.float(), beta=0)[:, 0]
    return sum_TD


def _blocks(rows: int, least: int) -> list[slice]:
    """What is worked on at once: a sixteenth.

    All copies of the worst case, in float32, are most of a rank's memory otherwise.
    """
    size = max(-(-rows // BLOCKS), least)
    return [slice(first, first + size) for first in range(0, rows, size)]


def _keep(ctx: Any, placement: tuple[Any, ...], *more: torch.Tensor) -> None:
    """Save through autograd, so that activation checkpointing may drop and recompute it."""
    *tensors, ctx.between = placement
    ctx.save_for_backward(*tensors, *more)


def _kept(ctx: Any) -> tuple[Placement, tuple[torch.Tensor, ...]]:
    row_TK, choice_R, here_TK, filled_R, *more = ctx.saved_tensors
    return Placement(row_TK, choice_R, here_TK, filled_R, ctx.between), tuple(more)
