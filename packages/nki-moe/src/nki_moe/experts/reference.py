"""What the operators compute, as plainly as torch allows; autograd differentiates it. Tests compare everything with it.

T tokens, K experts a token, R rows, E experts, D model dim, F hidden dim, n rows of one expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["grouped_mlp", "routed_mlp"]


def grouped_mlp(x_RD: Tensor, counts_E: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor) -> Tensor:
    """y = (silu(x w1) * (x w3)) w2 with the weights of each row's expert; zero in the rows after the last expert's."""
    counts = counts_E.tolist()
    rest = x_RD.shape[0] - sum(counts)
    rows = x_RD.split([*counts, rest])
    y = [
        (F.silu(x_nD @ w1_FD.T) * (x_nD @ w3_FD.T)) @ w2_DF.T
        for x_nD, w1_FD, w2_DF, w3_FD in zip(rows[:-1], w1_EFD, w2_EDF, w3_EFD, strict=True)
    ]
    return torch.cat([*y, torch.zeros_like(rows[-1])])


def routed_mlp(
    x_TD: Tensor, experts_TK: Tensor, scores_TK: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor
) -> Tensor:
    """The sum over a token's K experts of score * expert(x)."""
    K = experts_TK.shape[1]
    order_R = experts_TK.flatten().argsort(stable=True)
    counts_E = experts_TK.flatten().bincount(minlength=w1_EFD.shape[0])
    y_RD = grouped_mlp(x_TD[order_R // K], counts_E, w1_EFD, w2_EDF, w3_EFD)
    weighted_RD = y_RD * scores_TK.flatten()[order_R, None].to(y_RD.dtype)
    return torch.zeros_like(x_TD).index_add(0, order_R // K, weighted_RD)
