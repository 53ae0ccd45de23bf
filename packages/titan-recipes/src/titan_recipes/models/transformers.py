"""Route 1: a Qwen3 of Transformers 5 in TorchTitan's Transformers backend, with scaled_dot_product_attention.

What TorchTitan 0.3.0's backend does otherwise, and why it is done here as it is:
  attention  it has FlexAttention alone. Here the document mask, or the causal flag, reaches SDPA as its mask.
  config     it reads config.json itself, with trust_remote_code=True. Here sizes come from a Qwen3Config.
  init       it patches PreTrainedModel for the whole process and leaves RoPE's inv_freq uninitialised with
             Transformers 5.24 (RoPE is then off while the loss falls). Here nothing is patched, and `init_states`
             writes every parameter and buffer.
  experts    it fills a copy of each on the host at start-up. Here they are built on meta, by the native route's
             config.
  ties       it unties embedding and head, which then train apart in some layouts. Here they are one parameter in all.

Shapes: B = batch, L = sequence (K as keys), N = heads, H = head dim.
"""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
from qwen3_core import Qwen3Config
from qwen3_core.accounting import training_flops_per_token
from torch import nn
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed.parallel_dims import MeshAxisName
from torchtitan.experiments.transformers_modeling_backend import HFTransformerModel
from torchtitan.experiments.transformers_modeling_backend.model import HFFlexKernel, SliceableModuleDict
from torchtitan.experiments.transformers_modeling_backend.parallelize import parallelize_hf_transformers
from torchtitan.experiments.transformers_modeling_backend.pipeline import pipeline_hf_transformers
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.sharding import ShardingConfig, SpmdLayout
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from transformers import AttentionInterface, AutoConfig, PreTrainedConfig

from ..moe.layer import moe_config
from ..moe.router import share_balance
from .attention import Mask, attention_mask_B1LK, sdpa
from .initialization import normal_
from .parallelize import reduce_by_sum_on_gloo
from .pipeline_stages import sendable, sends_its_gradient

__all__ = ["TransformersQwen3", "transformers_model_spec"]

log = logging.getLogger(__name__)

_ATTENTION = "titan_recipes_sdpa"
_EXPERT_SHARDING = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}


def transformers_model_spec(
    config: Qwen3Config, document_mask: Mask, flavor: str, adapter: type[BaseStateDictAdapter]
) -> ModelSpec:
    """See `titan_recipes.models.spec.transformers`."""
    init = partial(normal_, std=config.initializer_range)
    sparse = [i for i in range(config.num_hidden_layers) if config.is_moe_layer(i)]
    return ModelSpec(
        name="transformers",
        flavor=flavor,
        model=TransformersQwen3.Config(
            qwen3=config, document_mask=document_mask, moe=moe_config(config, init) if sparse else None
        ),
        parallelize_fn=parallelize,
        pipelining_fn=pipeline_hf_transformers,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=adapter,
    )


def parallelize(model: nn.Module, **kwargs: Any) -> nn.Module:
    """TorchTitan's parallelisation of its Transformers backend, made to run on gloo."""
    model = reduce_by_sum_on_gloo(parallelize_hf_transformers(model, **kwargs))
    share_balance(model, **kwargs)
    return model


