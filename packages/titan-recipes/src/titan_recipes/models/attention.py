"""Attention that runs everywhere: torch's scaled_dot_product_attention, with a document mask made from positions.

TorchTitan 0.3.0 offers language models FlexAttention (no CPU backward, no Neuron lowering) and varlen (CUDA only); its
own SDPA module refuses masks. `document_mask` says what a packed sequence may see:
  block   each document alone: a dense boolean mask, any kernel that takes masks
  causal  everything before it, across documents: no mask tensor at all, which Neuron's fast kernel requires

Under context parallel a rank has some of the queries and is given the keys and values of all ranks; its rows of the
mask are made here, in both cases as a tensor. With a dense mask every rank has the same work, so a load balancer
changes nothing.

Shapes: B = batch, L = sequence (K as keys), N = heads, H = head dim.
"""

from dataclasses import dataclass
from typing import Any, Literal

import spmd_types as spmd
import torch
import torch.nn.functional as F
from qwen3_core import Qwen3Config
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.protocols.module import Module

from ..upstream import all_gather_single
from .pipeline_stages import sendable, sends_its_gradient

__all__ = ["Mask", "MaskedQwen3Model", "SDPAttention", "attention_mask_B1LK", "sdpa"]

Mask = Literal["causal", "block"]


def attention_mask_B1LK(positions_BL: torch.Tensor, mask: Mask, load_balancer: str | None) -> torch.Tensor | None:
    """True where query l may see key k: not later and, with `block`, of the same document. None: all that is not later.

    positions_BL restart at 0 with each document. Under context parallel (TorchTitan's current mesh says so) they are
    this rank's part, and K runs over the keys of all ranks in rank order; `load_balancer` is how TorchTitan split the
    sequence. Static in shape: no nonzero, no .item(); views, flips and a cumulative sum, no sorting.
    """
    ranks = spmd_mesh_size("cp")
    if ranks == 1 and mask == "causal":
        return None
    assert ranks == 1 or load_balancer in (None, "headtail"), load_balancer  # others are refused in preflight
    pairs = ranks if load_balancer is not None else 1
    with spmd.no_typecheck():
        length, mine = positions_BL.shape[1], slice(None)
        positions_BK = positions_BL
        if ranks > 1:
            mesh = current_spmd_mesh()
            assert mesh is not None
            mine = slice(first := mesh.get_local_rank("cp") * length, first + length)
            if mask == "block":
                positions_BK = all_gather_single(positions_BL.contiguous(), 1, mesh.get_group("cp"))
        place_K = _by_rank(torch.arange(length * ranks, device=positions_BL.device), pairs)
        seen_BLK = (place_K[mine, None] >= place_K)[None]
        if mask == "block":
            document_BK = _by_rank((_in_sequence(positions_BK, pairs) == 0).cumsum(1), pairs)
            seen_BLK = seen_BLK & (document_BK[:, mine, None] == document_BK[:, None])
        return seen_BLK[:, None]


def _by_rank(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Head-tail balancing of the last dim: rank r has chunks r and 2 * ranks - 1 - r. The same for one rank."""
    if ranks == 1:
        return x
    chunks = x.unflatten(-1, (2 * ranks, -1))
    return torch.stack((chunks[..., :ranks, :], chunks[..., ranks:, :].flip(-2)), -2).flatten(-3)


def _in_sequence(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """The inverse of `_by_rank`."""
    if ranks == 1:
        return x
    pairs = x.unflatten(-1, (ranks, 2, -1))
    return torch.cat((pairs[..., 0, :], pairs[..., 1, :].flip(-2)), -2).flatten(-2)


def sdpa(
    query_BNLH: torch.Tensor,
    key_BNKH: torch.Tensor,
    value_BNKH: torch.Tensor,
    mask_B1LK: torch.Tensor | None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend with torch's scaled_dot_product_attention; both routes call this.

    Args:
        query_BNLH: [B, N, L, H].
        key_BNKH: [B, M, K, H]; M divides N when `enable_gqa`.
        value_BNKH: like the keys.
        mask_B1LK: boolean, True where a query may see a key; None is causal.
        scale: factor on the scores, by default 1 / sqrt(H).
        enable_gqa: whether several query heads share a key head.

    Returns:
        [B, L, N, H].
    """
    out_BNLH = F.scaled_dot_product_attention(
        query_BNLH,
        key_BNKH,
        value_BNKH,
        attn_mask=mask_B1LK,
        is_causal=mask_B1LK is None,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return out_BNLH.transpose(1, 2)


class SDPAttention(Module):
    """Inner attention over F.scaled_dot_product_attention; `attention_masks` is a boolean [B, 1, L, K] or None
    (causal).
    """

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
        """Run the stock forward, with what attention sees made from positions."""
        if self.logit_scale != 1.0:
            scale = self.logit_scale * (q_BLNH.shape[-1] ** -0.5 if scale is None else scale)
        q_BNLH, k_BNKH, v_BNKH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        return sdpa(q_BNLH, k_BNKH, v_BNKH, attention_masks, scale=scale, enable_gqa=enable_gqa)


class MaskedQwen3Model(Qwen3Model):
    """TorchTitan's Qwen3 that builds its document mask from positions, since the trainer builds none for SDPA."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        qwen3: Qwen3Config
        document_mask: Mask = "block"
        load_balancer: str | None = None
        """The run's parallelism.context_parallel_load_balancer."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Take the load balancer of context parallelism from the run's config."""
            # slots=True makes a new class, which super() without arguments does not know.
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)
            self.load_balancer = config.parallelism.context_parallel_load_balancer

    config: Config

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the stock forward, with what attention sees made from positions."""
        if attention_masks is None and positions is not None:
            attention_masks = attention_mask_B1LK(positions, self.config.document_mask, self.config.load_balancer)
        return sendable(super().forward(sends_its_gradient(tokens), positions, attention_masks))
