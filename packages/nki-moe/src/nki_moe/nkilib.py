"""Between this package's layouts and those of AWS's nki-library blockwise MoE kernels, both ways: to compare the two at equal inputs, or to
call AWS's where they are installed. Kernels themselves are not part of this.

The documented contract (nki-library d2ad3a5, core/moe/moe_cte and experimental/moe/bwd): a block of B rows belongs to one expert;
hidden (T + 1, H) with a padding token T; affinities ((T + 1) E, 1), zero where a token does not use an expert; gate_up
(E, H, 2, I); down (E, I, H); token_position_to_id (N B,) int32; block_to_expert (N, 1) int32; N fixed by the worst case.

R rows, E experts, D = H, F = I, N blocks of B rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Blockwise", "blocks", "blockwise", "weight_gradients"]


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


def blockwise(
    x_RD: Tensor, counts_E: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor, block_size: int
) -> Blockwise:
    """nki-library's view of grouped_mlp's arguments: each row is a token of its own, with affinity 1 to its expert. Rows past the last
    expert's are in no block. Row T of the result is padding."""
    (R, D), E = x_RD.shape, w1_EFD.shape[0]
    N, device = blocks(R, E, block_size), x_RD.device
    counts = counts_E.long()
    end = counts.cumsum(0)
    last_block = (-(-counts // block_size)).cumsum(0)
    block_N = torch.arange(N, device=device)
    expert_N = torch.bucketize(block_N, last_block, right=True).clamp(max=E - 1)
    first_block = last_block - -(-counts // block_size)
    within_NB = (block_N - first_block[expert_N])[:, None] * block_size + torch.arange(block_size, device=device)
    row_NB = (end - counts)[expert_N][:, None] + within_NB
    row_NB = torch.where(within_NB < counts[expert_N][:, None], row_NB, R)

    row_R = torch.arange(R, device=device)
    owner_R = torch.bucketize(row_R, end, right=True)
    affinity_TE = (owner_R[:, None] == torch.arange(E, device=device)).to(x_RD.dtype)
    used_RD = torch.where((owner_R < E)[:, None], x_RD, 0)
    return Blockwise(
        torch.cat([used_RD, x_RD.new_zeros(1, D)]),
        torch.cat([affinity_TE, affinity_TE.new_zeros(1, E)]).reshape(-1, 1),
        torch.stack([w1_EFD, w3_EFD], dim=1).permute(0, 3, 1, 2).contiguous(),
        w2_EDF.mT.contiguous(),
        row_NB.reshape(-1).int(),
        expert_N[:, None].int(),
    )


def weight_gradients(gate_up_EH2I: Tensor, down_EIH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dw1_EFD, dw2_EDF, dw3_EFD from nki-library's gradients of gate_up and down."""
    return gate_up_EH2I[:, :, 0].mT.contiguous(), down_EIH.mT.contiguous(), gate_up_EH2I[:, :, 1].mT.contiguous()
