"""What one core of a pipeline stage has: its units of FSDP, and the micro-batches that are in flight on it."""

from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from neuron_parallel.memory import activations
from neuron_parallel.memory.activations import Layer, Loss
from neuron_parallel.memory.clock import Instant
from neuron_parallel.memory.fsdp_buffers import Buffers, buffers
from neuron_parallel.memory.fsdp_units import Unit, fsdp_unit
from neuron_parallel.memory.lifetimes import EMBEDDING, HEAD, MICRO_BATCH, Case, lifetimes
from neuron_parallel.memory.snapshot import Entry, Group, Term
from neuron_parallel.memory.symbols import Symbols
from neuron_parallel.model import ModelShape
from neuron_parallel.parameters import UnitName
from neuron_parallel.plan import ParallelPlan, Training, stage_layers, stays_gathered

__all__ = ["LayerUnit", "MicroBatch", "Stage"]


class EmbeddingUnit(NamedTuple):
    """The embedding; with tied weights its turns use the head's buffers."""

    unit: Buffers


class LayerUnit(NamedTuple):
    """The decoder layers of one kind: with experts, or without."""

    name: str
    experts: bool
    number: int
    unit: Buffers
    tape: Layer


class HeadUnit(NamedTuple):
    """Final norm and head, and the loss behind them."""

    unit: Buffers
    loss: Loss
    reduced_first: Buffers
    """What is reduced before any layer: the whole unit, or with a chunked loss the head's table alone."""

    @property
    def chunk_gradient(self) -> Entry:
        """The table's gradient, to which the chunks of a loss add, in the reduced dtype."""
        return Entry("gradient buffers", "gradient of the head", self.unit.unit.parts[0].lasts(self.unit.r))

    @property
    def table_gradient(self) -> Entry:
        """The table's gradient in the computed dtype."""
        return Entry("gradient buffers", "gradient of the head", self.unit.unit.parts[0].lasts(self.unit.a))


class Shared(NamedTuple):
    """What a micro-batch finds and leaves on the stage, whatever its units."""

    tables: Group
    inputs: Group
    beside: Group
    in_flight: Group


class Stage:
    """One core of a pipeline stage; without a pipeline there is one stage."""

    def __init__(self, plan: ParallelPlan, shape: ModelShape, training: Training, stage: int) -> None:
        self.plan, self.shape, self.training, self.number = plan, shape, training, stage
        self.s = Symbols.of(plan, shape, training)
        self.piped, self.tied, self.last = plan.pp > 1, shape.tie_word_embeddings, stage == plan.pp - 1
        self.stays = stays_gathered(plan, training)
        # With the experts in a part of their own, TorchTitan gathers the next layer ahead.
        self.ahead = plan.ep > 1
        self.chunked = training.loss_chunks > 1
        self.resharded = training.reshard == "always" and not self.chunked
        self.in_flight = min(plan.pp - stage, plan.micro_batches)
        # A micro-batch at work finds the gradients of those that went backward before.
        self.later = plan.micro_batches > self.in_flight
        self.head = self._head() if self.last else None
        self.layers = self._layers()
        self.embedding = self._embedding()
        self.parameters_of = self._parameters_of()
        number = {
            experts: sum(layer.number for layer in self.layers if layer.experts == experts) for experts in (True, False)
        }
        self.tables = _tables(self.s, number[True], number[False])
        self.beside = self._beside()

    def _buffers(self, name: UnitName, moe: bool = False) -> Buffers:
        how = self.training
        return buffers(
            fsdp_unit(self.shape, self.plan, name, moe), how.compute_bytes, how.reduce_bytes, how.param_bytes
        )

    def _head(self) -> HeadUnit:
        unit = self._buffers("head")
        first = unit
        if self.chunked:
            first = buffers(one_table(unit.unit), int(unit.a.value), int(unit.r.value), int(unit.p.value))
        return HeadUnit(unit, activations.loss(self.plan, self.shape, self.training), first)

    def _layers(self) -> list[LayerUnit]:
        shape = self.shape
        count = stage_layers(shape.num_hidden_layers, self.plan.pp)[self.number]
        moe = round(count * shape.moe_layers / shape.num_hidden_layers)
        kinds = (("layers with experts", True, moe), ("layers", False, count - moe))
        return [
            LayerUnit(
                name,
                experts,
                number,
                self._buffers("layer", experts),
                activations.layer(self.plan, shape, self.training, experts),
            )
            for name, experts, number in kinds
            if number
        ]

    def _embedding(self) -> EmbeddingUnit | None:
        if self.tied:
            return EmbeddingUnit(self.head.unit) if self.head else None
        return None if self.number else EmbeddingUnit(self._buffers("embedding"))

    def _parameters_of(self) -> list[tuple[str, int, Buffers]]:
        """(name, number, buffers) of the units that own parameters, in the model's order."""
        found = [(EMBEDDING, 1, self.embedding.unit)] if self.embedding and not self.tied else []
        found += [(layer.name, layer.number, layer.unit) for layer in self.layers]
        return [*found, (HEAD, 1, self.head.unit)] if self.head else found

    def chain(self, *layers: LayerUnit) -> tuple[str, ...]:
        """The names of the stage's units in the order of the forward pass, with the kinds of layers in the
        order given.
        """
        names = [layer.name for layer in layers or self.layers]
        return (*([EMBEDDING] if self.embedding else ()), *names, *([HEAD] if self.head else ()))

    @cached_property
    def first_pass(self) -> "MicroBatch":
        """The micro-batch that meets most activations of others."""
        return MicroBatch(self, self.in_flight - 1, self.later, left=self.later)

    @cached_property
    def passes(self) -> list["MicroBatch"]:
        """The micro-batches of which one meets most in its backward pass.

        Where as many are in flight as there are, the first one meets all of their activations and no gradients, the
        second one the activations of one micro-batch less, and gradients.
        """
        if self.in_flight == 1 or self.later:
            return [self.first_pass]
        return [self.first_pass, MicroBatch(self, self.in_flight - 2, later=True, left=True)]

    @cached_property
    def gathering(self) -> "MicroBatch":
        """The micro-batch that gathers most.

        In a pipeline whose parameters stay gathered, the first one alone gathers.
        """
        if not self.piped:
            return self.first_pass
        if self.stays:
            return MicroBatch(self, 0, later=False, left=False)
        return MicroBatch(self, self.in_flight - 1, self.later, left=False)

    def held(self, later: bool) -> bool:
        """Whether FSDP2 holds what it all-reduced over replicas until the backward pass ends.

        The all-reduced tensor is the gradient itself, unless that is a sum over micro-batches or has another dtype.
        """
        return self.plan.dp_replicate > 1 and (later or self.training.reduce_bytes != self.training.param_bytes)

    def inputs(self, others: int) -> Group:
        """Inputs of the step and buffers for what neighbours send, with so many micro-batches in flight beside the one
        at work.
        """
        batches = self.plan.micro_batches if self.piped else 1
        idle = batches - 1 - others if self.number else 0
        return _inputs(self.s, batches, idle, self.last)

    def _beside(self) -> Group:
        """What a micro-batch keeps beside its layers' activations."""
        embedded = () if self.number else activations.embedded(self.plan, self.shape, self.training).kept
        receives = self.number > 0 and not any(layer.tape.keeps_input for layer in self.layers)
        # What is recomputed needs the mask again.
        mask = self.mask() if self.training.checkpointing != "none" else ()
        return _kept_beside(self.s, embedded, receives, not self.last, mask)

    def mask(self) -> tuple[Entry, ...]:
        """The dense mask of a micro-batch's documents, where attention takes one."""
        return _mask(self.s) if self.training.attention == "masked" else ()


