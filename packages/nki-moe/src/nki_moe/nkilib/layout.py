"""Translation between this package's layouts and those of AWS's nki-library blockwise MoE kernels, both ways.

The documented contract (nki-library d2ad3a5, core/moe/moe_cte and experimental/moe/bwd): a block of B rows belongs to
one expert; hidden (T + 1, H) with a padding token T; affinities ((T + 1) E, 1), zero where a token does not use an
expert; gate_up (E, H, 2, I); down (E, I, H); token_position_to_id (N B,) int32; block_to_expert (N, 1) int32; N fixed
by the worst case.

T tokens, R rows, E experts, K experts a token, D = H, F = I, N blocks of B rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nki_moe.work import Work

__all__ = ["Blockwise", "blocks", "blockwise", "score_gradients", "weight_gradients", "with_padding"]


class Blockwise(NamedTuple):
    """Arguments of nki-library's blockwise kernels, by its names."""

    hidden_states: Tensor
    expert_affinities_masked: Tensor
    gate_up_proj_weight: Tensor
    down_proj_weight: Tensor
    token_position_to_id: Tensor
    block_to_expert: Tensor


def blocks(rows: int, experts: int, block_size: int) -> int:
    """N: blocks enough for any routing of so many rows."""
    return -(-max(rows - (experts - 1), 0) // block_size) + experts - 1


def blockwise(x: Tensor, work: Work, block_size: int) -> Blockwise:
    """nki-library's view of the operators' arguments.

    When rows are gathered, a token is one of theirs, with its scores as affinities; otherwise each row is a token of
    its own, with affinity 1 to its expert. Rows past the last expert's are in no block. Row T of the result is padding.
    """
    counts_E, w1_EFD, w2_EDF, w3_EFD, _, choice_R, scores_TK = work
    T, E = x.shape[0], w1_EFD.shape[0]
    R = work.rows(x)
    N, device = blocks(R, E, block_size), x.device
    counts = counts_E.long()
    end = counts.cumsum(0)
    last_block = (-(-counts // block_size)).cumsum(0)
    block_N = torch.arange(N, device=device)
    expert_N = _owners(last_block, block_N).clamp(max=E - 1)
    first_block = last_block - -(-counts // block_size)
    within_NB = (block_N - first_block[expert_N])[:, None] * block_size + torch.arange(block_size, device=device)
    row_NB = (end - counts)[expert_N][:, None] + within_NB
    real_NB = within_NB < counts[expert_N][:, None]

    token_R = torch.arange(R, device=device)
    score_R = x.new_ones(R)
    if choice_R is not None and scores_TK is not None:
        token_R, score_R = choice_R.long() // scores_TK.shape[1], scores_TK.reshape(-1)[choice_R].to(x.dtype)
    else:
        x = torch.where((token_R < end[-1])[:, None], x, 0)  # what lies beyond may be NaN
    owner_R = _owners(end, torch.arange(R, device=device))
    affinity = x.new_zeros((T + 1) * E + 1).index_copy(
        0, torch.where(owner_R < E, token_R * E + owner_R, (T + 1) * E), score_R
    )
    return Blockwise(
        with_padding(x),
        affinity[:-1, None].contiguous(),
        torch.stack([w1_EFD, w3_EFD], dim=1).permute(0, 3, 1, 2).contiguous(),
        w2_EDF.mT.contiguous(),
        torch.where(real_NB, token_R[row_NB.clamp(max=R - 1)], T).reshape(-1).int(),
        expert_N[:, None].int(),
    )


def with_padding(x_TD: Tensor) -> Tensor:
    """Rows and the padding token's, of zeros."""
    return torch.cat([x_TD, x_TD.new_zeros(1, x_TD.shape[1])])


def _owners(end_E: Tensor, which_N: Tensor) -> Tensor:
    """The first group of each whose end is past it; the number of groups where there is none."""
    return (which_N[:, None] >= end_E).sum(1)


def score_gradients(daffinities: Tensor, work: Work) -> Tensor:
    """dscores_TK from nki-library's gradients of affinities ((T + 1) E, 1)."""
    assert work.scores_TK is not None and work.row_TK is not None
    T, E = work.scores_TK.shape[0], work.counts_E.shape[0]
    owner_TK = _owners(work.counts_E.cumsum(0), work.row_TK.reshape(-1)).view(work.row_TK.shape)
    token_T = torch.arange(T, device=owner_TK.device)
    return daffinities[token_T[:, None] * E + owner_TK, 0].to(work.scores_TK.dtype)


def weight_gradients(gate_up_EH2I: Tensor, down_EIH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dw1_EFD, dw2_EDF, dw3_EFD from nki-library's gradients of gate_up and down."""
    return gate_up_EH2I[:, :, 0].mT.contiguous(), down_EIH.mT.contiguous(), gate_up_EH2I[:, :, 1].mT.contiguous()
