"""Bytes of one logical core, moment by moment through a training step, from formulas alone.

    report = memory(plan, shape, training)
    report.peak.bytes, report.peak.where
    print(report.peak.table())                  # every tensor group with its formula

The model is TorchTitan 0.3.0 with FSDP2 run eagerly: which tensors autograd keeps, which buffers FSDP2 holds, when each is freed. It
is compared with real runs on CPU (tests/integration/test_memory_model.py). What a compiler does on the device is unseen: graphs
usually need less, and their scratch is the one allowance here (`device_allowance`).

Constants of FSDP2: in forward, a layer's flat all-gather output lives on until the next layer is gathered, beside the copy it computes
with; in backward the previous layer's is prefetched; one reduce-scatter input is in flight; head and final norm stay gathered from
forward to backward; with tied weights, the embedding is the head. With pipeline parallel nothing is resharded before the step's end
and gradients are reduced once, after the last micro-batch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from neuron_parallel.blocks import Symbols, block, embedding, head_and_loss
from neuron_parallel.hardware import Cluster
from neuron_parallel.placement import unit_bytes
from neuron_parallel.plan import ParallelPlan, Training, stage_layers
from neuron_parallel.quantity import Quantity
from neuron_parallel.shape import ModelShape
from neuron_parallel.tape import Moment, Op, Sizes, kept_sizes, replay_backward, replay_forward

__all__ = ["PARTS", "Memory", "Snapshot", "device_allowance", "memory"]

PARTS = (
    "parameters",
    "gradients",
    "moments",
    "gathered parameters",
    "gradient buffers",
    "activations",
    "attention",
    "dispatch",
    "logits",
    "working",
    "tables",
)
"""Parts of a snapshot, in the order of the table."""

USABLE = 23.5e9
"""Bytes of a 24 GiB core at which out-of-memory was met (reports from the field)."""


def device_allowance(cluster: Cluster) -> float:
    """Bytes of a logical core that tensors cannot have: runtime, collectives and compiler scratch.

    24 GiB - 23.5e9 bytes, the share at which runs were seen to fail, as the same fraction of every core's memory.
    """
    return cluster.hbm_bytes * (1 - USABLE / (24 << 30))


@dataclass(frozen=True)
class Entry:
    """A tensor group that lives at a moment."""

    part: str
    name: str
    size: Quantity


@dataclass(frozen=True)
class Snapshot:
    """What lives on a core at one moment."""

    where: str
    entries: tuple[Entry, ...]

    @property
    def bytes(self) -> float:
        return sum(entry.size.value for entry in self.entries)

    def by_part(self) -> dict[str, float]:
        """Bytes by part, all PARTS in order."""
        sums = dict.fromkeys(PARTS, 0.0)
        for entry in self.entries:
            sums[entry.part] += entry.size.value
        return sums

    def table(self) -> str:
        """Part, tensors, formula and MiB, a line an entry."""
        rows = [(e.part, e.name, str(e.size), f"{e.size.value / (1 << 20):,.1f}") for e in self._ordered()]
        rows = [("part", "tensors", "formula", "MiB"), *rows, ("sum", "", "", f"{self.bytes / (1 << 20):,.1f}")]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]:>{widths[3]}}".rstrip()
            for row in rows
        )

    def _ordered(self) -> list[Entry]:
        return sorted((e for e in self.entries if e.size.value), key=lambda e: (PARTS.index(e.part), -e.size.value))


@dataclass(frozen=True)
class Memory:
    """The moments of a step on the pipeline stage that needs most, and what the symbols of their formulas stand for."""

    stage: int
    moments: tuple[Snapshot, ...]
    symbols: dict[str, float]

    @property
    def peak(self) -> Snapshot:
        """The largest moment."""
        return max(self.moments, key=lambda moment: moment.bytes)

    def largest(self, part: str) -> float:
        """The most bytes that `part` has at any moment."""
        return max(moment.by_part()[part] for moment in self.moments)


def memory(plan: ParallelPlan, shape: ModelShape, training: Training | None = None) -> Memory:
    """The memory of one core under a resolved plan (dp_shard and global_batch filled in).

    Sizes that do not divide evenly count as on the rank that holds most. Raises ValueError for an unresolved plan.
    """
    if plan.dp_shard < 1 or plan.global_batch < 1:
        raise ValueError(f"resolve the plan first: dp_shard {plan.dp_shard}, global_batch {plan.global_batch}")
    training = training or Training()
    stages = range(plan.pp) if plan.pp < 4 else (0, 1, plan.pp - 2, plan.pp - 1)
    return max((_stage(plan, shape, training, stage) for stage in stages), key=lambda m: m.peak.bytes)


@dataclass(frozen=True)
class _Unit:
    """A unit of FSDP: elements on this core and when gathered, for dense parameters and for experts."""

    name: str
    local: int
    dense: int
    experts: int
    dense_ranks: int
    expert_ranks: int
    expert_split: bool

    def gathered(self, a: Quantity) -> Quantity:
        return Quantity(self.dense + self.experts, f"P({self.name})") * a

    def flat(self, a: Quantity) -> Quantity:
        """All-gather output before it is copied out to the parameters: only where there is a group."""
        elements = (self.dense if self.dense_ranks > 1 else 0) + (self.experts if self.expert_ranks > 1 else 0)
        return Quantity(elements, f"P({self.name})") * a


@lru_cache(maxsize=4096)
def _unit(shape: ModelShape, plan: ParallelPlan, name: str, moe: bool) -> _Unit:
    dense_local, dense = unit_bytes(shape, plan, name, moe, experts=False)  # type: ignore[arg-type]
    expert_local, experts = unit_bytes(shape, plan, name, moe, experts=True)  # type: ignore[arg-type]
    expert_ranks = plan.efsdp if plan.ep > 1 else plan.fsdp
    return _Unit(name, dense_local + expert_local, dense, experts, plan.fsdp, expert_ranks, False)


@dataclass(frozen=True)
class _Layer:
    """What a decoder layer keeps and needs: results of its tape."""

    kept: Sizes
    """Between forward and backward."""
    parts: dict[str, str]
    forward: Moment
    recompute: Moment | None
    backward: Moment


@lru_cache(maxsize=4096)
def _layer(plan: ParallelPlan, shape: ModelShape, training: Training, moe: bool) -> _Layer:
    s = Symbols.of(plan, shape, training)
    ops = block(s, training, moe)
    x: Sizes = {"x": s.t * s.D * s.a}
    every = kept_sizes(ops, x)
    if training.checkpointing == "none":
        kept = every
    else:
        kept = dict(x)
        if training.checkpointing == "selective":
            kept |= {name: size for op in ops if op.selective for name, size in op.makes.items()}
    forward = replay_forward(ops, x, training.checkpointing == "none", ("y",))
    recompute = None
    if training.checkpointing != "none":
        extra = sum((size.value for name, size in kept.items() if name not in forward.live), 0.0)
        missing = {name: size for name, size in kept.items() if name not in forward.live}
        forward = Moment(forward.where, forward.bytes + extra, {**forward.live, **missing})
        recompute = replay_forward(ops, x, True, ("y",))
    return _Layer(kept, _parts(ops), forward, recompute, replay_backward(ops, x, "y"))


def _parts(ops: Iterable[Op]) -> dict[str, str]:
    return {name: op.part for op in ops for name in (*op.makes, *op.keeps_new)}


def _entries(moment: Moment, parts: dict[str, str], kept: Iterable[str]) -> list[Entry]:
    """A tape's moment: what is kept under its own part, parameter gradients as buffers, the rest as working memory."""
    kept = set(kept)
    found = []
    for name, size in moment.live.items():
        part = parts.get(name, "activations") if name in kept else "working"
        if name.startswith("parameter gradient"):
            part = "gradient buffers"
        elif name in parts and parts[name] == "logits" or "loss" in moment.where and name.startswith("scratch"):
            part = "logits"
        found.append(Entry(part, name, size))
    return found


