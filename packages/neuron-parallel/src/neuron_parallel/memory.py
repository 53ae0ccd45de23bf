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
from functools import cached_property, lru_cache

from neuron_parallel.blocks import Symbols, before_head, block, embedding, head_and_loss
from neuron_parallel.hardware import Cluster
from neuron_parallel.plan import ParallelPlan, Training, stage_layers
from neuron_parallel.quantity import Quantity
from neuron_parallel.shape import ModelShape
from neuron_parallel.tape import Op, Sizes, kept_sizes, replay_backward, replay_forward
from neuron_parallel.units import Unit, fsdp_unit

__all__ = ["PARTS", "Memory", "Snapshot", "device_allowance", "least_bytes", "memory"]

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


class _Group:
    """Entries that come together, so often that their sum is kept with them."""

    __slots__ = ("bytes", "entries")

    def __init__(self, *entries: Entry) -> None:
        self.entries = entries
        self.bytes = sum(entry.size.value for entry in entries)


_Terms = list[tuple[int, _Group]]
"""So many times each group."""


@dataclass(frozen=True)
class Snapshot:
    """What lives on a core at one moment."""

    where: str
    terms: tuple[tuple[int, _Group], ...]

    @property
    def bytes(self) -> float:
        return sum(times * group.bytes for times, group in self.terms)

    @property
    def entries(self) -> list[Entry]:
        """Every tensor group, with its formula."""
        return [
            entry if times == 1 else Entry(entry.part, f"{times} x {entry.name}", times * entry.size)
            for times, group in self.terms
            if times
            for entry in group.entries
        ]

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

    @cached_property
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


def least_bytes(plan: ParallelPlan, shape: ModelShape, training: Training) -> float:
    """A lower bound that costs little: parameters and moments, and what all layers of the first stage keep."""
    moe = shape.num_experts > 0
    layers = min(stage_layers(shape.num_hidden_layers, plan.pp))
    in_flight = min(plan.pp, plan.micro_batches)
    kept = _layer(plan, shape, training, moe).kept.bytes
    if shape.dense_layers:
        kept = min(kept, _layer(plan, shape, training, False).kept.bytes)
        moe = False
    return layers * (3.0 * fsdp_unit(shape, plan, "layer", moe).owned * training.param_bytes + in_flight * kept)


@dataclass(frozen=True)
class _Layer:
    """What a decoder layer keeps and needs: results of its tape."""

    kept: _Group
    """Between forward and backward."""
    forward: _Group
    forward_at: str
    recompute: _Group | None
    recompute_at: str
    backward: _Group
    backward_at: str


def _layer(plan: ParallelPlan, shape: ModelShape, training: Training, moe: bool) -> _Layer:
    """The tape's results, which do not depend on how many data-parallel ranks there are."""
    return _layer_of(_without_dp(plan), shape, training, moe)


def _without_dp(plan: ParallelPlan) -> ParallelPlan:
    return replace(plan, dp_replicate=1, dp_shard=plan.ep, pp=1, global_batch=-1)


@lru_cache(maxsize=4096)
def _layer_of(plan: ParallelPlan, shape: ModelShape, training: Training, moe: bool) -> _Layer:
    s = Symbols.of(plan, shape, training)
    ops = block(s, training, moe)
    x: Sizes = {"x": s.t * s.D * s.a}
    parts = _parts(ops)
    none = training.checkpointing == "none"
    kept = kept_sizes(ops, x) if none else dict(x)
    if training.checkpointing in ("selective", "linears"):
        saved = [op for op in ops if op.selective or (op.linear and training.checkpointing == "linears")]
        kept |= {name: size for op in saved for name, size in op.makes.items()}
    forward = replay_forward(ops, x, none, ("y",))
    live = {**kept, **forward.live} if not none else forward.live
    backward = replay_backward(ops, x, "y")
    recompute = None if none else replay_forward(ops, x, True, ("y",))
    return _Layer(
        kept=_Group(*(Entry(parts.get(name, "activations"), name, size) for name, size in kept.items())),
        forward=_named(live, parts, kept),
        forward_at=forward.where,
        recompute=_named(recompute.live, parts, parts) if recompute else None,
        recompute_at=recompute.where if recompute else "",
        backward=_named(backward.live, parts, {*parts, "x"}),
        backward_at=backward.where,
    )


