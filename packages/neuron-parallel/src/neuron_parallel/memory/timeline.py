"""The moments of a training step on one core of a pipeline stage, from the embedding's gather to the optimizer.

A moment is an instant on the clock, at which lifetimes.py says what lives, and what lives at no other moment: the
tensors of an operation, of a gather, of a reduction. Of alike layers two have moments, the first and the last. Each
micro-batch is reduced on its own; a pipeline sums its gradients unsharded, and reduces unit by unit after its last
micro-batch.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, product
from typing import NamedTuple

from neuron_parallel.memory import activations
from neuron_parallel.memory.clock import Instant, Phase
from neuron_parallel.memory.fsdp_buffers import Buffers, reduction
from neuron_parallel.memory.lifetimes import EMBEDDING, HEAD
from neuron_parallel.memory.snapshot import Entry, Group, Memory, Snapshot
from neuron_parallel.memory.stage import LayerUnit, MicroBatch, Stage
from neuron_parallel.memory.symbols import Symbols
from neuron_parallel.model import ModelShape
from neuron_parallel.plan import ParallelPlan, Training

__all__ = ["Moment", "Timeline"]


class Moment(NamedTuple):
    """A moment of the step."""

    where: str
    micro_batch: MicroBatch
    now: Instant
    own: tuple[Group | Entry, ...]
    """What lives at this moment alone."""

    @property
    def bytes(self) -> float:
        """The sum of all tensors."""
        total = self.micro_batch.bytes(self.now)
        for item in self.own:
            total += item.bytes
        return total

    @property
    def snapshot(self) -> Snapshot:
        """The moment with each of its tensors."""
        return Snapshot(self.where, (*self.micro_batch.terms(self.now), *((1, item) for item in self.own)))


class Residual(NamedTuple):
    """What flows between layers, and its gradient: "x" into a layer, "y" out of the last one."""

    x: Entry
    y: Entry
    x_gradient: Entry
    y_gradient: Entry


@lru_cache(maxsize=4096)
def _residual(s: Symbols) -> Residual:
    size = s.t * s.D * s.a
    values = (Entry("activations", name, size) for name in ("x", "y"))
    return Residual(*values, *(Entry("working", f"gradient of {name}", size) for name in ("x", "y")))


class Timeline:
    """The moments of a step on one stage."""

    def __init__(self, plan: ParallelPlan, shape: ModelShape, training: Training, stage: int) -> None:
        self.stage = Stage(plan, shape, training, stage)
        self.residual = _residual(self.stage.s)

    def memory(self) -> Memory:
        """All moments, in order of time."""
        stage = self.stage
        return Memory(
            stage.number, tuple(moment.snapshot for moment in self.in_order()), _letters(stage), _kept_by_part(stage)
        )

    def in_order(self) -> Iterator[Moment]:
        """Every moment, in order of time."""
        return chain(
            self._forward(), self._loss(), self._backward(), self._embedding(), self._sums(), self._optimizer()
        )

    def largest_first(self) -> Iterator[Moment]:
        """Every moment. Those that are often the largest come first."""
        return chain(
            self._loss(), self._backward(), self._optimizer(), self._forward(), self._embedding(), self._sums()
        )

    def _forward(self) -> Iterator[Moment]:
        stage, at = self.stage, self.stage.first_pass
        gathers = stage.gathering
        if stage.embedding:
            unit, order = stage.embedding.unit, stage.chain()
            now = Instant(Phase.GATHER, EMBEDDING, 0, order)
            yield Moment("gathering the embedding", gathers, now, (unit.flat, unit.copied))
            if stage.ahead and stage.layers:
                layer = stage.layers[0]
                now = Instant(Phase.BEGUN, layer.name, 0, order)
                yield Moment("gathering the first layer ahead", gathers, now, (layer.unit.ahead,))
        for layer in stage.layers:
            yield from self._forward_of(layer, gathers, at)

    def _forward_of(self, layer: LayerUnit, gathers: MicroBatch, at: MicroBatch) -> Iterator[Moment]:
        stage, unit = self.stage, layer.unit
        others = [other for other in stage.layers if other is not layer]
        first, last = stage.chain(layer, *others), stage.chain(*others, layer)
        before = layer.number - 1

        def now(phase: Phase) -> Instant:
            return Instant(phase, layer.name, before, last)

        gathering = (self.residual.x, unit.flat, unit.copied)
        yield Moment("gathering a layer", gathers, now(Phase.GATHER), gathering)
        if stage.embedding and not stage.ahead:
            then = Instant(Phase.GATHER, layer.name, 0, first)
            yield Moment("gathering the first layer", gathers, then, gathering)
        if stage.ahead and layer.number > 1:
            yield Moment("gathering a layer ahead", gathers, now(Phase.BEGUN), (self.residual.x, unit.ahead))
        if stage.ahead and stage.head and not stage.tied:
            yield Moment(
                "gathering the head ahead", gathers, now(Phase.FORWARD), (self.residual.x, stage.head.unit.ahead)
            )
        own: list[Group | Entry] = [layer.tape.forward]
        if stage.training.checkpointing == "none":
            own += stage.mask()
        if stage.ahead and layer.number > 1:
            own.append(unit.flat)
        yield Moment(f"forward of a layer: {layer.tape.forward_at}", at, now(Phase.FORWARD), tuple(own))

    def _loss(self) -> Iterator[Moment]:
        stage, at = self.stage, self.stage.first_pass
        if not stage.head:
            return
        head, unit, s, order = stage.head, stage.head.unit, stage.s, stage.chain(*stage.layers[::-1])

        def now(phase: Phase) -> Instant:
            return Instant(phase, HEAD, 0, order)

        gathering = (unit.flat, unit.copied)
        if not stage.tied:
            # The head's gather has one part: the flat buffer of the layer before lives through it, also if it was begun
            # ahead.
            before = [stage.layers[0].unit.last_flat] if stage.ahead and stage.layers else []
            yield Moment("gathering the head", at, now(Phase.GATHER), (self.residual.y, *before, *gathering))
        for where, group in head.loss.moments:
            phase = Phase.FORWARD if where.startswith("head") else Phase.LOSS
            yield Moment(f"loss: {where}", at, now(phase), (group,))
        logits = Entry("logits", "gradient of logits", s.T * s.V * s.a)
        again = now(Phase.REGATHER)
        if stage.chunked:
            yield Moment("gathering the head for the final norm's backward", at, again, gathering)
        elif stage.resharded:
            yield Moment("gathering the head for its backward", at, again, (logits, *gathering))
        if stage.piped and not _added_in_place(unit, stage, at):
            yield Moment("end of the head's backward", at, again, (logits, head.table_gradient))
        if stage.piped or (stage.tied and not stage.chunked):
            return
        # The table of a chunked loss is reduced while everything else still lives.
        then = now(Phase.TABLE if stage.chunked else Phase.REDUCE)
        beside = [] if stage.chunked else [self.residual.y_gradient]
        for where, group in self._reduction(head.reduced_first, at, summed=stage.chunked):
            yield Moment(f"reducing the head: {where}", at, then, (*beside, group))

    def _reduction(self, unit: Buffers, at: MicroBatch, summed: bool = False) -> list[tuple[str, Group]]:
        return reduction(unit, summed, new=not at.later, held=self.stage.held(at.later))

    def _backward(self) -> Iterator[Moment]:
        for at, layer in product(self.stage.passes, self.stage.layers):
            others = [other for other in self.stage.layers if other is not layer]
            yield from self._backward_of("last", layer, at, 0, self.stage.chain(*others, layer))
            yield from self._backward_of("first", layer, at, layer.number - 1, self.stage.chain(layer, *others))

    def _backward_of(
        self, which: str, layer: LayerUnit, at: MicroBatch, passed: int, order: tuple[str, ...]
    ) -> Iterator[Moment]:
        stage, unit, tape = self.stage, layer.unit, layer.tape
        now = Instant(Phase.BACKWARD, layer.name, passed, order)
        if stage.piped and not stage.stays:
            again = now._replace(phase=Phase.REGATHER)
            for gathering in unit.gathering:
                yield Moment(f"gathering the {which} layer for its backward", at, again, (gathering,))
        if tape.recompute:
            where = f"recomputation of the {which} layer: {tape.recompute_at}"
            yield Moment(where, at, now, (tape.recompute, self.residual.x_gradient))
        in_place = _added_in_place(unit, stage, at)
        backward = _one_gradient_at_a_time(tape.backward) if in_place else tape.backward
        yield Moment(f"backward of the {which} layer: {tape.backward_at}", at, now, (backward,))
        if not in_place:
            yield Moment(f"end of the {which} layer's backward", at, now, (self.residual.x_gradient, unit.unreduced))
        if not stage.piped:
            then = now._replace(phase=Phase.REDUCE)
            for where, group in self._reduction(unit, at):
                yield Moment(f"reducing the {which} layer: {where}", at, then, (self.residual.x_gradient, group))

    def _embedding(self) -> Iterator[Moment]:
        stage = self.stage
        if not stage.embedding:
            return
        unit = stage.embedding.unit
        if stage.tied and stage.chunked and stage.head:
            unit = stage.head.reduced_first
        end = activations.embedded(stage.plan, stage.shape, stage.training).backward
        for at in stage.passes:
            now = Instant(Phase.BACKWARD, EMBEDDING, 0, stage.chain())
            if stage.piped:
                if not stage.stays:
                    again = now._replace(phase=Phase.REGATHER)
                    yield Moment("gathering the embedding for its backward", at, again, (end, unit.flat, unit.copied))
                yield Moment("backward of the embedding", at, now, (end, unit.unreduced))
            else:
                then = now._replace(phase=Phase.REDUCE)
                for where, group in self._reduction(unit, at):
                    yield Moment(f"reducing the embedding: {where}", at, then, (end, group))

    def _sums(self) -> Iterator[Moment]:
        """A pipeline's reductions after its last micro-batch, in the model's order."""
        stage = self.stage
        for name, _, unit in stage.parameters_of if stage.piped else []:
            now = Instant(Phase.SUM, name, 0, stage.chain())
            for where, group in reduction(unit, summed=True, held=stage.held(later=False)):
                yield Moment(f"reducing a stage's sums: {where}", stage.first_pass, now, (group,))

    def _optimizer(self) -> Iterator[Moment]:
        stage = self.stage
        roots: list[Group] = []
        if stage.training.optimizer == "foreach":
            roots = [Group((number, unit.roots)) for _, number, unit in stage.parameters_of]
        now = Instant(Phase.OPTIMIZER, stage.parameters_of[0][0], 0, stage.chain())
        yield Moment("optimizer step", stage.first_pass, now, tuple(roots))


def _added_in_place(unit: Buffers, stage: Stage, at: MicroBatch) -> bool:
    """Whether autograd itself adds a gradient to the sum of earlier micro-batches, since both have one dtype."""
    return stage.piped and at.later and unit.a.value == unit.r.value


@lru_cache(maxsize=1024)
def _one_gradient_at_a_time(backward: Group) -> Group:
    """A layer's backward pass where each parameter's gradient is added to an earlier micro-batch's at once: the largest
    lives alone.
    """
    entries = [entry for _, entry in backward.terms if isinstance(entry, Entry)]
    gradients = sorted((e for e in entries if e.part == "gradient buffers"), key=lambda entry: entry.bytes)
    return Group.of(*(e for e in entries if e not in gradients[:-1]))


def _kept_by_part(stage: Stage) -> dict[str, float]:
    """Bytes by part that one micro-batch leaves between its forward pass and its backward pass."""
    terms: list[tuple[int, Entry | Group]] = [(layer.number, layer.tape.kept) for layer in stage.layers]
    terms.append((1, stage.beside))
    if stage.head:
        terms.append((1, stage.head.loss.after_forward))
    return {part: size for part, size in Snapshot("", tuple(terms)).by_part().items() if size}


def _letters(stage: Stage) -> dict[str, float]:
    """What the symbols of the formulas stand for."""
    names = "BSTtDKHGFVa" + ("EkMmNRc" if stage.shape.num_experts else "")
    letters = {name: getattr(stage.s, name).value for name in names}
    letters |= {"p": stage.training.param_bytes, "r": stage.training.reduce_bytes, "ep": stage.plan.ep}
    for _, _, buffered in stage.parameters_of:
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
