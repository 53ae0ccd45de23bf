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

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from neuron_parallel import pieces
from neuron_parallel.buffers import Buffers, buffers, reduction
from neuron_parallel.hardware import Cluster
from neuron_parallel.plan import ParallelPlan, Training, stage_layers
from neuron_parallel.report import PARTS, Entry, Group, Memory, Snapshot, Term
from neuron_parallel.shape import ModelShape
from neuron_parallel.symbols import Symbols
from neuron_parallel.units import Unit, fsdp_unit

__all__ = ["PARTS", "Memory", "Snapshot", "device_allowance", "least_bytes", "memory", "peak_bytes"]

_Terms = list[Term]

USABLE = 23.5e9
"""Bytes of a 24 GiB core at which out-of-memory was met (reports from the field)."""


def device_allowance(cluster: Cluster) -> float:
    """Bytes of a logical core that tensors cannot have: runtime, collectives and compiler scratch.

    24 GiB - 23.5e9 bytes, the share at which runs were seen to fail, as the same fraction of every core's memory.
    """
    return cluster.hbm_bytes * (1 - USABLE / (24 << 30))


def memory(plan: ParallelPlan, shape: ModelShape, training: Training | None = None, stage: int | None = None) -> Memory:
    """The memory of one core under a resolved plan (dp_shard and global_batch filled in), of a pipeline's `stage` (None: of the one
    that needs most).

    Sizes that do not divide evenly count as on the rank that holds most. Raises ValueError for an unresolved plan.
    """
    if plan.dp_shard < 1 or plan.global_batch < 1:
        raise ValueError(f"resolve the plan first: dp_shard {plan.dp_shard}, global_batch {plan.global_batch}")
    training = training or Training()
    stages = _stages(plan) if stage is None else (stage,)
    reports = (_Stage(plan, shape, training, stage).memory() for stage in stages)
    return max(reports, key=lambda report: report.peak.bytes)


def peak_bytes(plan: ParallelPlan, shape: ModelShape, training: Training, limit: float = math.inf) -> float:
    """memory(...).peak.bytes for less work; infinity as soon as it is seen to be over `limit`."""
    largest = 0.0
    for stage in _stages(plan):
        for moment in _Stage(plan, shape, training, stage).moments():
            largest = max(largest, moment.bytes)
            if largest > limit:
                return math.inf
    return largest


def _stages(plan: ParallelPlan) -> Iterable[int]:
    """Stages of which one needs most. Those between the second and the last but one have fewer micro-batches in flight than the
    second, and as many layers."""
    return range(plan.pp) if plan.pp < 4 else (0, 1, plan.pp - 2, plan.pp - 1)


def least_bytes(plan: ParallelPlan, shape: ModelShape, training: Training) -> float:
    """A lower bound that costs little: what a stage's layers hold while the last or the first of them goes backward."""
    figures = zip(*(_least(plan, shape, training, moe) for moe in shape.kinds), strict=True)
    each, kept, gradient, working = (min(of_kinds) for of_kinds in figures)
    layers, batches = stage_layers(shape.num_hidden_layers, plan.pp), plan.micro_batches
    last = max(layers[i] * (each + min(plan.pp - i, batches) * kept) for i in _stages(plan))
    first = max(layers) * (each + gradient) + kept - gradient
    return max(last, first) + working


def _least(plan: ParallelPlan, shape: ModelShape, training: Training, moe: bool) -> tuple[float, float, float, float]:
    """Bytes that a layer holds through the backward pass; that it keeps of a micro-batch until its own; of its reduced gradients;
    that it needs beside while it goes backward."""
    unit, kept = fsdp_unit(shape, plan, "layer", moe), pieces.kept(plan, shape, training, moe).bytes
    whole = pieces.kept(plan, shape, training.without_mode, moe).bytes
    gradient = float(unit.owned * training.param_bytes)
    each, working = 3 * gradient, whole - kept
    gathered = unit.gathered * training.compute_bytes
    if plan.pp > 1:
        gradient = 0.0
        if plan.micro_batches > 1:
            each += unit.gathered * training.reduce_bytes
    if plan.pp > 1 and _stays(plan, training):
        each += gathered
    else:
        working += gathered
    return each, kept, gradient, working


