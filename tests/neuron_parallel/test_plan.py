"""Contract: a plan that cannot work is refused before anything starts, with every reason at once, its numbers and what
would do.
"""

import random

import pytest
from neuron_parallel import Cluster, ModelShape, ParallelPlan, Training, errors, instance, validate
from neuron_parallel.memory import core_memory
from neuron_parallel.plan import expert_shard_dim, stage_layers
from plan_shapes import QWEN3_4B, QWEN3_8B, QWEN3_30B, TRN2, plan

TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
TINY_D = ModelShape(**TINY)
TINY_M = ModelShape(**TINY, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)


def rules(plan, shape, cluster, training=None):
    return {finding.rule: finding.message for finding in validate(plan, shape, cluster, training)}


def test_the_reference_plans_are_valid():
    assert not errors(ParallelPlan(tp=4), QWEN3_8B, TRN2)
    assert not errors(ParallelPlan(), QWEN3_4B, TRN2)
    assert not errors(ParallelPlan(ep=8), QWEN3_30B, TRN2)


def test_all_violations_come_at_once():
    found = rules(ParallelPlan(tp=3, cp=5, ep=3, seq_len=65, global_batch=7), QWEN3_8B, 64)
    assert {
        "world",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "seq_len",
        "ep",
        "global_batch",
    } <= set(found)


def test_a_product_that_is_not_the_world_says_what_would_fit():
    assert "dp_shard 16 would fit" in rules(ParallelPlan(tp=4, dp_shard=8), QWEN3_8B, 64)["world"]
    assert "does not divide 64" in rules(ParallelPlan(tp=4, cp=3), QWEN3_8B, 64)["world"]


def test_dp_shard_takes_the_rest_as_in_torchtitan():
    resolved = ParallelPlan(tp=4, dp_replicate=2).resolve(64)
    assert (resolved.dp_shard, resolved.dp, resolved.global_batch) == (8, 16, 16)


def test_ep_3_with_8_experts_names_the_numbers_and_valid_degrees():
    found = rules(ParallelPlan(ep=3), TINY_M, 8)
    assert "ep 3 does not divide num_experts 8; 2 or 4 would" in found["num_experts"]
    assert "ep 3 does not divide dp_shard 8 * cp 1 * tp 1 = 8" in found["sparse_mesh"]


@pytest.mark.parametrize(("degree", "multiple"), [({"tp": 2}, 2), ({"cp": 2}, 4), ({"tp": 2, "cp": 2}, 8)])
def test_seq_len_65_is_refused_with_its_multiple(degree, multiple):
    message = rules(ParallelPlan(seq_len=65, **degree), TINY_D, 8)["seq_len"]
    assert (
        "65" in message and f"nearest: {65 // multiple * multiple} or {65 // multiple * multiple + multiple}" in message
    )


def test_sequence_parallel_off_leaves_cp_alone():
    assert "seq_len" not in rules(ParallelPlan(seq_len=65, tp=2, sequence_parallel=False), TINY_D, 8)
    assert "seq_len" in rules(ParallelPlan(seq_len=66, tp=2, cp=2, sequence_parallel=False), TINY_D, 8)


def test_the_expert_dimension_counts_ranks_that_share_experts_not_replicas():
    assert expert_shard_dim(plan(8, dp_replicate=2, dp_shard=4), 4) == 0
    assert expert_shard_dim(plan(16, dp_replicate=2, dp_shard=8), 4) == 1
    assert expert_shard_dim(plan(8, ep=2), 4) == 1  # efsdp 4 * ep 2 ranks for 4 experts
    assert expert_shard_dim(plan(8, ep=2), 8) == 0


def test_pipeline_parallel_with_tied_embeddings_is_refused():
    assert "tied" in rules(ParallelPlan(pp=2), QWEN3_4B, TRN2)["tied_pp"]


def test_too_many_stages_are_refused_and_layers_are_dealt_as_torchtitan_deals_them():
    assert "layers" in rules(ParallelPlan(pp=8), TINY_D, 8)
    assert stage_layers(36, 4) == (9, 10, 9, 8)  # embedding and head count as a layer each
    assert sum(stage_layers(94, 16)) == 94


