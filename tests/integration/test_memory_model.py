"""Contract: the memory model is what TorchTitan does. Tensor bytes of real steps on gloo ranks, counted at dispatch, agree with the
formulas: every part within 5 %, the largest moment within 10 %.

Layouts are drawn by seed from the valid grid, dense and MoE, tied and untied, FSDP, HSDP, TP and EP, each checkpointing mode. Two run
here, the others in the soak. Differences below 16 KiB are left out: scalars and indices that the formulas do not list.
"""

import pytest
from neuron_parallel.memory import memory
from neuron_parallel.plan import ParallelPlan, Training
from ranks import run_ranks

from integration.memory_runs import DENSE, MOE, layouts, measure

CPU = {"selective_keeps_attention": False}
QUICK = {
    "dense, fsdp 2, selective": (
        ParallelPlan(seq_len=256).resolve(2),
        DENSE,
        Training(
            checkpointing="selective", attention="masked", compute_bytes=2, optimizer="fused", loss_chunks=4, **CPU
        ),
    ),
    "moe, tp 2 x ep 2, full": (
        ParallelPlan(tp=2, ep=2, seq_len=256).resolve(2),
        MOE,
        Training(checkpointing="full", compute_bytes=4, expert_bytes=4, **CPU),
    ),
}
SEEDS = (4, 5)
SMALL = 1 << 14


def check(layout, shape, training):
    runs = run_ranks(measure, layout.world, layout, shape, training, timeout=400)
    model = memory(layout, shape, training)
    real = runs[0]
    wrong = []
    for part in ("parameters", "gradients", "moments", "gathered parameters", "gradient buffers", "logits"):
        wrong += differs(part, model.largest(part), real[part], 0.05)
    for part in ("activations", "attention", "dispatch"):
        wrong += differs(f"kept {part}", model.kept.get(part, 0.0), real[f"kept {part}"], 0.05)
    wrong += differs("largest moment", model.peak.bytes, max(run["peak"] for run in runs), 0.10)
    assert not wrong, f"{layout}, {training}:\n" + "\n".join(wrong)


def differs(what, model, real, tolerance):
    if abs(model - real) <= max(tolerance * real, SMALL):
        return []
    return [f"{what}: the formulas say {model:,.0f} bytes, {real:,} were counted ({model / max(real, 1) - 1:+.1%})"]


@pytest.mark.parametrize("name", QUICK)
def test_the_bytes_of_a_real_step_are_those_of_the_formulas(name):
    check(*QUICK[name])


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("number", range(14))
def test_the_bytes_of_a_drawn_layout_are_those_of_the_formulas(seed, number):
    check(*layouts(seed, 14)[number])
