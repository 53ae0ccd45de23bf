"""The mixture of experts: route every token to K of E small MLPs, add up what they say.

B = batch, T = tokens, D = model dim, E = experts, K = experts per token, R = T*K rows, F = expert hidden dim.
Every shape is known beforehand and no Python value depends on the routing: the rows are sorted by expert, and
one integer per expert says where its rows end.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_core.config import Qwen3Config

__all__ = ["Experts", "ExpertsWeights", "MixtureOfExperts", "Router", "grouped_experts"]

# (x_RD, ends_E, gate_EFD, up_EFD, down_EDF) -> y_RD; rows ends_E[e-1] to ends_E[e] (int32) are for expert e.
Experts: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Router(nn.Module):
    """x_TD -> (weights_TK, experts_TK): the K most probable experts of every token.

    Scores, softmax and top-k are float32 in every model dtype. In bfloat16 many scores are equal, and which
    expert wins would then depend on the kernel.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.normalize = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights in the dtype of x, and int64 experts, both [T, K]."""
        scores_TE = F.linear(x_TD.float(), self.weight.float())
        weights_TK, experts_TK = scores_TE.softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK.to(x_TD.dtype), experts_TK


class ExpertsWeights(nn.Module):
    """The weights of all experts of a layer, stacked: expert e of the Hub's files is index e here."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        E, F_, D = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_proj = nn.Parameter(torch.empty(E, F_, D))
        self.up_proj = nn.Parameter(torch.empty(E, F_, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, F_))


class MixtureOfExperts(nn.Module):
    """x_BTD -> x_BTD: the sum over each token's K experts of weight times down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Qwen3Config, experts: Experts) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = ExpertsWeights(config)
        self._run = experts

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The layer's output, like x."""
        x_TD = x_BTD.flatten(0, 1)
        weights_TK, experts_TK = self.gate(x_TD)
        top_k, w = experts_TK.shape[1], self.experts
        sorted_R, order_R = experts_TK.flatten().sort(stable=True)
        every_E = torch.arange(w.gate_proj.shape[0], device=x_TD.device)
        ends_E = torch.searchsorted(sorted_R, every_E, right=True, out_int32=True)
        x_RD = x_TD.index_select(0, order_R // top_k)
        y_RD = self._run(x_RD, ends_E, w.gate_proj, w.up_proj, w.down_proj)
        y_TKD = y_RD.index_select(0, order_R.argsort()).unflatten(0, (-1, top_k))
        return (weights_TK[:, None] @ y_TKD).view_as(x_BTD)


def grouped_experts(x_RD: Tensor, ends_E: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor) -> Tensor:
    """The experts as three grouped matrix products: one product per expert over its own rows.

    It is the fastest of the ways that torch offers on CPU, and has one shape for any routing. Its fake kernel knows
    bfloat16 only (torch 2.14), so a float32 mixture of experts runs, but is neither compiled nor run on meta.

    Args:
        x_RD: rows, sorted by expert.
        ends_E: where each expert's rows end, int32.
        gate_EFD: the experts' gate projections, in the dtype of x.
        up_EFD: their up projections.
        down_EDF: their down projections.

    Returns:
        y_RD like x.
    """
    gate_RF = F.grouped_mm(x_RD, gate_EFD.mT, offs=ends_E)
    up_RF = F.grouped_mm(x_RD, up_EFD.mT, offs=ends_E)
    return F.grouped_mm(F.silu(gate_RF) * up_RF, down_EDF.mT, offs=ends_E)