def _attend(
    query_BNLH: torch.Tensor,
    key_BNKH: torch.Tensor,
    value_BNKH: torch.Tensor,
    mask_B1LK: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """`sdpa` where the backend has left key heads as few as they are."""
    gqa = query_BNLH.shape[1] != key_BNKH.shape[1]
    return sdpa(query_BNLH, key_BNKH, value_BNKH, mask_B1LK, scale=scaling, enable_gqa=gqa)


class SDPAKernel(HFFlexKernel):
    """The attention of one layer, under the sharding that the backend declares for its flex kernel (and
    `_all_keys`).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HFFlexKernel.Config):
        pass

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        module: nn.Module,
        block_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        return _attend(query, key, value, block_mask, kwargs.get("scaling"))


def _all_keys(sharding: ShardingConfig) -> ShardingConfig:
    """`sharding` of q, k, v, with k and v gathered over context-parallel ranks, as the native route declares it.

    The backend gathers them in a wrapper around its flex kernel, which goes with that kernel.
    """
    assert sharding.in_dst_shardings is not None
    gathered = {
        name: SpmdLayout(layout.axis_types | {MeshAxisName.CP: spmd.R}) if name != "query" else layout
        for name, layout in sharding.in_dst_shardings.items()
    }
    return replace(sharding, in_dst_shardings=gathered)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface; without a kernel (the model is not parallelised) it computes the same
    directly.
    """
    kernel = getattr(module, "_titan_flex_kernel", None)
    if kernel is None:
        return _attend(query, key, value, attention_mask, scaling), None
    return kernel(query, key, value, module=module, block_mask=attention_mask, scaling=scaling), None


class TransformersQwen3(HFTransformerModel):
    """TorchTitan's wrapper of a Transformers model, for a Qwen3 and SDPA."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        qwen3: Qwen3Config
        document_mask: Mask = "block"
        load_balancer: str | None = None
        """The run's parallelism.context_parallel_load_balancer."""
        moe: MoE.Config | None = None
        """What each sparse layer has. One config for all, where overrides find it."""

        @property
        def vocab_size(self) -> int:
            """Rows of the vocabulary."""
            return self.qwen3.vocab_size

        @property
        def max_seq_len(self) -> int:
            """Positions that the model knows."""
            return self.qwen3.max_sequence_length

        @property
        def tie_word_embeddings(self) -> bool:
            """Whether head and embedding are one tensor."""
            return self.qwen3.tie_word_embeddings

        @property
        def n_layers(self) -> int:
            """Number of decoder layers."""
            return self.qwen3.num_hidden_layers

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Take what depends on the layout from the run's config."""
            parallelism = config.parallelism
            self.load_balancer = parallelism.context_parallel_load_balancer
            if self.moe is not None:
                self.moe.router._debug_force_load_balance = config.debug.moe_force_load_balance
                set_moe_sharding_config(
                    self.moe,
                    enable_ep=parallelism.expert_parallel_degree > 1,
                    enable_sp=parallelism.tensor_parallel_degree > 1,  # the backend's dense layers do the same
                    expert_param_layout=_EXPERT_SHARDING,
                )

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Return the parameters, and the FLOPs of training on one token."""
            flops = training_flops_per_token(self.qwen3, seq_len)
            return sum(p.numel() for p in model.parameters()), round(flops)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(_hf_config(config))
        self.config = config
        for layer in self.layers.values():
            if layer.moe_enabled:
                assert config.moe is not None
                layer.mlp = config.moe.build()
                object.__setattr__(layer, "moe", layer.mlp)  # the name that load balancing looks for, registered once
        self._tie()

    def _patch_hf_llama_like(self, *args: Any, **kwargs: Any) -> None:
        """The backend's process-wide patch of PreTrainedModel's initialisation: `init_states` needs none."""

    def _tie(self) -> None:
        """Make head and embedding one parameter, where both are here."""
        tied = self.config.qwen3.tie_word_embeddings
        if tied and not isinstance(self.tok_embeddings, nn.Identity) and not isinstance(self.lm_head, nn.Identity):
            self.lm_head.weight = self.tok_embeddings.weight

    def parallelize(self, parallel_dims: Any) -> None:
        """Put SDPA in the place of the flex kernels, under the same sharding, then shard; FSDP, later, sees tied
        weights.
        """
        # A pipeline stage of embedding or head alone is left a dict of layers that HF's forward cannot slice.
        if not len(self.layers):
            self.model.model.layers = SliceableModuleDict()
        log.info("swap: %s.%s for %s in every layer", SDPAKernel.__module__, SDPAKernel.__name__, HFFlexKernel.__name__)
        for layer in self.layers.values():
            sharding = _all_keys(layer.self_attn._titan_flex_kernel._sharding_config)
            layer.self_attn._titan_flex_kernel = SDPAKernel.Config(sharding_config=sharding).build()
        super().parallelize(parallel_dims)
        self._tie()

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Every parameter from qwen3-core's initial distribution, every buffer computed."""
        self._tie()
        for parameter in self.parameters():  # 1-D ones are norms
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                normal_(parameter, std=self.config.qwen3.initializer_range)
        for module in self.modules():
            if isinstance(module, MoE):
                with module._preserve_buffer_spmd_types():
                    module._init_self_buffers(buffer_device=buffer_device)
        self._init_rope()

    def _init_rope(self) -> None:
        rope = self.rotary_emb
        if isinstance(rope, nn.Identity):
            return
        # Transformers computes these in the constructor alone: build one on the host and take its.
        (plain,) = (c for c in type(rope).__mro__ if c.__module__.startswith("transformers."))
        fresh = plain(rope.config)
        for name, value in fresh.named_buffers():
            rope.get_buffer(name).copy_(value)
        rope.attention_scaling = fresh.attention_scaling

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """tokens [B, L] (a later pipeline stage: hidden states), positions [B, L] -> logits [B, L, V] (or hidden
        states).
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)
        elif attention_masks is None:
            attention_masks = attention_mask_B1LK(positions, self.config.document_mask, self.config.load_balancer)
        tokens = sends_its_gradient(tokens)
        output = self.model.model(tokens, position_ids=positions, attention_mask=attention_masks, use_cache=False)
        hidden = output.last_hidden_state
        return sendable(hidden if self._skip_lm_head else self.model.lm_head(hidden))


def _hf_config(config: TransformersQwen3.Config) -> PreTrainedConfig:
    """The Transformers config, with what TorchTitan's wrapper reads from its own."""
    AttentionInterface.register(_ATTENTION, _attention)
    hf = AutoConfig.for_model(**config.qwen3.to_hf("transformers-5"), attn_implementation=_ATTENTION)
    hf.is_moe = False  # the wrapper's own replacement of experts: done above, on meta
    hf.max_seq_len = config.max_seq_len
    return hf
