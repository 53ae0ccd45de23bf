"""Contract: a step's time is its work over the stated peak and links, and a pipeline's bubble."""

import pytest
from neuron_parallel.plan import Training
from neuron_parallel.step_time import step_time
from plan_shapes import QWEN3_8B, TRN2, plan


def test_a_step_is_the_work_over_the_stated_peak():
    layout = plan(64, tp=4)
    time = step_time(layout, QWEN3_8B, TRN2, Training(checkpointing="none"), efficiency=0.5)
    flops = 3 * QWEN3_8B.flops_per_token(4096) * 16 * 4096
    assert time.compute == pytest.approx(flops / (64 * 166.75e12 * 0.5))
    assert time.mfu == pytest.approx(flops / time.seconds / (64 * 166.75e12))
    assert sum(time.shares().values()) == pytest.approx(1)
    full = step_time(layout, QWEN3_8B, TRN2, Training(checkpointing="full"))
    assert full.compute == pytest.approx(time.compute * 4 / 3)


def test_a_pipeline_pays_its_bubble():
    layout = plan(64, pp=4, dp_shard=16, global_batch=128)
    time = step_time(layout, QWEN3_8B, TRN2, Training())
    busy = max(time.compute, time.memory, time.fsdp) + time.tp + time.cp + time.ep
    assert time.bubble == pytest.approx(busy * 3 / 8)


def test_only_a_causal_kernel_skips_half_of_the_scores():
    layout = plan(64, tp=4)
    flash, masked = (step_time(layout, QWEN3_8B, TRN2, Training(attention=name)) for name in ("flash", "masked"))
    skipped = 3.5 * 36 * 2 * 32 * 128 * 4096 * 16 * 4096  # selective: half a forward pass again
    assert masked.compute - flash.compute == pytest.approx(skipped / (64 * 166.75e12 * 0.5))
    assert masked.model_flops == flash.model_flops
