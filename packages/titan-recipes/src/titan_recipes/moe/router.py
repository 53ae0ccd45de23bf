"""Qwen3's auxiliary loss, which asks the router to use all experts alike. Off unless a recipe asks for it.

    use_balance_loss(spec, 0.001)   Transformers' router_aux_loss_coef

The loss is E * sum over experts of f_e * P_e: f_e the share of tokens that chose expert e (each token counts K times),
P_e the mean probability that the router gives it, both over all layers (Transformers' load_balancing_loss_func; Switch
Transformer, arXiv 2101.03961, equations 4 to 6).

What it averages over: the tokens of one micro-batch on all ranks together, so that a layout does not change it; and the
micro-batches of a step, each alike. Padding counts as tokens. It is not part of the loss that a run prints but stands
beside it as `balance_loss`, without its coefficient: K when all experts are used alike, E when all tokens choose the
same.

How: f has no gradient, so dLoss/dP_e = E * f_e / rows is known once all layers have chosen. A layer adds up its
probabilities and hands this on in backward; nothing of the trainer's loss changes, and a forward pass that activation
checkpointing runs again counts nothing.

`RoutingWatch` is what a run logs of this and of dropped tokens.

Shapes: B = batch, L = sequence, K = experts a token, E = experts.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.models.common.moe import RoutedExperts, TokenChoiceTopKRouter
from torchtitan.protocols.model_spec import ModelSpec

from ..errors import UserError
from .dispatchers import CapacityTokenDispatcher, recomputing

__all__ = ["BalanceLoss", "BalancedRouter", "RoutingWatch", "refuse_balance", "share_balance", "use_balance_loss"]


class BalanceLoss:
    """The loss of one model: fed by its routers in forward, asked by them in backward."""

    def __init__(self, coefficient: float, layers: int) -> None:
        self.coefficient = coefficient
        """The coefficient of one micro-batch: the recipe's, divided by the micro-batches of a step."""
        self.layers = layers
        self._sums: list[torch.Tensor] = []
        self._gradient_E = torch.zeros(())
        self._values: list[torch.Tensor] = []

    @torch.no_grad()
    def add(self, ids_BLK: torch.Tensor, sum_E: torch.Tensor) -> None:
        """What one layer chose, and its probabilities summed over tokens. The last layer of a pass closes the sums."""
        chosen = ids_BLK.reshape(-1)
        counts_E = torch.zeros_like(sum_E).scatter_add_(0, chosen, torch.ones_like(chosen, dtype=sum_E.dtype))
        rows = torch.full_like(sum_E[:1], ids_BLK.shape[0] * ids_BLK.shape[1])
        self._sums.append(torch.cat([counts_E, sum_E, rows]))
        if len(self._sums) == self.layers:
            self._close()

    def _close(self) -> None:
        total = torch.stack(self._sums).sum(0)
        self._sums.clear()
        if dist.is_initialized() and dist.get_world_size() > 1:
            # Ranks with the same tokens (tensor parallel) all count them, and all hand on a gradient that is summed.
            dist.all_reduce(total)
        E = (total.numel() - 1) // 2
        counts_E, sum_E, rows = total[:E], total[E : 2 * E], total[-1]
        self._gradient_E = self.coefficient * E * counts_E / rows**2
        self._values.append(E * (counts_E * sum_E).sum() / rows**2)

    def gradient_E(self) -> torch.Tensor:
        """Return the gradient of coefficient * loss by the sum of probabilities of any layer."""
        assert not self._sums, f"{len(self._sums)} of {self.layers} layers reported before backward"
        return self._gradient_E

    def take_value(self) -> torch.Tensor | None:
        """Mean loss, without its coefficient, of the micro-batches since the last call; the same on all ranks."""
        values, self._values = self._values, []
        return torch.stack(values).mean() if values else None