@dataclass(frozen=True)
class _Loss:
    """What final norm, head and loss keep and need: results of their tapes."""

    kept: _Group
    """By the final norm and for the head, beside the logits."""
    moments: tuple[tuple[str, _Group], ...]
    after_forward: _Group
    """What the model's own forward pass keeps: a chunked loss has not begun then."""


@lru_cache(maxsize=1024)
def _loss_of(plan: ParallelPlan, shape: ModelShape, training: Training) -> _Loss:
    s = Symbols.of(plan, shape, training)
    before, ops = before_head(s, training), head_and_loss(s, training)
    parts = _parts(ops)
    kept = kept_sizes(before, {"y": s.t * s.D * s.a})
    logits = {} if training.loss_chunks > 1 else kept_sizes(ops, {})

    def group(sizes: Sizes) -> _Group:
        return _Group(*(Entry(parts.get(name, "activations"), name, size) for name, size in sizes.items()))

    logits_alone = {"logits": ops[0].makes["logits"]}
    still = replace(ops[1], keeps=(*ops[1].keeps, *ops[0].keeps))
    moments = (
        replay_forward(ops, {}, True),
        replay_backward([still, *ops[2:]], logits_alone, "loss"),
        replay_backward(ops, {}, "loss"),
    )
    return _Loss(
        kept=group(kept),
        moments=tuple((moment.where, _named(moment.live, parts, parts)) for moment in moments),
        after_forward=group({name: size for name, size in (kept | logits).items() if "chunks" not in name}),
    )


def _parts(ops: Iterable[Op]) -> dict[str, str]:
    return {name: op.part for op in ops for name in (*op.makes, *op.keeps_new)}


