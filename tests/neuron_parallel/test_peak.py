"""Contract: a core's bytes follow from formulas that can be read and worked out by hand, experts dividing by their own
axes.
"""

import math
import re

import pytest
from neuron_parallel import Training, core_memory
from neuron_parallel.memory import device_allowance
from neuron_parallel.parameters import parameters
from plan_shapes import QWEN3_4B, QWEN3_8B, QWEN3_30B, QWEN3_235B, TRN2, plan


def brute_force(layout, shape):
    """Elements that FSDP rank 0 holds, by dividing every tensor of the model as the axes do."""
    count = 0
    for row in parameters(shape):
        size = list(row.shape)
        if row.expert and layout.ep > 1:
            size[0] //= layout.ep
            ranks = layout.dp_shard * layout.cp * layout.tp // layout.ep
        else:
            if row.tp_dim is not None:
                size[row.tp_dim] //= layout.tp
            ranks = layout.dp_shard * layout.cp
        # whole experts unless more ranks than experts share them
        owners = ranks * layout.ep if layout.ep > 1 else ranks
        dim = 1 if row.expert and owners > shape.num_experts else 0
        size[dim] = math.ceil(size[dim] / ranks)
        count += math.prod(size) * (shape.num_hidden_layers if row.unit == "layer" else 1)
    return count


@pytest.mark.parametrize(
    ("shape", "degrees", "cores"),
    [
        (QWEN3_8B, {"tp": 4}, 64),
        (QWEN3_4B, {}, 64),
        (QWEN3_30B, {"ep": 8}, 64),
        (QWEN3_30B, {"tp": 2, "ep": 4}, 64),
        (QWEN3_30B, {"dp_replicate": 2, "cp": 2, "tp": 4, "ep": 16}, 256),
        (QWEN3_235B, {"tp": 4, "ep": 32}, 256),
        (QWEN3_235B, {"ep": 64}, 512),
        (QWEN3_30B, {}, 512),
    ],
)
def test_parameters_on_a_core_are_a_brute_force_count_of_local_shards(shape, degrees, cores):
    layout = plan(cores, **degrees)
    report = core_memory(layout, shape, Training(param_bytes=4))
    parts = report.peak.by_part()
    expected = brute_force(layout, shape)
    assert parts["parameters"] == 4 * expected
    assert parts["moments"] == 8 * expected
    assert report.largest("gradients") >= 4 * expected


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_every_figure_of_the_table_is_worked_out_from_its_printed_formula(mode):
    for shape, layout in ((QWEN3_8B, plan(64, tp=4)), (QWEN3_30B, plan(64, ep=8))):
        report = core_memory(layout, shape, Training(checkpointing=mode))
        for moment in report.moments:
            for entry in moment.entries:
                assert evaluate(str(entry.size), report.symbols) == pytest.approx(entry.size.value), (
                    moment.where,
                    entry,
                )
            assert moment.bytes == pytest.approx(sum(moment.by_part().values()))


def evaluate(formula, symbols):
    """The printed formula with the printed values; division rounds up."""
    tokens = re.findall(r"[Ppq]\([a-z ]+\)|[A-Za-z]\w*|\d+\.?\d*|[-+*/()]", formula)
    names = {f"v{i}": symbols[token] for i, token in enumerate(tokens) if token in symbols and not token.isdecimal()}
    text = " ".join(f"v{i}" if f"v{i}" in names else token for i, token in enumerate(tokens))
    return math.ceil(eval(text, {}, names))


def test_checkpointing_trades_kept_activations_for_time():
    layout = plan(64, tp=4)
    kept = {
        mode: sum(core_memory(layout, QWEN3_8B, Training(checkpointing=mode)).kept.values())
        for mode in ("none", "selective", "full")
    }
    assert kept["full"] < kept["selective"] / 2 < kept["none"] / 4


def test_a_chunked_loss_needs_its_share_of_the_logits():
    whole, parts = (core_memory(plan(64), QWEN3_8B, Training(loss_chunks=n)).largest("logits") for n in (1, 8))
    assert whole == pytest.approx(3 * 4096 * 151936 * 4, rel=1e-6)  # log-probabilities and two gradients in float32
    assert parts < whole / 5


def test_pipeline_stages_keep_the_micro_batches_in_flight():
    one, four = (
        core_memory(plan(64, pp=pp, dp_shard=64 // pp, global_batch=8 * 64 // pp), QWEN3_8B, Training()).peak.by_part()
        for pp in (1, 4)
    )
    assert four["activations"] > 0.8 * one["activations"]  # a quarter of the layers, four micro-batches
    assert four["parameters"] == pytest.approx(one["parameters"], rel=0.35)


def test_micro_batches_after_the_first_find_the_gradients_of_all_parameters():
    one, two = (core_memory(plan(64, tp=4, global_batch=16 * n), QWEN3_8B).peak.by_part() for n in (1, 2))
    assert one["gradients"] == 0
    assert two == one | {"gradients": one["parameters"]}


def test_from_its_second_micro_batch_on_a_pipelines_last_stage_has_its_gradients_unsharded():
    def at_the_loss(batches):
        layout = plan(8, pp=2, dp_shard=4, global_batch=4 * batches)
        moments = core_memory(layout, QWEN3_8B, Training(), stage=1).moments
        return next(m for m in moments if m.where == "loss: log-softmax backward").by_part()

    assert at_the_loss(1)["gradient buffers"] == 0
    parts = at_the_loss(2)
    assert parts["gradient buffers"] == 4 * parts["parameters"]  # FSDP over 4 ranks, both in float32
    assert parts["gathered parameters"] == 2 * parts["parameters"]  # all of the stage, in BF16


def test_the_allowance_is_what_separates_24_gib_from_where_runs_failed():
    assert device_allowance(TRN2) == pytest.approx(24 * (1 << 30) - 23.5e9)


def test_an_unresolved_plan_is_refused():
    from neuron_parallel import ParallelPlan

    with pytest.raises(ValueError, match="resolve"):
        core_memory(ParallelPlan(), QWEN3_8B)