def _stage(plan: ParallelPlan, shape: ModelShape, training: Training, stage: int) -> Memory:
    s = Symbols.of(plan, shape, training)
    first, last, piped = stage == 0, stage == plan.pp - 1, plan.pp > 1
    count = stage_layers(shape.num_hidden_layers, plan.pp)[stage]
    moe_count = round(count * shape.moe_layers / shape.num_hidden_layers) if shape.num_experts else 0
    moe = moe_count > 0
    kinds = [(True, moe_count), (False, count - moe_count)]
    layers = [(_unit(shape, plan, "layer", kind), _layer(plan, shape, training, kind), n) for kind, n in kinds if n]
    embed = _unit(shape, plan, "embedding", moe) if first and not shape.tie_word_embeddings else None
    head = _unit(shape, plan, "head", moe) if last else None
    a, p, r = s.a, Quantity(training.param_bytes, "p"), Quantity(training.reduce_bytes, "r")

    # parameters, gradients and moments of this core
    locals_ = [(u.name, u.local, n) for u, _, n in layers] + [(u.name, u.local, 1) for u in (embed, head) if u]

    def held(part: str, times: int = 1, skip: str = "", layers_done: int | None = None) -> list[Entry]:
        found = []
        for name, local, n in locals_:
            if name == skip:
                continue
            n = min(n, layers_done) if name == "layer" and layers_done is not None else n
            found.append(
                Entry(part, f"{n} x {name}" if n != 1 else name, times * n * Quantity(local, f"p({name})") * p)
            )
        return found

    base = held("parameters") + held("moments", 2)
    base.append(Entry("tables", "rope tables", count * s.S * 2 * s.K * 4))
    if moe:
        base.append(Entry("tables", "expert counts and biases", 2 * moe_count * s.E * 4))
    batches = plan.micro_batches if piped else 1
    in_flight = min(plan.pp - stage, plan.micro_batches) if piped else 1
    base.append(Entry("working", "tokens, positions, labels", 3 * batches * s.T * 8))
    if piped and not first:
        base.append(Entry("working", "received activations", batches * s.t * s.D * a))
    if training.attention == "masked":
        base.append(Entry("attention", "document mask", s.T * s.S))

    def kept(layers_kept: list[int], micro: int) -> list[Entry]:
        found = []
        for (_, layer, _), n in zip(layers, layers_kept, strict=True):
            for name, size in layer.kept.items():
                if n * micro:
                    found.append(Entry(layer.parts.get(name, "activations"), f"{n * micro} x {name}", n * micro * size))
        return found

    counts = [n for _, _, n in layers]
    before = kept(counts, in_flight - 1) if in_flight > 1 else []  # other micro-batches
    moments: list[Snapshot] = []
    tied = (
        [Entry("gathered parameters", "tied embedding", head.gathered(a))] if head and shape.tie_word_embeddings else []
    )
    stays = training.reshard == "never" or (training.reshard == "default" and piped)
    always = [Entry("gathered parameters", f"{n} x layer", n * u.gathered(a)) for u, _, n in layers] if stays else []
    if stays:
        always += [Entry("gathered parameters", u.name, u.gathered(a)) for u in (embed, head) if u]
    unreduced = []
    if piped and plan.micro_batches > 1:
        unreduced = [
            Entry("gradient buffers", f"unreduced gradients of {n} x {u.name}", n * u.gathered(r)) for u, _, n in layers
        ]
        unreduced += [
            Entry("gradient buffers", f"unreduced gradients of {u.name}", u.gathered(r)) for u in (embed, head) if u
        ]

    for index, (unit, layer, n) in enumerate(layers):
        rest = [m - (i == index) for i, m in enumerate(counts)]
        gathered = always or [Entry("gathered parameters", "layer", unit.gathered(a))]
        flat = [] if always else [Entry("gathered parameters", "layer, as gathered", unit.flat(a))]
        # forward of the last layer
        moments.append(
            Snapshot(
                f"forward of a layer: {layer.forward.where}",
                (
                    *base,
                    *before,
                    *kept(rest, 1),
                    *gathered,
                    *flat,
                    *tied,
                    *_entries(layer.forward, layer.parts, layer.kept),
                ),
            )
        )
        if head and not tied and not always:
            reducing = [Entry("gradient buffers", "reduce-scatter input of head", head.gathered(r))]
        else:
            reducing = []
        own = [Entry("gradient buffers", "reduce-scatter input of a layer", unit.gathered(r))] if not piped else []
        for where, left, done, buffers in (
            ("last", rest, 0, reducing),
            ("first", [0] * len(counts), max(0, n - 1), own if n > 1 else reducing),
        ):
            done_grads = [] if piped else _gradients(locals_, p, done, head, bool(tied), sum(counts))
            common = (*base, *before, *kept(left, 1), *gathered, *flat, *tied, *done_grads, *unreduced, *buffers)
            if layer.recompute:
                entries = (
                    *_entries(layer.recompute, layer.parts, layer.parts),
                    Entry("working", "gradient of y", s.t * s.D * a),
                )
                moments.append(
                    Snapshot(f"recomputation of the {where} layer: {layer.recompute.where}", (*common, *entries))
                )
            moments.append(
                Snapshot(
                    f"backward of the {where} layer: {layer.backward.where}",
                    (*common, *_entries(layer.backward, layer.parts, layer.parts)),
                )
            )
            after = [
                Entry("gradient buffers", "gradients of a layer", unit.gathered(a)),
                *(own or [Entry("gradient buffers", "reduce-scatter input of a layer", unit.gathered(r))]),
            ]
            moments.append(
                Snapshot(
                    f"reduction of the {where} layer's gradients",
                    (
                        *base,
                        *before,
                        *kept(left, 1),
                        *flat,
                        *always,
                        *tied,
                        *done_grads,
                        *unreduced,
                        *after,
                        Entry("working", "gradient of x", s.t * s.D * a),
                    ),
                )
            )
    if head:
        moments += _loss_moments(
            s, training, head, [*base, *before, *kept(counts, 1), *always, *unreduced], bool(always)
        )
    if embed or tied:
        moments.append(
            _embedding_moment(
                s,
                embed or head,
                base,
                before,
                tied,
                _gradients(locals_, p, None, head, bool(tied), 0) if not piped else [],
                unreduced,
                a,
                r,
            )
        )
    step = [*base, *held("gradients")]
    if training.optimizer == "foreach":
        step += [Entry("working", f"root of the second moments of {e.name}", e.size) for e in held("parameters")]
    moments.append(Snapshot("optimizer step", tuple(step)))
    letters = {name: getattr(s, name).value for name in "BSTtDKHGFVa"} | {"p": p.value, "r": r.value}
    if shape.num_experts:
        letters |= {name: getattr(s, name).value for name in "EkMmNRc"}
    for unit in [u for u, _, _ in layers] + [u for u in (embed, head) if u]:
        letters |= {f"p({unit.name})": unit.local, f"P({unit.name})": unit.dense + unit.experts}
    return Memory(stage, tuple(moments), letters)


