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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from neuron_parallel.blocks import Symbols, block, embedding, head_and_loss
from neuron_parallel.hardware import Cluster
from neuron_parallel.placement import Unit, parameters, unit_numbers
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
    kept: dict[str, float]
    """Bytes by part that one micro-batch leaves between forward and backward."""

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
    # Stages between the second and the last but one have fewer micro-batches in flight than the second, and as many layers.
    stages = range(plan.pp) if plan.pp < 4 else (0, 1, plan.pp - 2, plan.pp - 1)
    return max((_Stage(plan, shape, training, stage).memory() for stage in stages), key=lambda m: m.peak.bytes)


@dataclass(frozen=True)
class _Unit:
    """A unit of FSDP. Elements on this core (`local`), and when gathered (padded): dense parameters, experts, its last parameter."""

    name: str
    local: int
    dense: int
    experts: int
    last: int
    dense_ranks: int
    expert_ranks: int

    def held(self, bytes_each: Quantity) -> Quantity:
        """On this core."""
        return Quantity(self.local, f"p({self.name})") * bytes_each

    def full(self, bytes_each: Quantity) -> Quantity:
        """Gathered."""
        return Quantity(self.dense + self.experts, f"P({self.name})") * bytes_each

    def flat(self, bytes_each: Quantity) -> Quantity:
        """All-gather output before it is copied out to the parameters: only where there is a group."""
        elements = (self.dense if self.dense_ranks > 1 else 0) + (self.experts if self.expert_ranks > 1 else 0)
        return Quantity(elements, f"P({self.name})") * bytes_each


@lru_cache(maxsize=8192)
def _unit(shape: ModelShape, plan: ParallelPlan, name: Unit, moe: bool) -> _Unit:
    rows = list(unit_numbers(parameters(shape, moe), plan, name))
    dense = sum(gathered for row, _, gathered in rows if not row.expert)
    experts = sum(gathered for row, _, gathered in rows if row.expert)
    expert_ranks = plan.efsdp if plan.ep > 1 else plan.fsdp
    local = sum(local for _, local, _ in rows)
    return _Unit(name, local, dense, experts, rows[-1][2] if rows else 0, plan.fsdp, expert_ranks)


@dataclass(frozen=True)
class _Layer:
    """What a decoder layer keeps and needs: results of its tape."""

    kept: Sizes
    """Between forward and backward."""
    parts: dict[str, str]
    forward: Moment
    recompute: Moment | None
    backward: Moment


def _layer(plan: ParallelPlan, shape: ModelShape, training: Training, moe: bool) -> _Layer:
    """The tape's results, which do not depend on what the cores are many of."""
    same = replace(plan, dp_replicate=1, dp_shard=plan.ep, pp=1, global_batch=-1)
    return _layer_of(same, shape, training, moe)


@lru_cache(maxsize=4096)
def _layer_of(plan: ParallelPlan, shape: ModelShape, training: Training, moe: bool) -> _Layer:
    s = Symbols.of(plan, shape, training)
    ops = block(s, training, moe)
    x: Sizes = {"x": s.t * s.D * s.a}
    if training.checkpointing == "none":
        kept = kept_sizes(ops, x)
        return _Layer(kept, _parts(ops), replay_forward(ops, x, True, ("y",)), None, replay_backward(ops, x, "y"))
    kept = dict(x)
    if training.checkpointing == "selective":
        kept |= {name: size for op in ops if op.selective for name, size in op.makes.items()}
    forward = replay_forward(ops, x, False, ("y",))
    missing = {name: size for name, size in kept.items() if name not in forward.live}
    saved = sum(size.value for size in missing.values())
    forward = Moment(forward.where, forward.bytes + saved, {**forward.live, **missing})
    return _Layer(kept, _parts(ops), forward, replay_forward(ops, x, True, ("y",)), replay_backward(ops, x, "y"))


def _parts(ops: Iterable[Op]) -> dict[str, str]:
    return {name: op.part for op in ops for name in (*op.makes, *op.keeps_new)}