def _named(live: Sizes, parts: dict[str, str], kept: Iterable[str]) -> _Group:
    """A tape's moment: what is kept under its own part, parameter gradients as buffers, logits' sizes as such, the rest as working
    memory."""
    kept = set(kept)
    found = []
    for name, size in live.items():
        if name.startswith("parameter gradient"):
            part = "gradient buffers"
        elif parts.get(name.removeprefix("gradient of ")) == "logits" or name.startswith("scratch of loss"):
            part = "logits"
        else:
            part = parts.get(name, "activations") if name in kept else "working"
        found.append(Entry(part, name, size))
    return _Group(*found)


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
            (fsdp_unit(shape, plan, "layer", moe), _layer(plan, shape, training, moe), n)
            for moe, n in numbers.items()
            if n
        ]
        self.counts = [n for _, _, n in self.layers]
        first, last = stage == 0, stage == plan.pp - 1
        self.embedding = fsdp_unit(shape, plan, "embedding", False) if first and not self.tied else None
        self.head = fsdp_unit(shape, plan, "head", False) if last else None
        self.units = [(unit, n) for unit, _, n in self.layers]
        self.units += [(unit, 1) for unit in (self.embedding, self.head) if unit]
        # Parameters that stay gathered from first use to the step's end.
        self.stays = training.reshard == "never" or (training.reshard == "default" and self.piped)
        # With tied weights the table stays gathered from the embedding's forward to its backward.
        self.shared = self._gathered(self.head, 1, 0) if self.tied and self.head else []
        self.x = _Group(Entry("working", "gradient of x", self.s.t * self.s.D * self.s.a))
        self.base = self._base()

    def memory(self) -> Memory:
        moments = [*self._forward(), *self._loss(), *self._backward(), *self._embedding(), self._optimizer()]
        return Memory(self.stage, tuple(moments), self._letters(), self._kept_by_part())

    def _base(self) -> _Terms:
        """What lives all the time, and with it the activations of other micro-batches in flight."""
        s, plan = self.s, self.plan
        found: _Terms = []
        for unit, n in self.units:
            found += [(n, _Group(Entry("parameters", unit.name, unit.held(self.p))))]
            found += [(2 * n, _Group(Entry("moments", unit.name, unit.held(self.p))))]
        always = [Entry("tables", "rope tables", sum(self.counts) * s.S * 2 * s.K * 4)]
        if self.moe_layers:
            always.append(Entry("tables", "expert counts and biases", 2 * self.moe_layers * s.E * 4))
        batches = plan.micro_batches if self.piped else 1
        always.append(Entry("working", "tokens, positions, labels", 3 * batches * s.T * 8))
        if self.stage:
            always.append(Entry("working", "received activations", batches * s.t * s.D * s.a))
        else:
            always += [Entry("activations", name, size) for name, size in kept_sizes(embedding(s), {}).items()]
        if self.training.attention == "masked":
            always.append(Entry("attention", "document mask", s.T * s.S))
        found.append((1, _Group(*always)))
        for unit, n in self.units:
            for part in unit.parts:
                if self.piped and plan.micro_batches > 1:
                    found.append(
                        (n, _Group(Entry("gradient buffers", f"unreduced gradients of {part.name}", part.full(self.r))))
                    )
                if self.stays:
                    found.append((n, _Group(Entry("gathered parameters", part.name, part.full(s.a)))))
        in_flight = min(plan.pp - self.stage, plan.micro_batches)
        return found + self._kept([n * (in_flight - 1) for n in self.counts])

    def _kept(self, numbers: list[int]) -> _Terms:
        """Between forward and backward, for so many layers of each kind."""
        return [(n, layer.kept) for (_, layer, _), n in zip(self.layers, numbers, strict=True) if n]

    def _gathered(self, unit: Unit, copies: int = 1, flats: int = 1) -> _Terms:
        """A unit's parameters while it computes, and flat buffers as large."""
        a = self.s.a
        found: _Terms = []
        for part in unit.parts:
            if not self.stays:
                found.append((copies, _Group(Entry("gathered parameters", part.name, part.full(a)))))
            if part.ranks > 1:
                found.append((flats, _Group(Entry("gathered parameters", f"{part.name}, as gathered", part.flat(a)))))
        return found

    def _previous(self, unit: Unit) -> _Terms:
        """The flat buffer of a unit's last gather, which lives until the next one."""
        part = unit.parts[-1]
        return [(1, _Group(Entry("gathered parameters", f"{part.name}, as gathered", part.flat(self.s.a))))]

    def _copied(self, unit: Unit) -> _Terms:
        """Beside a unit that is being gathered: experts that are divided by another dimension than the first, once more; without a
        group, the cast of the last parameter."""
        a = self.s.a
        found = [(1, _Group(Entry("gathered parameters", f"split {part.name}", part.splits(a)))) for part in unit.parts]
        if a.value != self.p.value:
            found += [
                (1, _Group(Entry("gathered parameters", f"cast of the last of {part.name}", part.lasts(a))))
                for part in unit.parts
                if part.ranks == 1
            ]
        return found

    def _ahead(self, unit: Unit) -> _Terms:
        """A unit whose gather has begun: its flat buffers, and the cast of this core's share."""
        found = self._gathered(unit, 0, 1)
        if self.s.a.value != self.p.value:
            found += [
                (1, _Group(Entry("gathered parameters", f"cast of {part.name}", part.reduced(self.s.a))))
                for part in unit.parts
                if part.ranks > 1
            ]
        return found

    def _forward(self) -> Iterator[Snapshot]:
        x = (1, _Group(Entry("activations", "x", self.s.t * self.s.D * self.s.a)))
        ahead = int(self.plan.ep > 1)  # with experts apart, TorchTitan gathers the next layer ahead
        for index, (unit, layer, n) in enumerate(self.layers):
            before = self._kept([m - (i == index) for i, m in enumerate(self.counts)])
            common = (*self.base, *self.shared, *before)
            yield Snapshot(
                "gathering a layer", (*common, x, *self._previous(unit), *self._gathered(unit), *self._copied(unit))
            )
            first = self.head if self.tied else self.embedding
            if first and not self.stays:
                flat = self._previous(first)
                yield Snapshot(
                    "gathering the first layer",
                    (*self.base, *self.shared, x, *flat, *self._gathered(unit), *self._copied(unit)),
                )
            if ahead and first and not self.stays:
                yield Snapshot(
                    "gathering ahead", (*self.base, *self.shared, *self._gathered(first), *self._ahead(unit))
                )
            if ahead and self.head and not self.tied:
                terms = (*self._gathered(unit, 1, 0), *self._previous(unit), *self._ahead(self.head))
                yield Snapshot("gathering the head ahead", (*common, x, *terms))
            computing = (*self._gathered(unit, 1, ahead if n > 1 else 0), *self._previous(unit), (1, layer.forward))
            yield Snapshot(f"forward of a layer: {layer.forward_at}", (*common, *computing))

    def _loss(self) -> Iterator[Snapshot]:
        if not self.head:
            return
        loss = _loss_of(_without_dp(self.plan), self.shape, self.training)
        common: _Terms = [*self.base, *self._kept(self.counts)]
        flat = self._previous(self.layers[0][0]) if self.layers else []
        y = self.s.t * self.s.D * self.s.a
        if not self.tied:
            gathered = [*self._gathered(self.head), *self._copied(self.head)]
            yield Snapshot("gathering the head", (*common, (1, _Group(Entry("activations", "y", y))), *flat, *gathered))
        head = self.shared if self.tied else [term for term in self._gathered(self.head, 1, 0) if self.stays or term[0]]
        chunked = self.training.loss_chunks > 1
        table = self.head.parts[0].lasts(self.r)
        common += [*head, (1, loss.kept)]
        if chunked:  # the head's gradient is added up over the chunks before it is reduced
            summed = (1, _Group(Entry("gradient buffers", "gradient of the head", table)))
            common.append(summed)
        for where, group in loss.moments:
            yield Snapshot(f"loss: {where}", (*common, (1, group)))
        if self.piped:
            return
        if chunked:  # reduced while everything else still lives
            yield from self._reduction(_one_table(self.head), "the head", common[:-1], self.r)
        elif not self.tied:
            after = self._gathered(self.layers[0][0], 0, 1) if self.layers else []
            gradient = (1, _Group(Entry("working", "gradient of y", y)))
            yield from self._reduction(self.head, "the head", [*self.base, *self._kept(self.counts), *after, gradient])

    def _backward(self) -> Iterator[Snapshot]:
        for index, (unit, layer, n) in enumerate(self.layers):
            rest = [m - (i == index) for i, m in enumerate(self.counts)]
            after_head = self.head if not self.piped and not self.tied else None
            after_layer = unit if not self.piped else None
            for which, left, done, buffer in (
                ("last", rest, 0, after_head),
                ("first", [0] * len(rest), max(0, n - 1), after_layer if n > 1 else after_head),
            ):
                common: _Terms = [*self.base, *self.shared, *self._kept(left), *self._gradients(done)]
                if self.tied and self.head and self.training.loss_chunks == 1:  # waits for the embedding's gradient
                    table = Entry("gradient buffers", "gradient of the head", self.head.parts[0].lasts(self.s.a))
                    common.append((1, _Group(table)))
                computing = [*common, *self._gathered(unit), *(self._reducing(buffer) if buffer else [])]
                if layer.recompute:
                    where = f"recomputation of the {which} layer: {layer.recompute_at}"
                    yield Snapshot(where, (*computing, (1, layer.recompute), (1, self.x)))
                yield Snapshot(f"backward of the {which} layer: {layer.backward_at}", (*computing, (1, layer.backward)))
                yield Snapshot(
                    f"end of the {which} layer's backward", (*computing, (1, self.x), *self._unreduced(unit))
                )
                flat = self._gathered(unit, 0, 1)
                yield from self._reduction(unit, f"the {which} layer", [*common, *flat, (1, self.x)])

    def _unreduced(self, unit: Unit) -> _Terms:
        return [
            (1, _Group(Entry("gradient buffers", f"gradients of {part.name}", part.full(self.s.a))))
            for part in unit.parts
        ]

    def _reduction(self, unit: Unit, which: str, common: _Terms, summed: Quantity | None = None) -> Iterator[Snapshot]:
        """FSDP's post-backward, part by part, experts first: gradients copied into the reduce-scatter's input, then its output."""
        a, r = summed or self.s.a, self.r
        before: _Terms = []
        for number in range(len(unit.parts) - 1, -1, -1):
            part = unit.parts[number]
            waiting = [
                (1, _Group(Entry("gradient buffers", f"gradients of {p.name}", p.full(a))))
                for p in unit.parts[: number + 1]
            ]
            buffer = (1, _Group(Entry("gradient buffers", f"reduce-scatter input of {part.name}", part.full(r))))
            yield Snapshot(f"reducing {which}: copy in", (*common, *before, *waiting, buffer))
            out = Entry("gradient buffers", f"reduced gradients of {part.name}", part.reduced(r))
            if part.ranks == 1:  # no collective: a copy, divided
                other = Entry("gradient buffers", f"divided gradients of {part.name}", part.full(r))
            else:  # the last parameter's gradient is still referred to
                other = Entry("gradient buffers", f"gradient of the last of {part.name}", part.lasts(a))
            yield Snapshot(
                f"reducing {which}: reduced", (*common, *before, *waiting[:-1], (1, _Group(other, out)), buffer)
            )
            before = [buffer, (1, _Group(Entry("gradients", part.name, part.reduced(self.p))))]

    def _embedding(self) -> Iterator[Snapshot]:
        unit = self.head if self.tied else self.embedding
        if self.tied and self.head and self.training.loss_chunks > 1:
            unit = _one_table(self.head)
        if unit and not self.piped:
            ops = embedding(self.s)
            live = replay_backward(ops, {}, "x").live
            live = {name: size for name, size in live.items() if not name.startswith("parameter")}
            common: _Terms = [*self.base, *self._gradients(None), (1, _named(live, _parts(ops), ()))]
            yield from self._reduction(unit, "the embedding", common)

    def _reducing(self, unit: Unit) -> _Terms:
        return [
            (1, _Group(Entry("gradient buffers", f"reduce-scatter input of {part.name}", part.full(self.r))))
            for part in unit.parts
        ]

    def _gradients(self, done: int | None) -> _Terms:
        """Sharded gradients when `done` layers of each kind (None: all) are reduced; the head's come first, tied ones last."""
        if self.piped:
            return []
        numbers = [(unit, n if done is None else min(n, done)) for unit, _, n in self.layers]
        if self.head and not self.tied:
            numbers.append((self.head, 1))
        return [(n, group) for unit, n in numbers if n for group in self._reduced(unit)]

    def _reduced(self, unit: Unit) -> list[_Group]:
        return [_Group(Entry("gradients", part.name, part.reduced(self.p))) for part in unit.parts]

    def _optimizer(self) -> Snapshot:
        found: _Terms = []
        for unit, n in self.units:
            held = unit.held(self.p)
            found += [
                (n, _Group(Entry("parameters", unit.name, held))),
                *((n, group) for group in self._reduced(unit)),
                (2 * n, _Group(Entry("moments", unit.name, held))),
            ]
            if self.training.optimizer == "foreach":
                found.append((n, _Group(Entry("working", f"roots of {unit.name}'s second moments", held))))
        tables = [entry for _, group in self.base for entry in group.entries if entry.part == "tables"]
        return Snapshot("optimizer step", (*found, (1, _Group(*tables))))

    def _kept_by_part(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        terms = self._kept(self.counts)
        if not self.stage:
            terms.append(
                (1, _Group(*(Entry("activations", n, q) for n, q in kept_sizes(embedding(self.s), {}).items())))
            )
        if self.head:
            terms.append((1, _loss_of(_without_dp(self.plan), self.shape, self.training).after_forward))
        if self.training.attention == "masked" and self.training.checkpointing != "none":
            terms.append((1, _Group(Entry("attention", "document mask", self.s.T * self.s.S))))
        for entry in Snapshot("", tuple(terms)).entries:
            sums[entry.part] = sums.get(entry.part, 0.0) + entry.size.value
        return sums

    def _letters(self) -> dict[str, float]:
        names = "BSTtDKHGFVa" + ("EkMmNRc" if self.shape.num_experts else "")
        letters = {name: getattr(self.s, name).value for name in names} | {"p": self.p.value, "r": self.r.value}
        letters["ep"] = self.plan.ep
        for unit, _ in self.units:
            letters[f"p({unit.name})"] = unit.owned
            for part in unit.parts:
                letters |= {f"P({part.name})": part.gathered, f"P(last of {part.name})": part.last}
                if part.split:
                    letters[f"P(split of {part.name})"] = part.split
                if part.held != unit.owned:
                    letters[f"q({part.name})"] = part.held
        return letters


def _one_table(head: Unit) -> Unit:
    """What is reduced at the end of a chunked loss: the head's table, without the final norm (and, tied, without the embedding)."""
    part = head.parts[0]
    return replace(
        head, parts=(replace(part, name=f"table of {part.name}", held=-(-part.last // part.ranks), gathered=part.last),)
    )
