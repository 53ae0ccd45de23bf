"""Activation checkpointing that keeps what is dear to compute again: every linear, attention, every exchange.

TorchTitan's selective policy recomputes every second matrix product. On Neuron a linear is one operator that fills the
tensor engine, and what surrounds it (norms, RoPE, SiLU, casts) is cheap: keep the former, recompute the latter.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchtitan.distributed.activation_checkpoint import SelectiveAC

from ..upstream import checkpoint_wrapper

__all__ = ["SaveLinears"]


class SaveLinears(SelectiveAC):
    """Per-operator selective checkpointing; what `get_save_ops` names is saved, each time."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        """TorchTitan's set (linears, attention, communication) with a linear's other names and CPU's attention."""
        aten = torch.ops.aten
        more = {aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default}
        ops: set[Any] = super().get_save_ops()
        return ops | more

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        saved = self.get_save_ops()

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

        wrapped: nn.Module = checkpoint_wrapper(
            module,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
            preserve_rng_state=self.config.preserve_rng_state,
            determinism_check=self.config.determinism_check,
            early_stop=False,
            debug=self.config.debug,
        )
        return wrapped
