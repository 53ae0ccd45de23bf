"""The contract: what is computed from the config equals what is counted on the real module."""

from dataclasses import fields

import pytest
import torch
from qwen3_core import MODELS, Qwen3Config, Qwen3ForCausalLM
from qwen3_core.accounting import (
    ParameterCount,
    count_parameters,
    forward_flops_per_token,
    kv_cache_bytes,
    model_flops_utilization,
    training_flops_per_token,
)
from qwen3_reference import tiny, tiny_moe
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

CONFIGS = [
    tiny(),
    tiny(tie_word_embeddings=True, num_attention_heads=8, num_key_value_heads=1),
    tiny_moe(),
    tiny_moe(num_hidden_layers=4, mlp_only_layers=(1,), tie_word_embeddings=True),
]


def plain_attention(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None) -> Tensor:
    """All of the score matrix, as two products that the counter sees (causal_factor 1)."""
    groups = q_BHTK.shape[1] // k_BGSK.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k_BGSK, v_BGSK))
    return (q_BHTK @ k.mT).softmax(dim=-1) @ v


def first_expert_only(x_RD: Tensor, ends_E: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor) -> Tensor:
    """The products of K experts a token, in a form that the counter knows; which expert costs nothing."""
    return ((x_RD @ gate_EFD[0].T) * (x_RD @ up_EFD[0].T)) @ down_EDF[0].T


MODULES = {
    "Embedding": "embedding",
    "lm_head": "head",
    "self_attn": "attention",
    "mlp": "mlp",
    "Router": "router",
    "ExpertsWeights": "experts",
    "RMSNorm": "norms",
}


@pytest.mark.parametrize("config", CONFIGS)
def test_groups_hold_what_they_are_named_after(config: Qwen3Config) -> None:
    model = Qwen3ForCausalLM(config)
    by_module = dict.fromkeys(("embedding", "head", "attention", "mlp", "router", "experts", "norms"), 0)
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == "Linear":
            kind = "lm_head" if name == "lm_head" else name.split(".")[-2]
        for p in module.parameters(recurse=False):
            by_module[MODULES[kind]] += p.numel()
    count = count_parameters(config)
    assert by_module == {name: getattr(count, name) for name in by_module}
    assert {*by_module, "experts_used"} == {f.name for f in fields(ParameterCount)}
    assert count.total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("config", CONFIGS)
def test_active_parameters_are_those_that_get_a_gradient_from_one_token(config: Qwen3Config) -> None:
    model = Qwen3ForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(0))
    model(torch.tensor([[3]])).sum().backward()
    touched = 0
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        if ".experts." in name:
            touched += int(p.grad.flatten(1).any(dim=1).sum()) * p[0].numel()
        else:
            touched += p.numel()
    assert touched == count_parameters(config).active


@pytest.mark.parametrize("config", CONFIGS)
def test_flops_equal_those_counted_on_the_module(config: Qwen3Config) -> None:
    batch, length = 2, 48
    model = Qwen3ForCausalLM(config, attention=plain_attention, experts=first_expert_only)
    model.init_weights()
    tokens = torch.zeros(batch, length, dtype=torch.long)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(tokens)
    with FlopCounterMode(display=False) as training:
        model(tokens).sum().backward()
    # The counter takes the weighting of the K outputs of experts for a product, which it is, but of no
    # weights.
    moe_layers = sum(config.is_moe_layer(i) for i in range(config.num_hidden_layers))
    combine = 2 * moe_layers * config.num_experts_per_tok * config.hidden_size
    per_token = forward_flops_per_token(config, length, causal_factor=1.0)
    assert forward.get_total_flops() == batch * length * (per_token + combine)
    per_token = training_flops_per_token(config, length, causal_factor=1.0)
    assert training.get_total_flops() == batch * length * (per_token + 3 * combine)


def test_the_attention_term_grows_with_length_and_causal_factor() -> None:
    config = MODELS["8B"]
    base = forward_flops_per_token(config, 0)
    assert base == 2 * (count_parameters(config).non_embedding - count_parameters(config).norms + 151936 * 4096)
    half, full = (
        forward_flops_per_token(config, 4096),
        forward_flops_per_token(config, 4096, causal_factor=1.0),
    )
    assert full - base == 2 * (half - base) == 36 * 4 * 32 * 128 * 4096


def test_mfu_is_the_part_of_the_peak_that_was_used() -> None:
    config = MODELS["4B"]
    speed = 1e15 / training_flops_per_token(config, 2048)
    assert model_flops_utilization(config, speed, 2048, peak_flops_per_second=4e15) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="peak_flops_per_second is 0"):
        model_flops_utilization(config, 1.0, 2048, 0)


def test_head_dim_counts_and_not_hidden_over_heads() -> None:
    # 32B: 64 heads of 128 on a hidden size of 5120, which would be heads of 80.
    config = MODELS["32B"]
    assert count_parameters(config).attention == 64 * 5120 * 128 * (64 + 8 + 8 + 64)
    assert kv_cache_bytes(config, batch=1, length=1) == 2 * 64 * 8 * 128 * 2
