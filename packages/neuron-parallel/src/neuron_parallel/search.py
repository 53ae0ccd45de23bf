"""Which plans work, fit and are fast: ranked, with the reason for each rank.

result = suggest(shape, Cluster(instance("trn2.48xlarge")), fixed={"tp": 4})
for choice in result.choices[:10]: print(choice.plan, choice.reason)
result.cut                                     # when nothing fits: the largest part of the model that would
"""

import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import islice

from neuron_parallel.hardware import Cluster
from neuron_parallel.memory import ACCURACY, Memory, core_memory, device_allowance, least_bytes, peak_bytes
from neuron_parallel.model import ModelShape
from neuron_parallel.plan import ParallelPlan, Training, as_run, divisors, errors
from neuron_parallel.step_time import EFFICIENCY, StepTime, step_time

__all__ = ["FIXABLE", "MODES", "Choice", "Cut", "Suggestions", "suggest"]

FIXABLE = (
    "dp_replicate",
    "dp_shard",
    "cp",
    "tp",
    "pp",
    "ep",
    "micro_batch",
    "seq_len",
    "global_batch",
    "sequence_parallel",
)
MICRO_BATCHES = (1, 2, 4)
MODES = ("none", "selective", "full")
"""Checkpointing, fastest first."""


@dataclass(frozen=True)
class Choice:
    """A plan that works and fits."""

    plan: ParallelPlan
    training: Training
    peak: float
    """Bytes of a core at the largest moment."""
    time: StepTime
    reason: str
    shape: ModelShape = field(repr=False)
    tight: bool = False
    """It fits only if the memory model is better than its accuracy."""

    @cached_property
    def memory(self) -> Memory:
        """All moments, with their formulas."""
        return core_memory(self.plan, self.shape, self.training)


@dataclass(frozen=True)
class Cut:
    """The largest part of a model that fits, by its number of layers, and for experts with all layers."""

    layers: int
    experts: int | None
    needed: float
    """Bytes that the whole model needs at least on a core."""


@dataclass(frozen=True)
class Suggestions:
    """What `suggest` found."""

    choices: tuple[Choice, ...]
    considered: int
    """Valid layouts that were looked at."""
    cut: Cut | None


def suggest(
    shape: ModelShape,
    cluster: Cluster,
    fixed: Mapping[str, int] | None = None,
    training: Training | None = None,
    modes: tuple[str, ...] = MODES,
    efficiency: float = EFFICIENCY,
) -> Suggestions:
    """All layouts of the whole cluster that work and fit, each with its fastest micro-batch and checkpointing mode.

    The fastest comes first. Layouts that fit only within the model's error come after all others.

    `fixed` holds fields of ParallelPlan. Without a global batch every rank computes one micro-batch a step, with a
    pipeline two micro-batches a stage. Raises ValueError for an unknown field.
    """
    with _without_collector():
        return _suggest(shape, cluster, dict(fixed or {}), training or Training(), modes, efficiency)


def _suggest(
    shape: ModelShape,
    cluster: Cluster,
    fixed: Mapping[str, int],
    training: Training,
    modes: tuple[str, ...],
    efficiency: float,
) -> Suggestions:
    unknown = sorted(set(fixed) - set(FIXABLE))
    if unknown:
        raise ValueError(f"{', '.join(unknown)} cannot be held fixed; known: {', '.join(FIXABLE)}")
    hows = [replace(training, checkpointing=mode) for mode in MODES if mode in modes]  # type: ignore[arg-type]
    masked = [as_run(ParallelPlan(cp=2), how) for how in hows]
    room = cluster.hbm_bytes - device_allowance(cluster)
    layouts = list(_valid(shape, cluster, fixed, training))
    # Candidates by estimated time: memory, which costs more to work out, is looked at in that order. More checkpointing
    # is slower.
    queue: list[tuple[float, int, int, int, ParallelPlan, StepTime]] = []

    def enqueue(number: int, plan: ParallelPlan, mode: int) -> None:
        run = masked if plan.cp > 1 else hows
        while mode < len(run) and least_bytes(plan, shape, run[mode]) > room:
            mode += 1
        if mode < len(run):
            time = step_time(plan, shape, cluster, run[mode], efficiency)
            heappush(queue, (-time.tokens_per_second, number, plan.micro_batch, mode, plan, time))

    for number, layout in enumerate(layouts):
        for plan in _batches(layout, fixed):
            enqueue(number, plan, 0)
    found: dict[int, Choice] = {}
    tight: dict[int, tuple[ParallelPlan, Training, float, StepTime]] = {}
    while queue:
        _, number, _, mode, plan, time = heappop(queue)
        if number in found:
            continue
        how = (masked if plan.cp > 1 else hows)[mode]
        peak = peak_bytes(plan, shape, how, room)
        if peak * (1 + ACCURACY) <= room:
            found[number] = Choice(plan, how, peak, time, _reason(plan, time, found, cluster), shape)
            continue
        if peak <= room and number not in tight:
            tight[number] = plan, how, peak, time
        enqueue(number, plan, mode + 1)
    # A layout that fits only within the model's error comes after all that fit beyond it.
    for number, (plan, how, peak, time) in tight.items():
        if number not in found:
            reason = f"{_reason(plan, time, found, cluster)}; fits only within the model's error of {ACCURACY:.0%}"
            found[number] = Choice(plan, how, peak, time, reason.removeprefix("; "), shape, tight=True)
    cut = None if found or not layouts else _cut(shape, cluster, layouts, fixed, training, room)
    return Suggestions(tuple(found.values()), len(layouts), cut)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Formulas are some hundred thousand small objects, none of them in a cycle: looking for cycles takes as long as
    the search.

    They end in the oldest generation, unlooked at (freeze and unfreeze move them there), unless somebody keeps frozen
    objects.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _batches(layout: ParallelPlan, fixed: Mapping[str, int]) -> Iterator[ParallelPlan]:
    """The layout with each size of micro-batch that divides its global batch, the least first."""
    for size in (fixed["micro_batch"],) if "micro_batch" in fixed else MICRO_BATCHES:
        batch = _global_batch(fixed, size, layout.dp, layout.pp)
        if batch % (size * layout.dp) == 0:
            yield replace(layout, micro_batch=size, global_batch=batch)