def _entries(moment: Moment, parts: dict[str, str], kept: Iterable[str]) -> list[Entry]:
    """A tape's moment: what is kept under its own part, parameter gradients as buffers, logits' sizes as such, the rest as working
    memory."""
    kept = set(kept)
    found = []
    for name, size in moment.live.items():
        owner = name.removeprefix("gradient of ")
        if name.startswith("parameter gradient"):
            part = "gradient buffers"
        elif parts.get(owner) == "logits" or name.startswith("scratch of loss"):
            part = "logits"
        else:
            part = parts.get(name, "activations") if name in kept else "working"
        found.append(Entry(part, name, size))
    return found


class _Stage:
    """One core of a pipeline stage (of the only one, without pipeline)."""

    def __init__(self, plan: ParallelPlan, shape: ModelShape, training: Training, stage: int) -> None:
        self.plan, self.shape, self.training, self.stage = plan, shape, training, stage
        self.s = Symbols.of(plan, shape, training)
        self.piped = plan.pp > 1
        self.p, self.r = Quantity(training.param_bytes, "p"), Quantity(training.reduce_bytes, "r")
        self.tied = shape.tie_word_embeddings
        count = stage_layers(shape.num_hidden_layers, plan.pp)[stage]
        self.moe_layers = round(count * shape.moe_layers / shape.num_hidden_layers)
        numbers = {True: self.moe_layers, False: count - self.moe_layers}
        self.layers = [
            (_unit(shape, plan, "layer", moe), _layer(plan, shape, training, moe), n) for moe, n in numbers.items() if n
        ]
        self.counts = [n for _, _, n in self.layers]
        first, last = stage == 0, stage == plan.pp - 1
        self.embedding = _unit(shape, plan, "embedding", False) if first and not self.tied else None
        self.head = _unit(shape, plan, "head", False) if last else None
        self.ends = [unit for unit in (self.embedding, self.head) if unit]
        self.units = [(unit, n) for unit, _, n in self.layers] + [(unit, 1) for unit in self.ends]
        # Parameters that stay gathered from first use to the step's end.
        self.stays = training.reshard == "never" or (training.reshard == "default" and self.piped)
        self.always: list[Entry] = []
        if self.stays:
            self.always = [_times(n, "gathered parameters", unit.name, unit.full(self.s.a)) for unit, n in self.units]
        elif self.tied and self.head:
            self.always = [Entry("gathered parameters", "tied embedding", self.head.full(self.s.a))]
        self.base = self._base()

    def memory(self) -> Memory:
        moments = [*self._forward(), *self._loss(), *self._backward(), *self._embedding(), self._optimizer()]
        return Memory(self.stage, tuple(moments), self._letters(), self._kept_by_part())

    def _base(self) -> list[Entry]:
        """What lives all the time, and with it the activations of other micro-batches in flight."""
        s, plan = self.s, self.plan
        found = [_times(n, "parameters", unit.name, unit.held(self.p)) for unit, n in self.units]
        found += [_times(2 * n, "moments", unit.name, unit.held(self.p)) for unit, n in self.units]
        found.append(Entry("tables", "rope tables", sum(self.counts) * s.S * 2 * s.K * 4))
        if self.moe_layers:
            found.append(Entry("tables", "expert counts and biases", 2 * self.moe_layers * s.E * 4))
        batches = plan.micro_batches if self.piped else 1
        found.append(Entry("working", "tokens, positions, labels", 3 * batches * s.T * 8))
        if self.piped and self.stage:
            found.append(Entry("working", "received activations", batches * s.t * s.D * s.a))
        if self.training.attention == "masked":
            found.append(Entry("attention", "document mask", s.T * s.S))
        if self.piped and plan.micro_batches > 1:
            found += [
                _times(n, "gradient buffers", f"unreduced gradients of {u.name}", u.full(self.r)) for u, n in self.units
            ]
        in_flight = min(plan.pp - self.stage, plan.micro_batches)
        if in_flight > 1:
            found += self._kept([n * (in_flight - 1) for n in self.counts])
        return found

    def _kept(self, layers: list[int]) -> list[Entry]:
        """Between forward and backward, for so many layers of each kind."""
        return [
            _times(n, layer.parts.get(name, "activations"), name, size)
            for (_, layer, _), n in zip(self.layers, layers, strict=True)
            if n
            for name, size in layer.kept.items()
        ]

    def _gathered(self, unit: _Unit, copies: int = 1, flats: int = 1) -> list[Entry]:
        """A unit's parameters while it computes, and flat buffers as large."""
        if self.stays or (self.tied and unit is self.head):
            return []
        found = [Entry("gathered parameters", unit.name, copies * unit.full(self.s.a))]
        return found + [Entry("gathered parameters", f"{unit.name}, as gathered", flats * unit.flat(self.s.a))]

    def _forward(self) -> Iterator[Snapshot]:
        for index, (unit, layer, _) in enumerate(self.layers):
            before = self._kept([n - (i == index) for i, n in enumerate(self.counts)])
            common = (*self.base, *self.always, *before)
            x = Entry("activations", "x", self.s.t * self.s.D * self.s.a)
            yield Snapshot("gathering a layer", (*common, x, *self._gathered(unit, 1, 2)))
            entries = _entries(layer.forward, layer.parts, layer.kept)
            yield Snapshot(f"forward of a layer: {layer.forward.where}", (*common, *self._gathered(unit), *entries))

    def _loss(self) -> Iterator[Snapshot]:
        if not self.head:
            return
        ops = head_and_loss(self.s, self.training)
        given: Sizes = {"y": self.s.t * self.s.D * self.s.a}
        parts = _parts(ops)
        common = (*self.base, *self.always, *self._kept(self.counts))
        if self.layers:
            before = [] if self.stays else self._gathered(self.layers[0][0], 0, 1)
            y = Entry("activations", "y", given["y"])
            yield Snapshot("gathering the head", (*common, y, *before, *self._gathered(self.head)))
        for moment in (replay_forward(ops, given, True), replay_backward(ops, given, "loss")):
            entries = _entries(moment, parts, parts)
            yield Snapshot(f"loss: {moment.where}", (*common, *self._gathered(self.head, flats=0), *entries))
        if not self.piped and not self.tied:
            flat = self._gathered(self.layers[0][0], 0, 1) if self.layers else []
            y = Entry("working", "gradient of y", given["y"])
            yield from self._reduction(self.head, "the head", [*common, *flat, y])

    def _backward(self) -> Iterator[Snapshot]:
        s = self.s
        for index, (unit, layer, n) in enumerate(self.layers):
            rest = [m - (i == index) for i, m in enumerate(self.counts)]
            reducing = self.head if self.head and not self.tied and not self.piped else None
            own = unit if not self.piped else None
            for which, left, done, buffer in (
                ("last", rest, 0, reducing),
                ("first", [0] * len(rest), max(0, n - 1), own if n > 1 else reducing),
            ):
                common = [*self.base, *self.always, *self._kept(left), *self._gradients(done)]
                computing = [*common, *self._gathered(unit)]
                if buffer:
                    computing.append(_reducing(buffer, self.r))
                if layer.recompute:
                    entries = _entries(layer.recompute, layer.parts, layer.parts)
                    gradient = Entry("working", "gradient of y", s.t * s.D * s.a)
                    where = f"recomputation of the {which} layer: {layer.recompute.where}"
                    yield Snapshot(where, (*computing, *entries, gradient))
                entries = _entries(layer.backward, layer.parts, layer.parts)
                yield Snapshot(f"backward of the {which} layer: {layer.backward.where}", (*computing, *entries))
                gradient = Entry("working", "gradient of x", s.t * s.D * s.a)
                grads = Entry("gradient buffers", "gradients of a layer", unit.full(s.a))
                yield Snapshot(f"end of the {which} layer's backward", (*computing, gradient, grads))
                flat = [] if self.stays else self._gathered(unit, 0, 1)
                yield from self._reduction(unit, f"the {which} layer", [*common, *flat, gradient])

    def _reduction(self, unit: _Unit, which: str, common: list[Entry]) -> Iterator[Snapshot]:
        """FSDP's post-backward: gradients copied into the reduce-scatter's input, then its output beside it."""
        a, r = self.s.a, self.r
        grads = Entry("gradient buffers", f"gradients of {unit.name}", unit.full(a))
        yield Snapshot(f"reducing {which}: copy in", (*common, grads, _reducing(unit, r)))
        out = Entry("gradient buffers", f"reduced gradients of {unit.name}", unit.held(r))
        if unit.dense_ranks == 1:  # no collective: a copy, divided
            other = Entry("gradient buffers", f"divided gradients of {unit.name}", unit.full(r))
        else:  # the last parameter's gradient is still referred to
            other = Entry(
                "gradient buffers", f"gradient of the last of {unit.name}", Quantity(unit.last, "P(last)") * a
            )
        yield Snapshot(f"reducing {which}: reduce-scatter", (*common, other, out, _reducing(unit, r)))

    def _embedding(self) -> Iterator[Snapshot]:
        unit = self.embedding or (self.head if self.tied else None)
        if not unit:
            return
        ops = embedding(self.s)
        tape = replay_backward(ops, {}, "x")
        live = [e for e in _entries(tape, _parts(ops), ()) if not e.name.startswith("parameter")]
        always = self.always if self.stays else []
        yield from self._reduction(unit, "the embedding", [*self.base, *always, *self._gradients(None), *live])

    def _gradients(self, done: int | None) -> list[Entry]:
        """Sharded gradients when `done` layers of each kind (None: all) are reduced; the head's come first, tied ones last."""
        if self.piped:
            return []
        numbers = [(unit, n if done is None else min(n, done)) for unit, _, n in self.layers]
        if self.head and not self.tied:
            numbers.append((self.head, 1))
        return [_times(n, "gradients", unit.name, unit.held(self.p)) for unit, n in numbers if n]

    def _optimizer(self) -> Snapshot:
        still = ("gradient buffers", "working") if self.piped else ("working",)
        base = [entry for entry in self.base if entry.part not in still]
        base += [_times(n, "gradients", unit.name, unit.held(self.p)) for unit, n in self.units]
        if self.training.optimizer == "foreach":
            base += [
                _times(n, "working", f"roots of {unit.name}'s second moments", unit.held(self.p))
                for unit, n in self.units
            ]
        return Snapshot("optimizer step", tuple(base))

    def _kept_by_part(self) -> dict[str, float]:
        entries = self._kept(self.counts)
        if self.head:
            ops = head_and_loss(self.s, self.training)
            parts = _parts(ops)
            sizes = kept_sizes(ops, {"y": self.s.t * self.s.D * self.s.a})
            entries += [Entry(parts.get(name, "activations"), name, size) for name, size in sizes.items()]
        if self.training.attention == "masked" and self.training.checkpointing != "none":
            entries.append(Entry("attention", "document mask", self.s.T * self.s.S))
        sums: dict[str, float] = {}
        for entry in entries:
            sums[entry.part] = sums.get(entry.part, 0.0) + entry.size.value
        return sums

    def _letters(self) -> dict[str, float]:
        names = "BSTtDKHGFVa" + ("EkMmNRc" if self.shape.num_experts else "")
        letters = {name: getattr(self.s, name).value for name in names} | {"p": self.p.value, "r": self.r.value}
        for unit, _ in self.units:
            letters |= {f"p({unit.name})": unit.local, f"P({unit.name})": unit.dense + unit.experts}
        return letters


def _times(n: int, part: str, name: str, size: Quantity) -> Entry:
    return Entry(part, f"{n} x {name}" if n != 1 else name, n * size)


def _reducing(unit: _Unit, r: Quantity) -> Entry:
    return Entry("gradient buffers", f"reduce-scatter input of {unit.name}", unit.full(r))
