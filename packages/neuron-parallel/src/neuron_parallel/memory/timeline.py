"""The moments of a training step on one core of a pipeline stage: what lives, from the embedding's gather to the optimizer.

Constants of FSDP2: in forward, a layer's flat all-gather output lives on until the next layer is gathered, beside the
copy it computes with; in backward the previous layer's is prefetched, last the embedding's, unless parameters stayed
gathered; one reduce-scatter input is in flight; head and final norm stay gathered from forward to backward, unless
always resharded; with tied weights, the embedding is the head. With a chunked loss the head's table is reduced before
the final norm goes backward. Each micro-batch is reduced on its own, and those after the first find its gradients. In a
pipeline parameters stay gathered from the first backward pass to the step's end, gradients are summed unsharded, and
both end unit by unit after the last micro-batch.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from neuron_parallel.memory import activations
from neuron_parallel.memory.fsdp_buffers import Buffers, buffers, reduction
from neuron_parallel.memory.fsdp_units import Unit, fsdp_unit
from neuron_parallel.memory.quantity import Quantity
from neuron_parallel.memory.snapshot import Entry, Group, Memory, Snapshot, Term
from neuron_parallel.memory.symbols import Symbols
from neuron_parallel.model import ModelShape
from neuron_parallel.plan import ParallelPlan, Training, stage_layers

__all__ = ["Stage", "stays"]

_Terms = list[Term]
_Units = list[tuple[int, Buffers]]


def stays(plan: ParallelPlan, training: Training) -> bool:
    """Whether parameters stay gathered from first use to their unit's backward, with a pipeline to the step's end."""
    return training.reshard == "never" or (training.reshard == "default" and plan.pp > 1)


class _Pass(NamedTuple):
    """A micro-batch at work on a stage."""

    later: bool
    """Earlier ones left gradients everywhere."""
    standing: Group
    """What lives beside it all the time."""


class Stage:
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
            (self._buffers(fsdp_unit(shape, plan, "layer", moe)), activations.layer(plan, shape, training, moe), n)
            for moe, n in numbers.items()
            if n
        ]
        self.counts = [n for _, _, n in self.layers]
        self.last = stage == plan.pp - 1
        self.head = self._buffers(fsdp_unit(shape, plan, "head", False)) if self.last else None
        self.embedding = (
            self._buffers(fsdp_unit(shape, plan, "embedding", False)) if stage == 0 and not self.tied else None
        )
        # What the forward pass begins with, and all units in the model's order, without and with the head.
        self.first = self.head if self.tied else self.embedding
        self.body: _Units = [(1, self.embedding)] if self.embedding else []
        self.body += [(n, unit) for unit, _, n in self.layers]
        self.units: _Units = [*self.body, (1, self.head)] if self.head else self.body
        self.stays = stays(plan, training)
        # With tied weights the table stays gathered from the embedding's forward to its backward.
        self.shared: _Terms = [(1, self.head.gathered)] if self.tied and self.head else []
        self.ahead = plan.ep > 1  # with experts apart, TorchTitan gathers the next layer ahead
        self.chunked = training.loss_chunks > 1
        self.x = Group.of(Entry("working", "gradient of x", self.s.t * self.s.D * self.s.a))
        masked = training.attention == "masked"
        self.mask = [Entry("attention", "document mask", self.s.T * self.s.S)] if masked else []
        self.always = Group(
            *((n, g) for n, unit in self.units for g in (unit.parameters, unit.moments)), (1, self._tables())
        )
        self.beside = self._beside_layers()
        in_flight = min(plan.pp - stage, plan.micro_batches)
        # Where as many are in flight as there are, the first backward pass meets all of their activations and no gradients, the
        # second one micro-batch less and gradients.
        self.passes = [self._pass(in_flight - 1, later=plan.micro_batches > in_flight)]
        if in_flight > 1 and not self.passes[0].later:
            self.passes.append(self._pass(in_flight - 2, later=True))

    def _buffers(self, unit: Unit) -> Buffers:
        how = self.training
        return buffers(unit, how.compute_bytes, how.reduce_bytes, how.param_bytes)

    def memory(self) -> Memory:
        moments = tuple(moment for phase in self._phases() for moment in phase)
        return Memory(self.stage, moments, self._letters(), self._kept_by_part())

    def moments(self) -> Iterator[Snapshot]:
        """Every moment of the step, those first that are often the largest."""
        forward, loss, backward, embedding_, sums, optimizer = self._phases()
        for phase in (loss, backward, optimizer, forward, embedding_, sums):
            yield from phase

    def _phases(self) -> tuple[Iterator[Snapshot], ...]:
        return self._forward(), self._loss(), self._backward(), self._embedding(), self._sums(), self._optimizer()

    def _tables(self) -> Group:
        s = self.s
        found = [Entry("tables", "rope tables", sum(self.counts) * s.S * 2 * s.K * 4)]
        if self.moe_layers:
            found.append(Entry("tables", "expert counts and biases", 2 * self.moe_layers * s.E * 4))
        return Group.of(*found)

    def _pass(self, others: int, later: bool) -> _Pass:
        """A micro-batch with `others` in flight; `later`: earlier ones left gradients everywhere."""
        kept = self._kept([n * others for n in self.counts])
        gradients = self._gradients(self.units) if later else []
        terms = [(1, self.always), (1, self._between(others)), (others + 1, self.beside), *kept, *gradients]
        return _Pass(later, Group(*terms))

    def _gradients(self, units: _Units) -> _Terms:
        return [(n, unit.summed if self.piped else unit.reduced) for n, unit in units]

    def _standing(self, at: _Pass, done: int | None = None) -> _Terms:
        """What lives beside a micro-batch of which `done` layers of each kind went backward (None: not even the head)."""
        new = [] if at.later else self._gradients(self._done(done))
        return [(1, at.standing), *new, *self._outputs(at, done)]

    def _holds(self, later: bool) -> bool:
        """With replicas, FSDP2 holds what it all-reduced until the backward pass ends: the gradient itself, unless that is the sum
        over micro-batches or has another dtype."""
        return self.plan.dp_replicate > 1 and (later or self.training.reduce_bytes != self.training.param_bytes)

    def _outputs(self, at: _Pass, done: int | None) -> _Terms:
        """What is held of `done` layers of each kind and of what came before them."""
        if done is None or self.piped or not self._holds(at.later):
            return []
        before = self._in_flight_first()
        layers: _Terms = [(min(n, done), unit.outputs) for unit, _, n in self.layers if done]
        return [*layers, (1, before.outputs)] if before else layers

    def _between(self, others: int) -> Group:
        """Inputs of the step; of a pipeline those of all its micro-batches, and the buffers for what neighbours send."""
        s = self.s
        batches = self.plan.micro_batches if self.piped else 1
        x, idle = s.t * s.D * s.a, batches - 1 - others
        found = [Entry("working", "tokens, positions, labels", 3 * batches * s.T * 8)]
        if self.stage and idle:  # a buffer each, which keeps its gradient to the step's end
            found.append(Entry("working", "received activations and their gradients", 2 * idle * x))
        if not self.last:
            found.append(Entry("working", "received gradients", batches * x))
        return Group.of(*found)

    def _beside_layers(self) -> Group:
        """What a micro-batch keeps beside its layers' activations."""
        s = self.s
        x = s.t * s.D * s.a
        found: list[Entry] = []
        if not self.stage:
            found += activations.embedded(self.plan, self.shape, self.training).kept
        elif not any(layer.keeps_input for _, layer, _ in self.layers):
            found.append(Entry("activations", "received activations", x))
        if not self.last:
            found.append(Entry("activations", "sent activations", x))
        if self.training.checkpointing != "none":  # what is recomputed needs it again
            found += self.mask
        return Group.of(*found)

    def _done(self, done: int | None) -> _Units:
        """Units that went backward; tied ones come last."""
        if done is None:
            return []
        layers = [(min(n, done), unit) for unit, _, n in self.layers if done]
        return [*layers, (1, self.head)] if self.head and not self.tied else layers

    def _gathered_forward(self, later: bool, but: Buffers | None = None) -> _Terms:
        """What is gathered beside `but` while a forward pass is at its last layer: units so far, if they stay; in a pipeline also
        those to come, which an earlier micro-batch's backward pass left gathered."""
        units = _less(self.body, but) if self.stays else []
        return _gathered([*units, (1, self.head)] if self.piped and later and self.head else units)

    def _gathered_backward(self, done: int, but: Buffers) -> _Terms:
        """What is gathered beside `but` when `done` layers of each kind went backward: units to come, if they stayed; in a pipeline
        also those that went, since parameters wait there for the step's end."""
        if self.piped:
            return _gathered(_less(self.units, but) if self.stays else self._done(done))
        layers = [(n - min(n, done), unit) for unit, _, n in self.layers]
        to_come: _Units = [*([(1, self.embedding)] if self.embedding else []), *_less(layers, but)]
        return _gathered(to_come) if self.stays else []

    def _kept(self, numbers: list[int]) -> _Terms:
        """Between forward and backward, for so many layers of each kind."""
        return [(n, layer.kept) for (_, layer, _), n in zip(self.layers, numbers, strict=True) if n]

    def _forward(self) -> Iterator[Snapshot]:
        x = (1, Group.of(Entry("activations", "x", self.s.t * self.s.D * self.s.a)))
        at = self.passes[0]
        standing = self._standing(at)
        # Where parameters stay, a pipeline's first micro-batch alone gathers.
        start = self._standing(self._pass(0, later=False)) if self.piped and self.stays else standing
        embedding = [(1, self.first.gathered)] if self.first else []
        if self.first:
            yield Snapshot(
                "gathering the embedding", (*start, *embedding, (1, self.first.flat), (1, self.first.copied))
            )
            if self.ahead and self.layers:
                terms = (*start, *embedding, (1, self.first.last_flat), (1, self.layers[0][0].ahead))
                yield Snapshot("gathering the first layer ahead", terms)
        for index, (unit, layer, n) in enumerate(self.layers):
            before = self._kept([m - (i == index) for i, m in enumerate(self.counts)])
            common = (*start, *self._gathered_forward(False, but=unit), *self.shared, *before)
            one, last_flat = (1, unit.gathered), (1, unit.last_flat)
            gathering = (one, (1, unit.flat), (1, unit.copied))
            # Begun ahead, the gather of a layer's last part finds the flat buffer of the layer before gone.
            yield Snapshot("gathering a layer", (*common, x, *gathering, *([] if self.ahead else [last_flat])))
            if self.first and not self.ahead:
                flat = (1, self.first.last_flat)
                held_then = embedding if self.stays else self.shared
                yield Snapshot("gathering the first layer", (*start, *held_then, x, flat, *gathering))
            if self.ahead and n > 1:
                this = [] if self.stays else [one]  # else among those that were gathered before
                yield Snapshot("gathering a layer ahead", (*common, x, *this, last_flat, (1, unit.ahead)))
            if self.ahead and self.head and not self.tied:
                yield Snapshot("gathering the head ahead", (*common, x, one, last_flat, (1, self.head.ahead)))
            prefetched = [(1, unit.flat)] if self.ahead and n > 1 else []
            held = [*self._gathered_forward(at.later, but=unit), *self.shared]
            mask = [(1, entry) for entry in self.mask if self.training.checkpointing == "none"]
            computing = (*standing, *held, *before, *mask, one, last_flat, *prefetched, (1, layer.forward))
            yield Snapshot(f"forward of a layer: {layer.forward_at}", computing)

    def _loss(self) -> Iterator[Snapshot]:
        head = self.head
        if not head:
            return
        end = activations.loss(self.plan, self.shape, self.training)
        at, y = self.passes[0], self.s.t * self.s.D * self.s.a
        standing = [*self._standing(at), *self._gathered_forward(False), *self._kept(self.counts)]
        gathering = ((1, head.gathered), (1, head.flat), (1, head.copied))
        if not self.tied:
            flat = [(1, self.layers[0][0].last_flat)] if self.layers else []
            terms = (*standing, (1, Group.of(Entry("activations", "y", y))), *flat, *gathering)
            yield Snapshot("gathering the head", terms)
        without: _Terms = [*standing, (1, end.kept)]
        whole: _Terms = [*without, (1, head.gathered)]
        table = [(1, _table_gradient(head, head.r))] if self.chunked else []  # added up before it is reduced
        # Resharded after its forward, the head is not there for the loss.
        resharded = self.training.reshard == "always" and not self.chunked
        for where, group in end.moments:
            at_loss = without if resharded and not where.startswith("head") else [*whole, *table]
            yield Snapshot(f"loss: {where}", (*at_loss, (1, group)))
        logits = (1, Entry("logits", "gradient of logits", self.s.T * self.s.V * self.s.a))
        if self.chunked:
            yield Snapshot("gathering the head for the final norm's backward", (*without, *gathering))
        elif resharded:
            yield Snapshot("gathering the head for its backward", (*without, logits, *gathering))
        if self.piped and not self._in_place(head, at):
            yield Snapshot("end of the head's backward", (*whole, logits, (1, _table_gradient(head, head.a))))
        reduced = self._reduced_first()
        if not reduced:
            return
        if not self.chunked:  # else reduced while everything still lives
            whole = [*standing, (1, Group.of(Entry("working", "gradient of y", y))), *self._prefetched()]
        for where, group in self._reduction(reduced, at, summed=self.chunked):
            yield Snapshot(f"reducing the head: {where}", (*whole, (1, group)))

    def _reduced_first(self) -> Buffers | None:
        """What is reduced before any layer: the head, with a chunked loss its table alone."""
        if not self.head or self.piped:
            return None
        if self.chunked:
            return self._buffers(_one_table(self.head.unit))
        return None if self.tied else self.head

    def _reduction(self, unit: Buffers, at: _Pass, summed: bool = False) -> list[tuple[str, Group]]:
        return reduction(unit, summed, new=not at.later, held=self._holds(at.later))

    def _in_place(self, unit: Buffers, at: _Pass) -> bool:
        """Whether autograd itself adds a gradient to the sum of earlier micro-batches, since both have one dtype."""
        return self.piped and at.later and unit.a.value == unit.r.value

    def _in_flight_first(self) -> Buffers | None:
        """What the last layer finds in flight: the head's reduction; after a chunked loss of an untied head the final norm's alone."""
        return self._reduced_first() if self.tied or not self.chunked else None

    def _prefetched(self, first: bool = False) -> _Terms:
        """What is gathered beside a unit's backward: the layer before, in the end (`first`) the embedding."""
        unit = self.embedding if first else (self.layers[0][0] if self.layers else None)
        return [(1, unit.flat)] if unit and not self.stays else []

    def _backward(self) -> Iterator[Snapshot]:
        after_head = self._in_flight_first()
        for at, (index, (unit, layer, n)) in product(self.passes, enumerate(self.layers)):
            rest = [m - (i == index) for i, m in enumerate(self.counts)]
            after_layer = unit if not self.piped else None
            in_place = self._in_place(unit, at)
            backward = _added_in_place(layer.backward) if in_place else layer.backward
            for which, left, done, buffer in (
                ("last", rest, 0, after_head),
                ("first", [0] * len(rest), n - 1, after_layer if n > 1 else after_head),
            ):
                common = [*self._standing(at, done), *self._kept(left)]
                common += [*self._gathered_backward(done, but=unit), *self.shared]
                if self.piped and not self.stays:  # beside what the layers before it left gathered
                    for gathering in unit.gathering:
                        yield Snapshot(f"gathering the {which} layer for its backward", (*common, (1, gathering)))
                common += self._prefetched(which == "first" or n == 1)
                if self.tied and self.head and not self.chunked:  # waits for the embedding's gradient
                    common.append((1, _table_gradient(self.head, self.s.a)))
                computing = [*common, (1, unit.gathered), *([(1, buffer.inputs)] if buffer else [])]
                if layer.recompute:
                    where = f"recomputation of the {which} layer: {layer.recompute_at}"
                    yield Snapshot(where, (*computing, (1, layer.recompute), (1, self.x)))
                yield Snapshot(f"backward of the {which} layer: {layer.backward_at}", (*computing, (1, backward)))
                if not in_place:
                    end = (*computing, (1, self.x), (1, unit.unreduced))
                    yield Snapshot(f"end of the {which} layer's backward", end)
                if not self.piped:
                    for where, group in self._reduction(unit, at):
                        yield Snapshot(f"reducing the {which} layer: {where}", (*common, (1, self.x), (1, group)))

    def _embedding(self) -> Iterator[Snapshot]:
        unit = self.first
        if not unit:
            return
        if self.tied and self.chunked:
            unit = self._buffers(_one_table(unit.unit))
        end = (1, activations.embedded(self.plan, self.shape, self.training).backward)
        for at in self.passes:
            common = (*self._standing(at, max(self.counts, default=0)), end)
            if self.piped:
                if not self.stays:
                    again = (*common, *_gathered(self.units), (1, unit.flat), (1, unit.copied))
                    yield Snapshot("gathering the embedding for its backward", again)
                yield Snapshot("backward of the embedding", (*common, *_gathered(self.units), (1, unit.unreduced)))
            else:
                for where, group in self._reduction(unit, at):
                    yield Snapshot(f"reducing the embedding: {where}", (*common, (1, group)))

    def _sums(self) -> Iterator[Snapshot]:
        """A pipeline's reductions after its last micro-batch, in the model's order."""
        for index, (n, unit) in enumerate(self.units if self.piped else []):
            waiting = [(n - 1, unit), *self.units[index + 1 :]]
            common: _Terms = [(1, self.always), *((m, other.summed) for m, other in waiting), *_gathered(waiting)]
            common += [(m, other.reduced) for m, other in self.units[:index]]
            if held := self._holds(later=False):
                common += [(m, other.outputs) for m, other in self.units[:index]]
            for where, group in reduction(unit, summed=True, held=held):
                yield Snapshot(f"reducing a stage's sums: {where}", (*common, (1, group)))

    def _optimizer(self) -> Iterator[Snapshot]:
        found: _Terms = []
        for n, unit in self.units:
            found += [(n, unit.parameters), (n, unit.reduced), (n, unit.moments)]
            if self.training.optimizer == "foreach":
                found.append((n, unit.roots))
        yield Snapshot("optimizer step", (*found, (1, self._tables())))

    def _kept_by_part(self) -> dict[str, float]:
        terms = [*self._kept(self.counts), (1, self.beside)]
        if self.head:
            terms.append((1, activations.loss(self.plan, self.shape, self.training).after_forward))
        return {part: size for part, size in Snapshot("", tuple(terms)).by_part().items() if size}

    def _letters(self) -> dict[str, float]:
        names = "BSTtDKHGFVa" + ("EkMmNRc" if self.shape.num_experts else "")
        letters = {name: getattr(self.s, name).value for name in names}
        letters |= {"p": self.training.param_bytes, "r": self.training.reduce_bytes, "ep": self.plan.ep}
        for _, buffered in self.units:
            unit = buffered.unit
            letters[f"p({unit.name})"] = unit.owned
            for part in unit.parts:
                letters |= {f"P({part.name})": part.gathered, f"P(last of {part.name})": part.last}
                letters[f"P(cast of {part.name})"] = part.cast
                if part.split:
                    letters[f"P(split of {part.name})"] = part.split
                if part.held != unit.owned:
                    letters[f"q({part.name})"] = part.held
        return letters


def _table_gradient(head: Buffers, each: Quantity) -> Entry:
    return Entry("gradient buffers", "gradient of the head", head.unit.parts[0].lasts(each))


def _gathered(units: _Units) -> _Terms:
    return [(n, unit.gathered) for n, unit in units if n]


def _less(units: _Units, one: Buffers | None) -> _Units:
    """These units, one of `one` less."""
    return [(n - (unit is one), unit) for n, unit in units]


@lru_cache(maxsize=1024)
def _added_in_place(backward: Group) -> Group:
    """A layer's backward where each parameter's gradient is added to an earlier micro-batch's at once: one at a time, the largest."""
    entries = [entry for _, entry in backward.terms if isinstance(entry, Entry)]
    gradients = sorted((e for e in entries if e.part == "gradient buffers"), key=lambda entry: entry.bytes)
    return Group.of(*(e for e in entries if e not in gradients[:-1]))


@lru_cache(maxsize=1024)
def _one_table(head: Unit) -> Unit:
    """What is reduced at the end of a chunked loss: the head's table, without the final norm (and, tied, without the embedding)."""
    part = head.parts[0]
    return replace(
        head, parts=(replace(part, name=f"table of {part.name}", held=-(-part.last // part.ranks), gathered=part.last),)
    )
