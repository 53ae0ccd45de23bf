"""Attention that runs everywhere: torch's scaled_dot_product_attention, with a document mask made from positions.

TorchTitan 0.3.0 offers language models FlexAttention (no CPU backward, no Neuron lowering) and varlen (CUDA only); its own
SDPA module refuses masks. `document_mask` says what a packed sequence may see:
  block   each document alone: a dense boolean mask, any kernel that takes masks
  causal  everything before it, across documents: no mask tensor at all, which Neuron's fast kernel requires

Shapes: B = batch, L = sequence (K as keys), N = heads, H = head dim.
"""

from dataclasses import dataclass
from typing import Any, Literal

import spmd_types as spmd
import torch
import torch.nn.functional as F
from qwen3_core import Qwen3Config
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.protocols.module import Module

__all__ = ["Mask", "MaskedQwen3Model", "SDPAttention", "document_mask_B1LK"]

Mask = Literal["causal", "block"]


def document_mask_B1LK(positions_BL: torch.Tensor) -> torch.Tensor:
    """True where query l may see key k: same document, not later. positions_BL restart at 0 with each document.

    Static in shape: no nonzero, no .item().
    """
    with spmd.no_typecheck():
        document_BL = (positions_BL == 0).cumsum(1)
        same_BLK = document_BL[:, :, None] == document_BL[:, None, :]
        return same_BLK.tril()[:, None]


class SDPAttention(Module):
    """Inner attention over F.scaled_dot_product_attention; `attention_masks` is a boolean [B, 1, L, K] or None (causal)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        logit_scale: float = 1.0
        """Factor on the scores: YaRN's attention scale squared, since TorchTitan's RoPE is a rotation alone."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.logit_scale = config.logit_scale

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: torch.Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self.logit_scale != 1.0:
            scale = self.logit_scale * (q_BLNH.shape[-1] ** -0.5 if scale is None else scale)
        out_BNLH = F.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k_BLNH.transpose(1, 2),
            v_BLNH.transpose(1, 2),
            attn_mask=attention_masks,
            is_causal=attention_masks is None,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out_BNLH.transpose(1, 2)


class MaskedQwen3Model(Qwen3Model):
    """TorchTitan's Qwen3 that builds its document mask from positions, since the trainer builds none for SDPA."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        qwen3: Qwen3Config
        document_mask: Mask = "block"

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attention_masks is None and positions is not None and self.config.document_mask == "block":
            attention_masks = document_mask_B1LK(positions)
        return super().forward(tokens, positions, attention_masks)
