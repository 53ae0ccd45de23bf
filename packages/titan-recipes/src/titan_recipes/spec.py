"""TorchTitan model specs for Qwen3, and the Hugging Face config.json of a native model.

`qwen3_spec` takes the sizes of a config.json by their own names, so that a recipe reads like the model card.
"""

from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from .attention import MaskedQwen3Model, SDPAttention
from .state_dict import NativeStateDictAdapter

__all__ = ["hf_config", "parallelize", "qwen3_spec"]


def qwen3_spec(
    flavor: str,
    *,
    vocab_size: int,
    hidden_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    intermediate_size: int,
    max_position_embeddings: int,
    rope_theta: float = 1_000_000.0,
    rms_norm_eps: float = 1e-6,
    tie_word_embeddings: bool = False,
    initializer_range: float = 0.02,
    document_mask: Literal["causal", "block"] = "block",
) -> ModelSpec:
    """A dense Qwen3 for TorchTitan's native model. Sizes as in config.json; init is normal(initializer_range)."""
    normal = partial(nn.init.normal_, std=initializer_range)
    linear_init: dict[str, Any] = {"weight": normal, "bias": nn.init.zeros_}

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=rms_norm_eps, param_init={"weight": nn.init.ones_})

    def layer() -> Qwen3TransformerBlock.Config:
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(hidden_size),
            ffn_norm=norm(hidden_size),
            attention=make_gqa_config(
                dim=hidden_size,
                n_heads=num_attention_heads,
                n_kv_heads=num_key_value_heads,
                head_dim=head_dim,
                wqkv_param_init=linear_init,
                wo_param_init=linear_init,
                inner_attention=SDPAttention.Config(),
                fuse_qkv=True,
                rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=max_position_embeddings, theta=rope_theta),
                qk_norm=norm(head_dim),
            ),
            feed_forward=make_ffn_config(
                dim=hidden_size,
                hidden_dim=intermediate_size,
                w1_param_init=linear_init,
                w2w3_param_init=linear_init,
            ),
        )

    return ModelSpec(
        name="qwen3",
        flavor=flavor,
        model=MaskedQwen3Model.Config(
            vocab_size=vocab_size,
            dim=hidden_size,
            norm=norm(hidden_size),
            enable_weight_tying=tie_word_embeddings,
            tok_embeddings=Embedding.Config(
                num_embeddings=vocab_size,
                embedding_dim=hidden_size,
                # Tied, the head's init is the embedding's.
                param_init={"weight": skip_param_init if tie_word_embeddings else normal},
            ),
            lm_head=Linear.Config(in_features=hidden_size, out_features=vocab_size, param_init=linear_init),
            layers=[layer() for _ in range(num_hidden_layers)],
            document_mask=document_mask,
            initializer_range=initializer_range,
        ),
        parallelize_fn=parallelize,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=NativeStateDictAdapter,
    )


def parallelize(model: nn.Module, **kwargs: Any) -> nn.Module:
    """TorchTitan's own parallelisation; on gloo, FSDP is told to reduce by sum.

    FSDP2 scales gradients with ReduceOp.PREMUL_SUM, which gloo lacks. Neuron and NCCL keep the default.
    """
    model = parallelize_qwen3(model, **kwargs)
    if dist.is_initialized() and dist.get_backend() == "gloo":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model


def hf_config(model: MaskedQwen3Model.Config, *, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json that Transformers needs to rebuild this model (dense Qwen3; `dtype` is that of the weights)."""
    attention = model.layers[0].attention
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.layers[0].feed_forward.w1.out_features,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": model.max_seq_len,
        "rope_parameters": {"rope_type": "default", "rope_theta": attention.rope.theta},
        "rope_theta": attention.rope.theta,
        "rms_norm_eps": model.norm.eps,
        "tie_word_embeddings": model.enable_weight_tying,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "initializer_range": model.initializer_range,
        "bos_token_id": None,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
    }
