"""Bytes of one logical core, moment by moment through a training step, from formulas alone.

    report = core_memory(plan, shape, training)
    report.peak.bytes, report.peak.where
    print(report.peak.table())                  # every tensor group with its formula

The model is TorchTitan 0.3.0 with FSDP2 run eagerly: which tensors autograd keeps, which buffers FSDP2 holds, when each
is freed. It is compared with real runs on CPU (tests/integration/test_memory_model.py). What a compiler does on the
device is unseen: graphs usually need less, and their scratch is the one allowance here (`device_allowance`).
"""

import math
from collections.abc import Iterable

from neuron_parallel.hardware import Cluster
from neuron_parallel.memory import activations
from neuron_parallel.memory.fsdp_units import fsdp_unit
from neuron_parallel.memory.snapshot import Memory
from neuron_parallel.memory.timeline import Timeline
from neuron_parallel.model import ModelShape
from neuron_parallel.plan import ParallelPlan, Training, stage_layers, stays_gathered

__all__ = ["ACCURACY", "core_memory", "device_allowance", "least_bytes", "peak_bytes"]

ACCURACY = 0.1
"""The share of the largest moment by which the formulas may be off (tests/integration/test_memory_model.py)."""
USABLE = 23.5e9
"""Bytes of a 24 GiB core at which out-of-memory was met (reports from the field)."""


def device_allowance(cluster: Cluster) -> float:
    """Bytes of a logical core that tensors cannot have: runtime, collectives and compiler scratch.

    24 GiB - 23.5e9 bytes, the share at which runs were seen to fail, as the same fraction of every core's memory.
    """
    return cluster.hbm_bytes * (1 - USABLE / (24 << 30))


def core_memory(
    plan: ParallelPlan, shape: ModelShape, training: Training | None = None, stage: int | None = None
) -> Memory:
    """The memory of one core, moment by moment.

    Sizes that do not divide evenly count as on the rank that holds most.

    Args:
        plan: a resolved plan: dp_shard and global_batch are filled in.
        shape: the model's sizes.
        training: checkpointing, dtypes, loss; None for the defaults.
        stage: a stage of the pipeline; None for the one that needs most.

    Returns:
        All moments of a step, in bytes of one logical core.

    Raises:
        ValueError: the plan is not resolved.
    """
    if plan.dp_shard < 1 or plan.global_batch < 1:
        raise ValueError(f"resolve the plan first: dp_shard {plan.dp_shard}, global_batch {plan.global_batch}")
    training = training or Training()
    stages = _stages(plan) if stage is None else (stage,)
    reports = (Timeline(plan, shape, training, stage).memory() for stage in stages)
    return max(reports, key=lambda report: report.peak.bytes)


def peak_bytes(plan: ParallelPlan, shape: ModelShape, training: Training, limit: float = math.inf) -> float:
    """`core_memory(...).peak.bytes` for less work, or infinity as soon as it is seen to be over `limit` bytes."""
    largest = 0.0
    for stage in _stages(plan):
        for moment in Timeline(plan, shape, training, stage).largest_first():
            largest = max(largest, moment.bytes)
            if largest > limit:
                return math.inf
    return largest


def _stages(plan: ParallelPlan) -> Iterable[int]:
    """Stages of which one needs most.

    The stages between the second and the last but one have fewer micro-batches in flight than the second, and as many
    layers.
    """
    return range(plan.pp) if plan.pp < 4 else (0, 1, plan.pp - 2, plan.pp - 1)


def least_bytes(plan: ParallelPlan, shape: ModelShape, training: Training) -> float:
    """A lower bound that costs little: what a stage's layers hold while the last or the first of them goes backward."""
    figures = zip(*(_least(plan, shape, training, moe) for moe in shape.kinds), strict=True)
    each, kept, gradient, working = (min(of_kinds) for of_kinds in figures)
    layers, batches = stage_layers(shape.num_hidden_layers, plan.pp), plan.micro_batches
    most = max(layers) * (each + gradient) + kept - gradient if plan.pp == 1 else 0.0
    for stage in _stages(plan):
        in_flight = min(plan.pp - stage, batches)
        if batches > in_flight:  # see Stage.passes
            held = gradient + in_flight * kept
        else:
            held = max(in_flight * kept, gradient + (in_flight - 1) * kept if in_flight > 1 else 0.0)
        most = max(most, layers[stage] * (each + held))
    return most + working


def _least(plan: ParallelPlan, shape: ModelShape, training: Training, moe: bool) -> tuple[float, float, float, float]:
    """Four sizes of one layer, in bytes.

    They are: what it holds through the backward pass; what it keeps of a micro-batch until it goes backward; the
    gradients that a micro-batch leaves; what it needs besides while it goes backward.
    """
    unit, kept = fsdp_unit(shape, plan, "layer", moe), activations.kept(plan, shape, training, moe).bytes
    whole = activations.kept(plan, shape, training.without_mode, moe).bytes
    held, gathered = unit.owned * training.param_bytes, unit.gathered * training.compute_bytes
    through = plan.pp > 1 and stays_gathered(plan, training)
    gradient = float(unit.gathered * training.reduce_bytes if plan.pp > 1 else held)
    return 3.0 * held + through * gathered, kept, gradient, whole - kept + (not through) * gathered
