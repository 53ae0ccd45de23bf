"""Qwen3 in PyTorch: what is computed, and nothing else.

Embedding, then blocks of attention and MLP (or experts), each on the normalised stream and added to it, then
a norm and the head. What sets Qwen3 apart: a norm on every query and key head, no biases, and a head dim that
is independent of the hidden size. Parameters have the names of the Hub's checkpoints.

B = batch, T = positions, D = hidden size, H = query heads, G = key/value heads, K = head dim, F = MLP hidden
size, V = vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_core.attention import Attention, cache_mask, document_mask, scaled_dot_product_attention
from qwen3_core.cache import KVCache
from qwen3_core.config import Qwen3Config
from qwen3_core.initialization import init_weights
from qwen3_core.moe import Experts, MixtureOfExperts, grouped_experts
from qwen3_core.norm import rms_norm
from qwen3_core.rope import RotaryEmbedding, rotate

__all__ = ["Qwen3ForCausalLM"]

# (k_BGTK, v_BGTK) -> all keys and values so far, of one layer: a KVCache's update.
KeyValueStore: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class RMSNorm(nn.Module):
    """x / rms(x) * weight (norm.py)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """The normalised rows, like x."""
        return rms_norm(x, self.weight, self.eps)


class GroupedQueryAttention(nn.Module):
    """Attention in which H/G query heads share each key/value head.

    The number of heads is read from the projections, so that a rank may hold some of them only.
    """

    def __init__(self, config: Qwen3Config, attention: Attention) -> None:
        super().__init__()
        D, K = config.hidden_size, config.head_dim
        H, G = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = K
        self.q_proj = nn.Linear(D, H * K, bias=False)
        self.k_proj = nn.Linear(D, G * K, bias=False)
        self.v_proj = nn.Linear(D, G * K, bias=False)
        self.o_proj = nn.Linear(H * K, D, bias=False)
        self.q_norm = RMSNorm(K, config.rms_norm_eps)
        self.k_norm = RMSNorm(K, config.rms_norm_eps)
        self._attend = attention

    def forward(
        self,
        x_BTD: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask_B1TS: Tensor | None,
        store: KeyValueStore | None,
    ) -> Tensor:
        """The sublayer's output, like x; `rotation` is cos and sin [B, T, K]."""
        heads = (-1, self.head_dim)
        q_BHTK = self.q_norm(self.q_proj(x_BTD).unflatten(-1, heads)).transpose(1, 2)
        k_BGSK = self.k_norm(self.k_proj(x_BTD).unflatten(-1, heads)).transpose(1, 2)
        v_BGSK = self.v_proj(x_BTD).unflatten(-1, heads).transpose(1, 2)
        q_BHTK, k_BGSK = rotate(q_BHTK, *rotation), rotate(k_BGSK, *rotation)
        if store is not None:
            k_BGSK, v_BGSK = store(k_BGSK, v_BGSK)
        y_BHTK = self._attend(q_BHTK, k_BGSK, v_BGSK, mask_B1TS)
        return self.o_proj(y_BHTK.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The sublayer's output, like x."""
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Block(nn.Module):
    """One layer: attention, then MLP or experts, each added to the residual stream."""

    def __init__(self, config: Qwen3Config, layer: int, attention: Attention, experts: Experts) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = GroupedQueryAttention(config, attention)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MixtureOfExperts(config, experts) if config.is_moe_layer(layer) else MLP(config)

    def forward(
        self,
        x_BTD: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask_B1TS: Tensor | None = None,
        store: KeyValueStore | None = None,
    ) -> Tensor:
        """The residual stream after this layer, like x."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotation, mask_B1TS, store)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Qwen3Model(nn.Module):
    """tokens_BT -> the normalised hidden states x_BTD that the head reads."""

    def __init__(self, config: Qwen3Config, attention: Attention, experts: Experts) -> None:
        super().__init__()
        self._config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, layer, attention, experts) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Hidden states x_BTD; arguments as for Qwen3ForCausalLM.forward."""
        length, store, mask = tokens_BT.shape[1], None, None
        self._config.check_sequence_length(length)
        if positions_BT is None:
            if cache is not None:
                raise ValueError("a cache needs positions_BT: the slots that the tokens go to, [B, T]")
            positions_BT = torch.arange(length, device=tokens_BT.device)[None]
        else:
            mask = document_mask(positions_BT) if cache is None else cache_mask(positions_BT, cache.length)

        x_BTD = self.embed_tokens(tokens_BT)
        rotation = self.rotary_emb(positions_BT, x_BTD.dtype)
        for layer, block in enumerate(self.layers):
            if cache is not None:
                store = partial(cache.update, layer, positions_BT)
            x_BTD = block(x_BTD, rotation, mask, store)
        return self.norm(x_BTD)


class TiedHead(nn.Module):
    """The embedding, read as the head. It owns nothing: the weight is looked up, so nothing can untie it."""

    def __init__(self, body: Qwen3Model) -> None:
        super().__init__()
        self._body = (body,)  # in a tuple, so that it is no submodule and its parameters are not listed twice

    @property
    def weight(self) -> Tensor:
        """The embedding's own weight."""
        return self._body[0].embed_tokens.weight

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        return F.linear(x_BTD, self.weight)


class Qwen3ForCausalLM(nn.Module):
    """Any Qwen3, dense or MoE: tokens_BT -> logits_BTV.

        model = Qwen3ForCausalLM(MODELS["debug"])
        model.init_weights()

    `attention` and `experts` are the callables described in attention.py and moe.py. Weights are
    uninitialised until `init_weights` or `load_state_dict`; under `torch.device("meta")` they take no memory
    until `to_empty`.
    """

    def __init__(
        self,
        config: Qwen3Config,
        attention: Attention = scaled_dot_product_attention,
        experts: Experts = grouped_experts,
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Qwen3Model(config, attention, experts)
        self.lm_head: nn.Linear | TiedHead
        if config.tie_word_embeddings:
            self.lm_head = TiedHead(self.model)
        else:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Logits of the next token at every position.

        Args:
            tokens_BT: token ids, int64.
            positions_BT: int64, counted from the start of each document. A new document starts wherever they do not
                step by one, and sees nothing of the ones before. Absent, every row is one document.
            cache: keys and values so far. Positions are then required: they are the slots to fill, and everything up
                to them is seen.

        Returns:
            logits_BTV.

        Raises:
            ValueError: T is above the config's maximum, or a cache comes without positions.
        """
        return self.lm_head(self.model(tokens_BT, positions_BT, cache))

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Fill all parameters from the initial distribution (initialization.py)."""
        init_weights(self, self.config.initializer_range, generator)
