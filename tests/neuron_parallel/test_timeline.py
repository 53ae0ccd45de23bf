"""Contract: the moments of a step are those that a stage has, each the sum of what lives in it."""

from dataclasses import replace

import pytest
from neuron_parallel import Training
from neuron_parallel.memory.timeline import Timeline
from plan_shapes import QWEN3_8B, QWEN3_30B, plan


def moments(layout, shape, stage=0, **how):
    return {moment.where: moment for moment in Timeline(layout, shape, Training(**how), stage).in_order()}


@pytest.mark.parametrize(
    ("layout", "stage"), [(plan(64), 0), (plan(64, ep=8), 0), (plan(64, pp=4, dp_shard=16, global_batch=128), 2)]
)
def test_a_moment_is_as_large_as_the_tensors_that_it_lists(layout, stage):
    for moment in moments(layout, QWEN3_30B, stage).values():
        assert moment.bytes == moment.snapshot.bytes == sum(entry.bytes for entry in moment.snapshot.entries)


def test_each_moment_is_there_in_both_orders():
    for layout in (plan(64, tp=4), plan(64, pp=4, dp_shard=16, global_batch=128)):
        timeline = Timeline(layout, QWEN3_8B, Training(), 0)
        one, other = ([(m.where, m.bytes) for m in order()] for order in (timeline.in_order, timeline.largest_first))
        assert sorted(one) == sorted(other) and len(one) > 15


def test_the_middle_of_a_pipeline_has_neither_embedding_nor_loss():
    names = moments(plan(64, pp=4, dp_shard=16, global_batch=128), QWEN3_8B, stage=1)
    assert not any("embedding" in name or "loss" in name or "head" in name for name in names)
    assert "reducing a stage's sums: copy in" in names


def test_when_the_first_layer_goes_backward_all_others_have_gradients_of_either_kind():
    """Layers with and without experts: at one instant the other kind went backward as a whole."""
    mixed = replace(QWEN3_30B, dense_layers=12)
    layout = plan(64)
    by_part = moments(layout, mixed)[
        "end of the first layer's backward"
    ].snapshot.by_part()  # the last one listed: dense
    state = moments(layout, mixed)["optimizer step"].snapshot.by_part()
    dense_layer = moments(
        layout, replace(QWEN3_30B, num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0, num_hidden_layers=2)
    )
    one = dense_layer["end of the first layer's backward"].snapshot.by_part()["gradients"]
    head_alone = one - _layer_gradients(layout)
    without_first_and_embedding = state["gradients"] - _layer_gradients(layout) - (head_alone - 4 * 2048 / 64)
    assert by_part["gradients"] == pytest.approx(without_first_and_embedding, rel=1e-9)


def _layer_gradients(layout):
    """Bytes of one dense layer's gradients on a core."""
    sizes = {"num_experts": 0, "num_experts_per_tok": 0, "moe_intermediate_size": 0}
    one, two = (
        moments(layout, replace(QWEN3_30B, num_hidden_layers=n, **sizes))["optimizer step"].snapshot.by_part()[
            "gradients"
        ]
        for n in (1, 2)
    )
    return two - one


def test_a_stage_of_one_layer_has_no_layer_before_it_whose_flat_buffer_lives():
    layout = plan(64, pp=16, dp_shard=4, global_batch=128)
    timeline = Timeline(layout, QWEN3_8B, Training(), 15)
    assert [layer.number for layer in timeline.stage.layers] == [1]
    gathering = next(moment for moment in timeline.in_order() if moment.where == "gathering a layer")
    flat = [entry for entry in gathering.snapshot.entries if entry.name.endswith("as gathered")]
    assert [entry.name for entry in flat] == ["layer, as gathered"]
