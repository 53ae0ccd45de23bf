"""Contract of rows.py: experts and heads are folded in the order that TorchTitan and Transformers have."""

import torch
from hf_ckpt_adapter import Layout, convert_state
from hf_tiny import config, equal, fused, state


def test_experts_stack_in_order_and_gate_comes_before_up() -> None:
    before = state(config(moe=True))
    native = convert_state(before, Layout.NATIVE).tensors
    both = convert_state(before, Layout.FUSED).tensors
    head = "model.layers.1.mlp.experts."
    for e in range(8):
        gate, up, down = (before[f"{head}{e}.{p}.weight"] for p in ("gate_proj", "up_proj", "down_proj"))
        assert torch.equal(native["layers.1.moe.routed_experts.inner_experts.w1_EFD"][e], gate)
        assert torch.equal(native["layers.1.moe.routed_experts.inner_experts.w3_EFD"][e], up)
        assert torch.equal(native["layers.1.moe.routed_experts.inner_experts.w2_EDF"][e], down)
        assert torch.equal(both[head + "gate_up_proj"][e], torch.cat([gate, up]))
        assert torch.equal(both[head + "down_proj"][e], down)


def test_fused_qkv_interleaves_by_kv_head() -> None:
    before = state(config())
    fused_qkv = convert_state(before, Layout.NATIVE_WQKV).tensors["layers.0.attention.qkv_linear.wqkv.weight"]
    q, k, v = (before[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv")
    # 4 query heads over 2 kv heads of 32: two q heads, k, v; twice.
    assert torch.equal(fused_qkv, torch.cat([q[:64], k[:32], v[:32], q[64:], k[32:], v[32:]]))


def test_query_rows_are_not_permuted() -> None:
    before = state(config())
    after = convert_state(before, Layout.NATIVE).tensors["layers.0.attention.qkv_linear.wq.weight"]
    assert after is before["model.layers.0.self_attn.q_proj.weight"]


def test_square_experts_are_told_apart_by_value() -> None:
    before = state(config(moe=True, moe_intermediate_size=64))
    there = convert_state(fused(before), Layout.NATIVE).tensors
    equal(convert_state(there, Layout.PER_EXPERT).tensors, before)
    gate = before["model.layers.0.mlp.experts.3.gate_proj.weight"]
    assert torch.equal(there["layers.0.moe.routed_experts.inner_experts.w1_EFD"][3], gate)
