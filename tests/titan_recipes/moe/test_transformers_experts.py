"""Contract: a Qwen3 of Transformers, without TorchTitan, takes nki-moe's experts by Transformers' own setting and
computes the same.
"""

import pytest
import torch
import transformers
from titan_recipes.moe.transformers_experts import register


def test_transformers_own_setting_swaps_the_experts_and_changes_no_number():
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=100,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    tokens = torch.randint(0, 100, (2, 16))
    results = []
    for name in ("eager", register()):
        model.set_experts_implementation(name)
        model.zero_grad()
        out = model(input_ids=tokens, labels=tokens)
        with torch.profiler.profile() as profile:
            out.loss.backward()
        assert any("nki_moe::" in event.key for event in profile.key_averages()) == (name != "eager")
        results.append([out.logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5 * eager.abs().max().item())


def test_experts_of_another_kind_are_refused():
    config = transformers.Qwen3MoeConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=50,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        hidden_act="gelu",
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation(register())
    with pytest.raises(ValueError, match=r"SwiGLU.*Qwen3MoeExperts"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