@lru_cache(maxsize=4096)
def _tables(s: Symbols, with_experts: int, without: int) -> Group:
    found = [Entry("tables", "rope tables", (with_experts + without) * s.S * 2 * s.K * 4)]
    if with_experts:
        found.append(Entry("tables", "expert counts and biases", 2 * with_experts * s.E * 4))
    return Group.of(*found)


@lru_cache(maxsize=4096)
def _inputs(s: Symbols, batches: int, idle: int, last: bool) -> Group:
    """`idle`: micro-batches whose received activations have a buffer and are not in flight. The buffer keeps its
    gradient to the step's end.
    """
    x = s.t * s.D * s.a
    found = [Entry("working", "tokens, positions, labels", 3 * batches * s.T * 8)]
    if idle:
        found.append(Entry("working", "received activations and their gradients", 2 * idle * x))
    if not last:
        found.append(Entry("working", "received gradients", batches * x))
    return Group.of(*found)


@lru_cache(maxsize=4096)
def _kept_beside(
    s: Symbols, embedded: tuple[Entry, ...], receives: bool, sends: bool, mask: tuple[Entry, ...]
) -> Group:
    x = s.t * s.D * s.a
    received = [Entry("activations", "received activations", x)] if receives else []
    sent = [Entry("activations", "sent activations", x)] if sends else []
    return Group.of(*embedded, *received, *sent, *mask)


@lru_cache(maxsize=4096)
def _mask(s: Symbols) -> tuple[Entry, ...]:
    return (Entry("attention", "document mask", s.T * s.S),)


class MicroBatch:
    """A micro-batch at work on a stage, with the tensors that it meets there."""

    def __init__(self, stage: Stage, others: int, later: bool, left: bool) -> None:
        """`others`: micro-batches in flight beside this one. `later`, `left`: what earlier ones left (Case)."""
        self.later = later
        units = [(layer.name, layer.number) for layer in stage.layers]
        self.lifetimes = lifetimes(
            Case(
                (*([(EMBEDDING, 1)] if stage.embedding else ()), *units, *([(HEAD, 1)] if stage.head else ())),
                stage.tied,
                stage.piped,
                later,
                left and stage.piped,
                stage.stays,
                stage.ahead,
                stage.chunked,
                stage.resharded,
                stage.held(later),
                stage.held(later=False),
            )
        )
        owners: dict[str, NamedTuple | None] = {layer.name: layer for layer in stage.layers}
        owners |= {EMBEDDING: stage.embedding, HEAD: stage.head}
        owners[MICRO_BATCH] = Shared(
            stage.tables,
            stage.inputs(others),
            Group((others + 1, stage.beside)),
            Group(*((layer.number * others, layer.tape.kept) for layer in stage.layers)),
        )
        self._each: list[Group | Entry] = [size(owners[unit]) for unit, size in self.lifetimes.sizes]
        self._bytes = [item.bytes for item in self._each]
        self._sums: dict[Instant, float] = {}

    def bytes(self, now: Instant) -> float:
        """The sum of all tensors that live at that instant."""
        found = self._sums.get(now)
        if found is None:
            each = self._bytes
            found = self._sums[now] = sum([count * each[row] for row, count in self.lifetimes.alive(now)])
        return found

    def terms(self, now: Instant) -> list[Term]:
        """The tensors that live at that instant."""
        return [(count, self._each[row]) for row, count in self.lifetimes.alive(now)]


@lru_cache(maxsize=1024)
def one_table(head: Unit) -> Unit:
    """What a chunked loss reduces at its end: the head's table, without final norm and tied embedding."""
    part = head.parts[0]
    table = replace(part, name=f"table of {part.name}", held=-(-part.last // part.ranks), gathered=part.last)
    return replace(head, parts=(table,))