def _global_batch(fixed: Mapping[str, int], micro_batch: int, dp: int, pp: int) -> int:
    batch = fixed.get("global_batch", -1)
    return micro_batch * dp * (2 * pp if pp > 1 else 1) if batch == -1 else batch


def _valid(shape: ModelShape, cluster: Cluster, fixed: Mapping[str, int], training: Training) -> Iterator[ParallelPlan]:
    """Every layout that breaks no rule."""
    cores = cluster.cores
    other = {name: value for name, value in fixed.items() if name in ("micro_batch", "seq_len", "sequence_parallel")}

    def degrees(name: str, of: int) -> tuple[int, ...]:
        if name in fixed and fixed[name] != -1:
            return (fixed[name],) if fixed[name] >= 1 and of % fixed[name] == 0 else ()
        return divisors(of)

    heads = math.gcd(shape.num_attention_heads, shape.num_key_value_heads)
    for tp in degrees("tp", cores):
        if heads % tp:
            continue
        for pp in degrees("pp", cores // tp):
            if pp > 1 and (shape.tie_word_embeddings or pp > shape.num_hidden_layers + 2):
                continue
            for cp in degrees("cp", cores // (tp * pp)):
                rest = cores // (tp * pp * cp)
                for replicas in degrees("dp_replicate", rest):
                    shard = rest // replicas
                    if fixed.get("dp_shard", -1) not in (-1, shard):
                        continue
                    for ep in (
                        degrees("ep", math.gcd(shape.num_experts, shard * cp * tp))
                        if shape.num_experts
                        else (fixed.get("ep", 1),)
                    ):
                        plan = ParallelPlan(
                            dp_replicate=replicas,
                            dp_shard=shard,
                            cp=cp,
                            tp=tp,
                            pp=pp,
                            ep=ep,
                            global_batch=_global_batch(fixed, fixed.get("micro_batch", 1), replicas * shard, pp),
                            **other,  # type: ignore[arg-type]
                        )
                        if not errors(plan, shape, cluster, training):
                            yield plan


def _reason(plan: ParallelPlan, time: StepTime, before: Mapping[int, Choice], cluster: Cluster) -> str:
    """What the step's time goes into, and how far it is behind the first."""
    parts = []
    strides = plan.strides()
    for cause, share in list(time.shares().items())[:3]:
        if share < 0.02:
            continue
        axis = {"replicas": "dp_replicate", "fsdp beyond compute": "fsdp"}.get(cause, cause)
        link = f" over {cluster.group_bandwidth(*strides[axis])[1]}" if axis in strides else ""
        parts.append(f"{cause} {share:.0%}{link}")
    first = next(iter(before.values())).time if before else time
    behind = 1 - time.tokens_per_second / first.tokens_per_second
    return ", ".join(parts) + (f"; {behind:.0%} behind the first" if behind >= 0.005 else "")


def _cut(
    shape: ModelShape,
    cluster: Cluster,
    layouts: list[ParallelPlan],
    fixed: Mapping[str, int],
    training: Training,
    room: float,
) -> Cut:
    """The most layers, and the most experts, with which the most frugal settings fit under some layout.

    Only the whole model's valid layouts can be a smaller one's: every rule about layers or experts asks more of fewer.
    """
    bare = replace(training, checkpointing="full")
    masked = as_run(ParallelPlan(cp=2), bare)

    def frugal(plan: ParallelPlan) -> Training:
        return masked if plan.cp > 1 else bare

    plans = [plan for layout in layouts for plan in islice(_batches(layout, fixed), 1)]
    smallest = min((plan.micro_batch for plan in plans), default=1)
    plans = [plan for plan in plans if plan.micro_batch == smallest]

    def candidates(part: ModelShape) -> list[tuple[float, int]]:
        """(lower bound, number) of each layout that has a layer, the embedding or the head for each stage; the least
        first.
        """
        possible = ((number, plan) for number, plan in enumerate(plans) if plan.pp <= part.num_hidden_layers + 2)
        return sorted((least_bytes(plan, part, frugal(plan)), number) for number, plan in possible)

    def fits(part: ModelShape) -> bool:
        for bound, number in candidates(part):
            if bound > room:
                break
            plan = plans[number]
            if peak_bytes(plan, part, frugal(plan), room) <= room and not errors(plan, part, cluster, frugal(plan)):
                return True
        return False

    def needed() -> float:
        best = math.inf
        for bound, number in candidates(shape):
            if bound > best:
                break
            best = min(best, peak_bytes(plans[number], shape, frugal(plans[number]), best))
        return best

    def most(sizes: list[ModelShape]) -> int:
        """How many of `sizes`, ascending, fit."""
        low, high = 0, len(sizes)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if fits(sizes[middle]) else (low, middle)
        return low

    by_layers = [replace(shape, num_hidden_layers=n, dense_layers=0) for n in range(1, shape.num_hidden_layers)]
    experts = None
    if shape.num_experts:
        numbers = [n for n in divisors(shape.num_experts)[:-1] if n >= shape.num_experts_per_tok]
        count = most([replace(shape, num_experts=n) for n in numbers])
        experts = numbers[count - 1] if count else 0
    return Cut(most(by_layers), experts, needed())
