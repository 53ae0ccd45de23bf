"""Contract: what a core holds of each tensor follows from the table of tensors, experts dividing by their own axes."""

import math

from neuron_parallel.parameters import local_shape, parameters
from plan_shapes import QWEN3_8B, QWEN3_30B, QWEN3_235B, plan


def test_experts_divide_by_ep_attention_by_tp_router_and_norms_by_neither():
    layout = plan(64, tp=4, ep=16, dp_shard=16)
    local = {row.name: local_shape(row, layout) for row in parameters(QWEN3_30B)}
    assert local["moe.routed_experts.inner_experts.w1_EFD"] == (2, 768, 2048)  # 128/16 experts over efsdp 4
    assert local["attention.qkv_linear.wqkv.weight"] == (5120 // 4 // 16, 2048)
    assert local["attention.wo.weight"] == (2048 // 16, 4096 // 4)
    assert local["moe.router.gate.weight"] == (128 // 16, 2048)  # FSDP alone
    assert local["attention_norm.weight"] == (2048 // 16,)


def test_uneven_shards_are_dealt_in_chunks_rounded_up():
    layout = plan(3)
    row = next(row for row in parameters(QWEN3_8B) if row.name == "norm.weight")
    assert [local_shape(row, layout, rank)[0] for rank in range(3)] == [1366, 1366, 1364]


def test_the_parameters_of_all_ranks_are_those_of_the_model():
    layout = plan(64, tp=4, ep=8)
    whole = 0
    for row in parameters(QWEN3_30B):
        experts = row.expert
        ranks = layout.efsdp if experts else layout.fsdp
        copies = layout.ep if experts else (layout.tp if row.tp_dim is not None else 1)
        size = sum(math.prod(local_shape(row, layout, rank)) for rank in range(ranks)) * copies
        whole += size * (48 if row.unit == "layer" else 1)
    assert whole == QWEN3_30B.parameters == 30_532_122_624
    assert QWEN3_30B.active_parameters == 3_353_032_704
    assert QWEN3_235B.parameters == 235_093_634_560