class _HandOn(torch.autograd.Function):
    """The scores as they are; in backward, the loss' gradient for the sum of probabilities."""

    @staticmethod
    def forward(ctx: Any, scores_BLK: torch.Tensor, sum_E: torch.Tensor, loss: BalanceLoss) -> torch.Tensor:
        ctx.loss = loss
        return scores_BLK.view_as(scores_BLK)

    @staticmethod
    def backward(ctx: Any, dscores_BLK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return dscores_BLK, ctx.loss.gradient_E(), None


class BalancedRouter(TokenChoiceTopKRouter):
    """TorchTitan's router, which takes part in the auxiliary loss when the recipe asks for it."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        balance_coefficient: float = 0.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.balance_coefficient = config.balance_coefficient
        self.balance: BalanceLoss | None = None  # one for all layers, see share_balance

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Route as TorchTitan does, and add the auxiliary loss to the gradients."""
        topk_scores_BLK, ids_BLK, scores_BLE = super().forward(x_BLD, expert_bias_E)
        if self.balance is not None and self.training and scores_BLE.requires_grad:
            sum_E = scores_BLE.sum((0, 1))
            topk_scores_BLK = _HandOn.apply(topk_scores_BLK, sum_E, self.balance)
            if not recomputing():
                self.balance.add(ids_BLK, sum_E)
        return topk_scores_BLK, ids_BLK, scores_BLE


def use_balance_loss(spec: ModelSpec, coefficient: float) -> None:
    """Train every mixture of experts of `spec` with the auxiliary loss times `coefficient`; 0 turns it off.

    UserError for a coefficient below 0 or not finite, and for one above 0 where there is no mixture of experts.
    """
    if not 0 <= coefficient < math.inf:
        raise UserError(f"The auxiliary loss' coefficient is {coefficient}; it has to be 0 (off) or a number above.")
    routers = [config for _, config, _, _ in spec.model.traverse(BalancedRouter.Config)]
    if coefficient and not routers:
        raise UserError(f"The auxiliary loss has no router to balance: {spec.flavor} has no mixture of experts.")
    for config in routers:
        config.balance_coefficient = coefficient


def refuse_balance(spec: ModelSpec, parallelism: Any) -> None:
    """Raise UserError where the loss cannot be had: pipeline stages and tensor parallelism by DTensor."""
    if not any(router.balance_coefficient for _, router, _, _ in spec.model.traverse(BalancedRouter.Config)):
        return
    if parallelism.pipeline_parallel_degree > 1:
        raise UserError(
            "The auxiliary loss needs the routing of all layers, which pipeline stages do not share. Use expert "
            "parallelism in place of pipeline parallelism, or train without it: use_balance_loss(spec, 0)."
        )
    if parallelism.tensor_parallel_degree > 1 and parallelism.spmd_backend != "spmd_types":
        raise UserError(
            "The auxiliary loss with tensor parallelism needs parallelism.spmd_backend 'spmd_types', not "
            f"{parallelism.spmd_backend!r}."
        )


def share_balance(model: nn.Module, *, parallel_dims: Any, training: Any, **_: Any) -> None:
    """Give the routers of a parallelised model their common loss, if its config asks for one."""
    routers = [module for module in model.modules() if isinstance(module, BalancedRouter)]
    coefficient = max((router.balance_coefficient for router in routers), default=0.0)
    if not coefficient:
        return
    batch = training.local_batch_size * parallel_dims.dp_replicate * parallel_dims.dp_shard
    micro_batches = max(training.global_batch_size // batch, 1)
    loss = BalanceLoss(coefficient / micro_batches, len(routers))
    for router in routers:
        router.balance = loss


class RoutingWatch:
    """What a run logs of its routing, summed over all ranks: `dropped_share` of choices (capacity), `balance_loss`."""

    def __init__(self, config: Any, parts: list[nn.Module]) -> None:
        # Asked of the config, which all ranks have alike: a pipeline stage may hold no such layer.
        layers = [layer for _, layer, _, _ in config.traverse(RoutedExperts.Config)]
        self.drops = any(isinstance(layer.token_dispatcher, CapacityTokenDispatcher.Config) for layer in layers)
        self._modules = [module for part in parts for module in part.modules()]

    def record(self) -> dict[str, float]:
        """Return the figures since the last call. Call it on every rank."""
        found: dict[str, float] = {}
        if self.drops:
            dropped, choices = self._drops()
            found["dropped_share"] = dropped / max(choices, 1)
        loss = next((m.balance for m in self._modules if isinstance(m, BalancedRouter) and m.balance is not None), None)
        value = loss.take_value() if loss is not None else None
        if value is not None:
            found["balance_loss"] = float(value)
        return found

    def _drops(self) -> tuple[int, int]:
        dispatchers = [module.token_dispatcher for module in self._modules if isinstance(module, RoutedExperts)]
        seen = [d.take_seen() for d in dispatchers if isinstance(d, CapacityTokenDispatcher)]
        device = next((p.device for module in self._modules for p in module.parameters()), torch.device("cpu"))
        total = torch.stack(
            [torch.zeros(2, dtype=torch.int64, device=device), *(s for s in seen if s is not None)]
        ).sum(0)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        dropped, choices = total.tolist()
        return dropped, choices
