"""nki-moe's experts in Transformers' own registry of expert functions, for a Qwen3 of Transformers without TorchTitan.

    AutoModelForCausalLM.from_pretrained(folder, experts_implementation=register())

TorchTitan's Transformers backend replaces the modules that this registry serves by experts that it can divide over
ranks, so that on route 1 the registry reaches nothing; there the override of `titan_recipes.moe.kernels` does, expert
parallel included.

Shapes: T = tokens, K = experts a token, E = experts, D = model dim, F = expert hidden dim.
"""

from typing import Any

import nki_moe
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

__all__ = ["register"]

NAME = "nki_moe"


def register() -> str:
    """Add nki-moe's experts to the registry; its name there, for `experts_implementation`."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    return NAME


def _experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states [T, D], top_k_index and top_k_weights [T, K] -> [T, D], with the weights of a Transformers experts
    module.

    Raises ValueError for a module that is not a Qwen3's: gated by SiLU, concatenated, without bias, all experts here.
    """
    plain = self.has_gate and self.is_concatenated and self.config.hidden_act in ("silu", "swish")
    if not plain or self.is_transposed or self.has_bias or self.has_post_expert_norm or self._is_expert_parallel:
        raise ValueError(
            f"nki-moe's experts are SwiGLU with [gate; up] weights, all on one rank; {type(self).__name__} here is "
            "not. Use experts_implementation='grouped_mm'."
        )
    w1_EFD, w3_EFD = (w.contiguous() for w in self.gate_up_proj.chunk(2, dim=1))  # kernels read whole tensors
    return nki_moe.routed_mlp(hidden_states, top_k_index, top_k_weights, w1_EFD, self.down_proj, w3_EFD)
