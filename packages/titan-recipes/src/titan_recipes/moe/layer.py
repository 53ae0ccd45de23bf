"""The mixture of experts of all routes: TorchTitan's MoE, computed in the parameters' dtype and routed in float32.

Stock, its experts compute in bfloat16 whatever the parameters are, and its router leaves float32 to an autocast that
CPU does not have. With these two classes the layer is qwen3-core's to float32's last digits, so routes can be compared;
under FSDP's mixed precision both see bfloat16 as before. A kernel takes the experts' place by `@override` on
`GroupedExperts.Config`, as with the stock ones.

Shapes: E = experts, D = model dim, F = expert hidden dim, R = routed tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import spmd_types as spmd
import torch
import torch.nn.functional as F
from qwen3_core import Qwen3Config
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed.spmd_types import spmd_mesh_size
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common import Linear
from torchtitan.models.common.config_utils import make_moe_config
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts
from torchtitan.protocols.model import BaseModel

from .dispatchers import GatherTokenDispatcher
from .router import BalancedRouter

__all__ = ["ContiguousRoutedExperts", "Float32Linear", "SameDtypeExperts", "keep_choices", "moe_config"]


class SameDtypeExperts(GroupedExperts):
    """GroupedExperts without the casts to bfloat16.

    The fake kernel of torch 2.14's grouped product knows bfloat16 alone: in float32 this runs, but does not compile.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Compute as TorchTitan's class does, in the parameters' dtype."""
        w1_EFD, w2_EDF, w3_EFD = (
            w.to_local() if isinstance(w, DTensor) else w for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        ends_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        if get_spmd_backend() == "spmd_types" and spmd.is_type_checking() and spmd_mesh_size("ep") == 1:
            for axis in ("dp", "cp"):  # as the stock experts: counts are partial, the product wants them per rank
                spmd.mutate_type(ends_E, axis, src=spmd.P, dst=spmd.V)
        gate_RF = self._grouped_mm(A=x_RD, B_t=w1_EFD.mT, offs=ends_E)
        up_RF = self._grouped_mm(A=x_RD, B_t=w3_EFD.mT, offs=ends_E)
        return self._grouped_mm(A=F.silu(gate_RF) * up_RF, B_t=w2_EDF.mT, offs=ends_E)


class ContiguousRoutedExperts(RoutedExperts):
    """TorchTitan's, for a split of the sequence that is a view: it flattens batch and sequence by `view`.

    With tensor and expert parallelism, and no sequence parallelism before the layer, its tokens come as such a view.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """Compute as TorchTitan's class does, in the parameters' dtype."""
        return super().forward(
            x_BLD.contiguous(),
            topk_scores_BLK.contiguous(),
            topk_expert_ids_BLK.contiguous(),
            num_local_tokens_per_expert_E,
        )


class Float32Linear(Linear):
    """A bias-free Linear that computes and returns float32: the router's gate, where ties in bfloat16 would decide
    experts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute as TorchTitan's class does, in the parameters' dtype."""
        return F.linear(input.float(), self.weight.float())


def moe_config(config: Qwen3Config, init: Callable[[torch.Tensor], object]) -> MoE.Config:
    """The MoE of one layer of `config`, its weights drawn by `init`. No expert bias: a Qwen3 has none."""
    return make_moe_config(
        num_experts=config.num_experts,
        load_balance_coeff=None,
        router=BalancedRouter.Config(
            num_experts=config.num_experts,
            gate=Float32Linear.Config(
                in_features=config.hidden_size,
                out_features=config.num_experts,
                param_init={"weight": init, "bias": nn.init.zeros_},
            ),
            top_k=config.num_experts_per_tok,
            score_func="softmax",
            route_norm=config.norm_topk_prob,
        ),
        routed_experts=ContiguousRoutedExperts.Config(
            inner_experts=SameDtypeExperts.Config(
                dim=config.hidden_size,
                hidden_dim=config.moe_intermediate_size,
                num_experts=config.num_experts,
                param_init={"w1_EFD": init, "w2_EDF": init, "w3_EFD": init},
            ),
            token_dispatcher=GatherTokenDispatcher.Config(
                num_experts=config.num_experts, top_k=config.num_experts_per_tok
            ),
        ),
    )


def keep_choices(old: BaseModel.Config, new: BaseModel.Config) -> None:
    """Give the mixtures of `new` the token dispatcher and the auxiliary loss that a recipe chose for those of `old`, if
    it has any.
    """
    chosen = [config for _, config, _, _ in old.traverse(MoE.Config)]
    if not chosen:
        return
    dispatcher = chosen[0].routed_experts.token_dispatcher
    for _, config, _, _ in new.traverse(MoE.Config):
        config.routed_experts.token_dispatcher = replace(
            dispatcher, num_experts=config.num_experts, top_k=config.router.top_k
        )
        config.router.balance_coefficient = chosen[0].router.balance_coefficient