def _stays(plan: ParallelPlan, training: Training) -> bool:
    """Whether parameters stay gathered from first use to their unit's backward, with a pipeline to the step's end."""
    return training.reshard == "never" or (training.reshard == "default" and plan.pp > 1)


class _Stage:
    """One core of a pipeline stage (of the only one, without pipeline)."""

    def __init__(self, plan: ParallelPlan, shape: ModelShape, training: Training, stage: int) -> None:
        self.plan, self.shape, self.training, self.stage = plan, shape, training, stage
        self.s = Symbols.of(plan, shape, training)
        self.piped = plan.pp > 1
        self.tied = shape.tie_word_embeddings
        count = stage_layers(shape.num_hidden_layers, plan.pp)[stage]
        self.moe_layers = round(count * shape.moe_layers / shape.num_hidden_layers)
        numbers = {True: self.moe_layers, False: count - self.moe_layers}
        self.layers = [
            (self._buffers(fsdp_unit(shape, plan, "layer", moe)), pieces.layer(plan, shape, training, moe), n)
            for moe, n in numbers.items()
            if n
        ]
        self.counts = [n for _, _, n in self.layers]
        first, last = stage == 0, stage == plan.pp - 1
        self.head = self._buffers(fsdp_unit(shape, plan, "head", False)) if last else None
        self.embedding = self._buffers(fsdp_unit(shape, plan, "embedding", False)) if first and not self.tied else None
        self.units = [(unit, n) for unit, _, n in self.layers]
        self.units += [(unit, 1) for unit in (self.embedding, self.head) if unit]
        self.stays = _stays(plan, training)
        # With tied weights the table stays gathered from the embedding's forward to its backward.
        self.shared = self._gathered(self.head, 1, 0) if self.tied and self.head else []
        self.x = Group.of(Entry("working", "gradient of x", self.s.t * self.s.D * self.s.a))
        self.always: _Terms = [(1, self._base())]
        self.base: _Terms = [*self.always, *self._staying(None)]

    def _buffers(self, unit: Unit) -> Buffers:
        how = self.training
        return buffers(unit, how.compute_bytes, how.reduce_bytes, how.param_bytes)

    def memory(self) -> Memory:
        forward, loss, backward, embedding_, optimizer = self._phases()
        moments = (*forward, *loss, *backward, *embedding_, *optimizer)
        return Memory(self.stage, moments, self._letters(), self._kept_by_part())

    def moments(self) -> Iterator[Snapshot]:
        """Every moment of the step, those first that are often the largest."""
        forward, loss, backward, embedding_, optimizer = self._phases()
        for phase in (loss, backward, optimizer, forward, embedding_):
            yield from phase

    def _phases(self) -> tuple[Iterator[Snapshot], ...]:
        return self._forward(), self._loss(), self._backward(), self._embedding(), self._optimizer()

    def _base(self) -> Group:
        """What lives all the time, and with it the activations of other micro-batches in flight."""
        s, plan = self.s, self.plan
        found: _Terms = []
        for unit, n in self.units:
            found += [(n, unit.parameters), (n, unit.moments)]
            if self.piped and plan.micro_batches > 1:
                found.append((n, unit.summed))
        always = self._tables()
        batches = plan.micro_batches if self.piped else 1
        always.append(Entry("working", "tokens, positions, labels", 3 * batches * s.T * 8))
        if self.stage:
            always.append(Entry("working", "received activations", batches * s.t * s.D * s.a))
        else:
            always += pieces.embedded(plan, self.shape, self.training).kept
        if self.training.attention == "masked":
            always.append(Entry("attention", "document mask", s.T * s.S))
        in_flight = min(plan.pp - self.stage, plan.micro_batches)
        return Group(*found, (1, Group.of(*always)), *self._kept([n * (in_flight - 1) for n in self.counts]))

    def _staying(self, done: int | None) -> _Terms:
        """Parameters that stay gathered when the head and `done` layers of each kind went backward (None: not even the head)."""
        if not self.stays:
            return []
        if done is None or self.piped:
            return [(n, unit.gathered) for unit, n in self.units]
        found = [(n - min(n, done), unit) for unit, _, n in self.layers]
        found += [(1, unit) for unit in (self.embedding, self.head if self.tied else None) if unit]
        return [(n, unit.gathered) for n, unit in found if n]

    def _tables(self) -> list[Entry]:
        s = self.s
        found = [Entry("tables", "rope tables", sum(self.counts) * s.S * 2 * s.K * 4)]
        if self.moe_layers:
            found.append(Entry("tables", "expert counts and biases", 2 * self.moe_layers * s.E * 4))
        return found

    def _kept(self, numbers: list[int]) -> _Terms:
        """Between forward and backward, for so many layers of each kind."""
        return [(n, layer.kept) for (_, layer, _), n in zip(self.layers, numbers, strict=True) if n]

    def _gathered(self, unit: Buffers, copies: int = 1, flats: int = 1) -> _Terms:
        """A unit's parameters while it computes, and flat buffers as large."""
        return [(0 if self.stays else copies, unit.gathered), (flats, unit.flat)]

    def _forward(self) -> Iterator[Snapshot]:
        x = (1, Group.of(Entry("activations", "x", self.s.t * self.s.D * self.s.a)))
        ahead = int(self.plan.ep > 1)  # with experts apart, TorchTitan gathers the next layer ahead
        first = self.head if self.tied else self.embedding
        if first and not self.stays:
            yield Snapshot("gathering the embedding", (*self.base, *self._gathered(first), (1, first.copied)))
        for index, (unit, layer, n) in enumerate(self.layers):
            before = self._kept([m - (i == index) for i, m in enumerate(self.counts)])
            common = (*self.base, *self.shared, *before)
            gathering = (*self._gathered(unit), (1, unit.copied))
            yield Snapshot("gathering a layer", (*common, x, (1, unit.last_flat), *gathering))
            if first and not self.stays:
                terms = (*self.base, *self.shared, x, (1, first.last_flat), *gathering)
                yield Snapshot("gathering the first layer", terms)
            if ahead and first and not self.stays:
                terms = (*self.base, *self.shared, *self._gathered(first), (1, unit.ahead))
                yield Snapshot("gathering ahead", terms)
            if ahead and self.head and not self.tied:
                terms = (*self._gathered(unit, 1, 0), (1, unit.last_flat), (1, self.head.ahead))
                yield Snapshot("gathering the head ahead", (*common, x, *terms))
            computing = (*self._gathered(unit, 1, ahead if n > 1 else 0), (1, unit.last_flat), (1, layer.forward))
            yield Snapshot(f"forward of a layer: {layer.forward_at}", (*common, *computing))

    def _loss(self) -> Iterator[Snapshot]:
        if not self.head:
            return
        end = pieces.loss(self.plan, self.shape, self.training)
        common: _Terms = [*self.base, *self._kept(self.counts)]
        y = self.s.t * self.s.D * self.s.a
        if not self.tied:
            flat = [(1, self.layers[0][0].last_flat)] if self.layers else []
            gathered = [*self._gathered(self.head), (1, self.head.copied)]
            yield Snapshot(
                "gathering the head", (*common, (1, Group.of(Entry("activations", "y", y))), *flat, *gathered)
            )
        common += [*(self.shared if self.tied else self._gathered(self.head, 1, 0)), (1, end.kept)]
        chunked = self.training.loss_chunks > 1
        if chunked:  # the head's gradient is added up over the chunks before it is reduced
            table = self.head.unit.parts[0].lasts(self.head.r)
            common.append((1, Group.of(Entry("gradient buffers", "gradient of the head", table))))
        for where, group in end.moments:
            yield Snapshot(f"loss: {where}", (*common, (1, group)))
        if self.piped:
            return
        if chunked:  # reduced while everything else still lives
            for where, group in reduction(self._buffers(_one_table(self.head.unit)), summed=True):
                yield Snapshot(f"reducing the head: {where}", (*common[:-1], (1, group)))
        elif not self.tied:
            after: _Terms = [*self.base, *self._kept(self.counts), (1, Group.of(Entry("working", "gradient of y", y)))]
            if self.layers:
                after += self._gathered(self.layers[0][0], 0, 1)
            for where, group in reduction(self.head):
                yield Snapshot(f"reducing the head: {where}", (*after, (1, group)))

    def _backward(self) -> Iterator[Snapshot]:
        for index, (unit, layer, n) in enumerate(self.layers):
            rest = [m - (i == index) for i, m in enumerate(self.counts)]
            after_head = self.head if not self.piped and not self.tied else None
            after_layer = unit if not self.piped else None
            for which, left, done, buffer in (
                ("last", rest, 0, after_head),
                ("first", [0] * len(rest), max(0, n - 1), after_layer if n > 1 else after_head),
            ):
                lasting = [*self.always, *self._staying(done), *self.shared]
                common: _Terms = [*lasting, *self._kept(left), *self._gradients(done)]
                if self.tied and self.head and self.training.loss_chunks == 1:  # waits for the embedding's gradient
                    table = Entry("gradient buffers", "gradient of the head", self.head.unit.parts[0].lasts(self.s.a))
                    common.append((1, Group.of(table)))
                computing = [*common, *self._gathered(unit), *([(1, buffer.inputs)] if buffer else [])]
                if layer.recompute:
                    where = f"recomputation of the {which} layer: {layer.recompute_at}"
                    yield Snapshot(where, (*computing, (1, layer.recompute), (1, self.x)))
                yield Snapshot(f"backward of the {which} layer: {layer.backward_at}", (*computing, (1, layer.backward)))
                end = (*computing, (1, self.x), (1, unit.unreduced))
                yield Snapshot(f"end of the {which} layer's backward", end)
                for where, group in reduction(unit):
                    terms = (*common, *self._gathered(unit, 0, 1), (1, self.x), (1, group))
                    yield Snapshot(f"reducing the {which} layer: {where}", terms)

    def _embedding(self) -> Iterator[Snapshot]:
        unit = self.head if self.tied else self.embedding
        if self.tied and self.head and self.training.loss_chunks > 1:
            unit = self._buffers(_one_table(self.head.unit))
        if unit and not self.piped:
            end = pieces.embedded(self.plan, self.shape, self.training).backward
            every = max(self.counts, default=0)
            common: _Terms = [*self.always, *self._staying(every), *self._gradients(None), (1, end)]
            for where, group in reduction(unit):
                yield Snapshot(f"reducing the embedding: {where}", (*common, (1, group)))

    def _gradients(self, done: int | None) -> _Terms:
        """Sharded gradients when `done` layers of each kind (None: all) are reduced; the head's come first, tied ones last."""
        if self.piped:
            return []
        numbers = [(unit, n if done is None else min(n, done)) for unit, _, n in self.layers]
        if self.head and not self.tied:
            numbers.append((self.head, 1))
        return [(n, unit.reduced) for unit, n in numbers if n]

    def _optimizer(self) -> Iterator[Snapshot]:
        found: _Terms = []
        for unit, n in self.units:
            found += [(n, unit.parameters), (n, unit.reduced), (n, unit.moments)]
            if self.training.optimizer == "foreach":
                found.append((n, unit.roots))
        yield Snapshot("optimizer step", (*found, (1, Group.of(*self._tables()))))

    def _kept_by_part(self) -> dict[str, float]:
        terms = self._kept(self.counts)
        if not self.stage:
            terms.append((1, Group.of(*pieces.embedded(self.plan, self.shape, self.training).kept)))
        if self.head:
            terms.append((1, pieces.loss(self.plan, self.shape, self.training).after_forward))
        if self.training.attention == "masked" and self.training.checkpointing != "none":
            terms.append((1, Group.of(Entry("attention", "document mask", self.s.T * self.s.S))))
        return {part: size for part, size in Snapshot("", tuple(terms)).by_part().items() if size}

    def _letters(self) -> dict[str, float]:
        names = "BSTtDKHGFVa" + ("EkMmNRc" if self.shape.num_experts else "")
        letters = {name: getattr(self.s, name).value for name in names}
        letters |= {"p": self.training.param_bytes, "r": self.training.reduce_bytes, "ep": self.plan.ep}
        for unit in (buffered.unit for buffered, _ in self.units):
            letters[f"p({unit.name})"] = unit.owned
            for part in unit.parts:
                letters |= {f"P({part.name})": part.gathered, f"P(last of {part.name})": part.last}
                if part.split:
                    letters[f"P(split of {part.name})"] = part.split
                if part.held != unit.owned:
                    letters[f"q({part.name})"] = part.held
        return letters


@lru_cache(maxsize=1024)
def _one_table(head: Unit) -> Unit:
    """What is reduced at the end of a chunked loss: the head's table, without the final norm (and, tied, without the embedding)."""
    part = head.parts[0]
    return replace(
        head, parts=(replace(part, name=f"table of {part.name}", held=-(-part.last // part.ranks), gathered=part.last),)
    )
