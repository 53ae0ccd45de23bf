"""Route 2: TorchTitan's own Qwen3, dense or mixture of experts, with scaled_dot_product_attention."""

from dataclasses import replace
from functools import partial
from typing import Any

from qwen3_core import Qwen3Config
from torch import nn
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from ..checkpoint.state_dict import NativeStateDictAdapter
from ..moe.layer import moe_config
from .attention import Mask, MaskedQwen3Model, SDPAttention
from .find import Model, find_model
from .initialization import normal_
from .parallelize import parallelize

__all__ = ["native"]


def native(model: Model, *, document_mask: Mask = "block", flavor: str | None = None) -> ModelSpec:
    """TorchTitan's own Qwen3 with SDPA. `flavor` is what the run calls it; by default the model's name."""
    source = find_model(model)
    c = source.config
    init: dict[str, Any] = {"weight": partial(normal_, std=c.initializer_range), "bias": nn.init.zeros_}
    return ModelSpec(
        name="qwen3",
        flavor=flavor or source.name,
        model=MaskedQwen3Model.Config(
            qwen3=c,
            document_mask=document_mask,
            vocab_size=c.vocab_size,
            dim=c.hidden_size,
            norm=_norm(c, c.hidden_size),
            enable_weight_tying=c.tie_word_embeddings,
            tok_embeddings=Embedding.Config(
                num_embeddings=c.vocab_size,
                embedding_dim=c.hidden_size,
                # Tied, the head's init is the embedding's.
                param_init={"weight": skip_param_init if c.tie_word_embeddings else init["weight"]},
            ),
            lm_head=Linear.Config(in_features=c.hidden_size, out_features=c.vocab_size, param_init=init),
            layers=[_layer(c, i, init) for i in range(c.num_hidden_layers)],
        ),
        parallelize_fn=parallelize,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook,  # idle unless a recipe sets load_balance_coeff
        state_dict_adapter=NativeStateDictAdapter,
    )


def _norm(c: Qwen3Config, size: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=c.rms_norm_eps, param_init={"weight": nn.init.ones_})


def _layer(c: Qwen3Config, index: int, init: dict[str, Any]) -> Qwen3TransformerBlock.Config:
    sparse = c.is_moe_layer(index)
    feed_forward = make_ffn_config(
        dim=c.hidden_size, hidden_dim=c.intermediate_size, w1_param_init=init, w2w3_param_init=init
    )
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(c, c.hidden_size),
        ffn_norm=_norm(c, c.hidden_size),
        attention=make_gqa_config(
            dim=c.hidden_size,
            n_heads=c.num_attention_heads,
            n_kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            wqkv_param_init=init,
            wo_param_init=init,
            inner_attention=SDPAttention.Config(
                logit_scale=c.rope_scaling.attention_scale**2 if c.rope_scaling else 1.0
            ),
            fuse_qkv=True,
            rope=_rope(c),
            qk_norm=_norm(c, c.head_dim),
        ),
        feed_forward=None if sparse else feed_forward,
        moe=moe_config(c, init["weight"]) if sparse else None,
    )


def _rope(c: Qwen3Config) -> CosSinRoPE.Config:
    plain = CosSinRoPE.Config(dim=c.head_dim, max_seq_len=c.max_sequence_length, theta=c.rope_theta)
    if c.rope_scaling is None:
        return plain
    return replace(
        plain,
        scaling="yarn",
        rope_factor=c.rope_scaling.factor,
        beta_fast=c.rope_scaling.beta_fast,
        beta_slow=c.rope_scaling.beta_slow,
        original_seq_len=c.rope_scaling.original_max_position_embeddings,
        truncate=c.rope_scaling.truncate,
    )
