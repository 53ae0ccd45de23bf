"""What one core of a pipeline stage has: its units of FSDP, and the micro-batches that are in flight on it."""

from dataclasses import replace
from functools import lru_cache
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
from neuron_parallel.plan import ParallelPlan, Training, stage_layers

__all__ = ["LayerUnit", "MicroBatch", "Stage", "stays"]


def stays(plan: ParallelPlan, training: Training) -> bool:
    """Whether parameters stay gathered after their forward pass: until their unit's backward pass, in a pipeline until the step's end."""
    return training.reshard == "never" or (training.reshard == "default" and plan.pp > 1)


class EmbeddingUnit(NamedTuple):
    """The embedding; with tied weights its turns use the head's buffers."""

    unit: Buffers


class LayerUnit(NamedTuple):
    """The decoder layers of one kind: with experts, or without."""

    name: str
    unit: Buffers
    tape: Layer
    number: int


class HeadUnit(NamedTuple):
    """Final norm and head, and the loss behind them."""

    unit: Buffers
    loss: Loss
    reduced_first: Buffers
    """What is reduced before any layer: all of it, but with a chunked loss the head's table alone."""
    chunk_gradient: Entry
    """The table's gradient, to which the chunks of a loss add."""
    table_gradient: Entry


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
        self.stays = stays(plan, training)
        # With the experts in a part of their own, TorchTitan gathers the next layer ahead.
        self.ahead = plan.ep > 1
        self.chunked = training.loss_chunks > 1
        self.resharded = training.reshard == "always" and not self.chunked
        self.head = self._head() if self.last else None
        self.layers = self._layers()
        self.embedding = self._embedding()
        self.parameters_of = self._parameters_of()
        self.tables, self.beside = self._tables(), self._beside()

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
        table, name = unit.unit.parts[0], "gradient of the head"
        return HeadUnit(
            unit,
            activations.loss(self.plan, self.shape, self.training),
            first,
            Entry("gradient buffers", name, table.lasts(unit.r)),
            Entry("gradient buffers", name, table.lasts(unit.a)),
        )

    def _layers(self) -> list[LayerUnit]:
        shape = self.shape
        count = stage_layers(shape.num_hidden_layers, self.plan.pp)[self.number]
        moe = round(count * shape.moe_layers / shape.num_hidden_layers)
        kinds = (("layers with experts", True, moe), ("layers", False, count - moe))
        return [
            LayerUnit(
                name, self._buffers("layer", kind), activations.layer(self.plan, shape, self.training, kind), number
            )
            for name, kind, number in kinds
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
        """The names of the stage's units in the order of the forward pass, with the kinds of layers in the order given."""
        names = [layer.name for layer in layers or self.layers]
        return (*([EMBEDDING] if self.embedding else ()), *names, *([HEAD] if self.head else ()))

    def passes(self) -> list["MicroBatch"]:
        """The micro-batches that meet most on this stage."""
        in_flight = min(self.plan.pp - self.number, self.plan.micro_batches)
        later = self.plan.micro_batches > in_flight
        found = [MicroBatch(self, in_flight - 1, later, left=later)]
        # Where as many are in flight as there are, the first backward pass meets all of their activations and no gradients, the
        # second one micro-batch less and gradients.
        if in_flight > 1 and not later:
            found.append(MicroBatch(self, in_flight - 2, later=True, left=True))
        return found

    def gathering(self) -> "MicroBatch":
        """The micro-batch that gathers most. In a pipeline whose parameters stay gathered, the first one alone gathers."""
        if self.piped and self.stays:
            return MicroBatch(self, 0, later=False, left=False)
        in_flight = min(self.plan.pp - self.number, self.plan.micro_batches)
        return MicroBatch(self, in_flight - 1, later=self.plan.micro_batches > in_flight, left=False)

    def held(self, later: bool) -> bool:
        """Whether what was all-reduced over replicas is another tensor than the gradient: then FSDP2 holds it until the backward pass ends.

        It is the gradient itself, unless that is a sum over micro-batches or has another dtype.
        """
        return self.plan.dp_replicate > 1 and (later or self.training.reduce_bytes != self.training.param_bytes)

    def _tables(self) -> Group:
        s, moe = self.s, sum(layer.number for layer in self.layers if layer.name != "layers")
        found = [Entry("tables", "rope tables", sum(layer.number for layer in self.layers) * s.S * 2 * s.K * 4)]
        if moe:
            found.append(Entry("tables", "expert counts and biases", 2 * moe * s.E * 4))
        return Group.of(*found)

    def inputs(self, others: int) -> Group:
        """Inputs of the step; in a pipeline those of all micro-batches, and the buffers for what neighbours send.

        `others`: micro-batches in flight beside the one at work.
        """
        s = self.s
        batches = self.plan.micro_batches if self.piped else 1
        x, idle = s.t * s.D * s.a, batches - 1 - others
        found = [Entry("working", "tokens, positions, labels", 3 * batches * s.T * 8)]
        # Each micro-batch has a buffer, which keeps its gradient to the step's end.
        if self.number and idle:
            found.append(Entry("working", "received activations and their gradients", 2 * idle * x))
        if not self.last:
            found.append(Entry("working", "received gradients", batches * x))
        return Group.of(*found)

    def _beside(self) -> Group:
        """What a micro-batch keeps beside its layers' activations."""
        s = self.s
        x = s.t * s.D * s.a
        found: list[Entry] = []
        if not self.number:
            found += activations.embedded(self.plan, self.shape, self.training).kept
        elif not any(layer.tape.keeps_input for layer in self.layers):
            found.append(Entry("activations", "received activations", x))
        if not self.last:
            found.append(Entry("activations", "sent activations", x))
        # What is recomputed needs the mask again.
        if self.training.checkpointing != "none":
            found += self.mask()
        return Group.of(*found)

    def mask(self) -> list[Entry]:
        masked = self.training.attention == "masked"
        return [Entry("attention", "document mask", self.s.T * self.s.S)] if masked else []


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
    """What is reduced at the end of a chunked loss: the head's table, without the final norm (and, tied, without the embedding)."""
    part = head.parts[0]
    table = replace(part, name=f"table of {part.name}", held=-(-part.last // part.ranks), gathered=part.last)
    return replace(head, parts=(table,))