def _gradients(
    locals_: list[tuple[str, int, int]], p: Quantity, done: int | None, head: _Unit | None, tied: bool, _: int
) -> list[Entry]:
    """Sharded gradients that exist when `done` layers (None: all) have been reduced; the head's come first unless tied."""
    found = []
    for name, local, n in locals_:
        if name == "embedding" or (name == "head" and tied):
            continue
        number = min(n, done) if name == "layer" and done is not None else n
        if number:
            found.append(
                Entry(
                    "gradients",
                    f"{number} x {name}" if number != 1 else name,
                    number * Quantity(local, f"p({name})") * p,
                )
            )
    return found


def _loss_moments(s: Symbols, training: Training, head: _Unit, common: list[Entry], gathered: bool) -> list[Snapshot]:
    """Head and loss: forward, backward."""
    ops = head_and_loss(s, training)
    given: Sizes = {"y": s.t * s.D * s.a}
    parts = _parts(ops)
    here = [] if gathered else [Entry("gathered parameters", "head", head.gathered(s.a))]
    forward = replay_forward(ops, given, True)
    backward = replay_backward(ops, given, "loss")
    return [
        Snapshot(f"loss: {forward.where}", (*common, *here, *_entries(forward, parts, parts))),
        Snapshot(f"loss: {backward.where}", (*common, *here, *_entries(backward, parts, parts))),
    ]


def _embedding_moment(
    s: Symbols,
    unit: _Unit | None,
    base: list[Entry],
    before: list[Entry],
    tied: list[Entry],
    gradients: list[Entry],
    unreduced: list[Entry],
    a: Quantity,
    r: Quantity,
) -> Snapshot:
    """The embedding's gradient is as large as its table, before and in the buffer that is reduced."""
    assert unit is not None
    ops = embedding(s)
    tape = replay_backward(ops, {}, "x")
    live = [e for e in _entries(tape, _parts(ops), ()) if not e.name.startswith("parameter")]
    buffers = [
        Entry("gradient buffers", f"gradient of {unit.name}", unit.gathered(a)),
        Entry("gradient buffers", f"reduce-scatter input of {unit.name}", unit.gathered(r)),
    ]
    return Snapshot(
        "reduction of the embedding's gradient", (*base, *before, *tied, *gradients, *unreduced, *buffers, *live)
    )