@pytest.mark.parametrize("value", [0, -2, 1.5, "2", None, True])
@pytest.mark.parametrize("name", ["tp", "dp_shard", "micro_batch", "seq_len"])
def test_a_degree_that_is_no_number_is_refused_alone(name, value):
    found = validate(ParallelPlan(**{name: value}), TINY_D, 8)
    assert [finding.rule for finding in found] == ["degree"] and repr(value) in found[0].message


def test_a_two_core_all_to_all_is_refused_on_trainium_only():
    assert "ep_group" in rules(ParallelPlan(ep=2), QWEN3_30B, TRN2)
    assert "ep_group" not in rules(ParallelPlan(ep=2), QWEN3_30B, 64)


def test_a_dense_mask_is_a_warning_with_its_memory():
    found = [
        f for f in validate(ParallelPlan(), QWEN3_8B, TRN2, Training(attention="masked")) if f.rule == "dense_mask"
    ]
    assert found[0].severity == "warning" and "32 MiB" in found[0].message  # 4096 * 4096 * 2 bytes


def test_groups_that_leave_chip_or_node_are_warned_of_with_their_bandwidth():
    assert (
        "256.0 GB/s over NeuronLink" in rules(ParallelPlan(tp=8), QWEN3_8B, TRN2)["crossing"]
        or "GB/s" in rules(ParallelPlan(tp=8), QWEN3_8B, TRN2)["crossing"]
    )
    assert "crossing" not in rules(ParallelPlan(tp=4), QWEN3_8B, TRN2)
    four = Cluster(instance("trn2.48xlarge"), 4)
    assert "over EFA" in rules(ParallelPlan(ep=128), QWEN3_30B, four)["crossing"]


def test_short_sequences_are_warned_of_the_slow_attention_path():
    assert "512" in rules(ParallelPlan(seq_len=256), QWEN3_8B, TRN2)["flash_length"]


def test_no_plan_of_the_grid_crashes_and_a_valid_one_has_a_memory():
    """4,000 plans drawn by seed, most of them nonsense."""
    draw = random.Random(8)
    degrees = [1] * 12 + [2, 2, 3, 4, 4, 5, 8, 16, 64]
    clusters = [1, 3, 8, 64, Cluster(instance("trn2.3xlarge")), TRN2, Cluster(instance("trn3-gen2-ultraserver"), 3)]
    valid = 0
    for _ in range(4000):
        shape = draw.choice([TINY_D, TINY_M, QWEN3_4B, QWEN3_8B, QWEN3_30B])
        cluster = draw.choice(clusters)
        layout = ParallelPlan(
            **{name: draw.choice(degrees) for name in ("dp_replicate", "cp", "tp", "pp", "ep")},
            dp_shard=draw.choice([-1] * 20 + degrees),
            sequence_parallel=draw.random() < 0.7,
            micro_batch=draw.randint(1, 3),
            global_batch=draw.choice([-1, -1, draw.randint(1, 64)]),
            seq_len=draw.choice([1, 63, 64, 512, 4096, 4096, 65536]),
        )
        training = Training(
            checkpointing=draw.choice(["none", "selective", "full"]),
            attention=draw.choice(["flash", "masked", "math"]),
            compute_bytes=draw.choice([2, 4]),
            loss_chunks=draw.choice([1, 1, 3, 8]),
            dispatcher=draw.choice(["gather", "capacity", "all-to-all"]),
            reshard=draw.choice(["default", "always", "never"]),
        )
        found = validate(layout, shape, cluster, training)
        assert all(finding.message and finding.severity in ("error", "warning") for finding in found)
        if not any(finding.severity == "error" for finding in found):
            valid += 1
            report = core_memory(
                layout.resolve(cluster if isinstance(cluster, int) else cluster.cores), shape, training
            )
            assert report.peak.bytes > 0 and min(report.peak.by_part().values()) >= 0
    assert valid > 50


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_number_of_loss_chunks_that_is_none_is_refused(value):
    found = errors(ParallelPlan(), QWEN3_8B, TRN2, Training(loss_chunks=value))
    assert [finding.rule for finding in found] == ["degree"] and f"loss_chunks is {value!r}" in found[0].message
