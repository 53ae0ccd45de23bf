"""Which tensors live when: a row for each kind of tensor, from the event at which it is born to the event at which it
dies.

A moment of the step is the sum of the rows that are alive in it (`Lifetimes.alive`) and of what lives in that moment
alone (timeline.py). `source` names the code that decides the row, in torch 2.14 and TorchTitan 0.3.0: FSDP2's
FSDPParamGroup and its communication context (torch.distributed.fsdp), the pipeline's stage
(torch.distributed.pipelining), TorchTitan's apply_fsdp_to_decoder and ChunkedLossWrapper. Rows without a source are
those that every training step has.
"""

from collections.abc import Iterator
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from neuron_parallel.memory.clock import AFTER, BEFORE, Event, Instant, Phase, reached

__all__ = ["EMBEDDING", "HEAD", "MICRO_BATCH", "Case", "Lifetime", "Lifetimes", "lifetimes"]

EMBEDDING, HEAD = "embedding", "head"
"""Names of units. With tied weights the embedding has no parameters of its own: its turn uses the head's."""
MICRO_BATCH = "micro-batch"
"""What a micro-batch has once on a stage, whatever its units."""


class Case(NamedTuple):
    """What decides the lifetimes on a pipeline stage for one micro-batch."""

    units: tuple[tuple[str, int], ...]
    """Names and numbers of the stage's units, in the order of the forward pass."""
    tied: bool
    piped: bool
    """The model is a pipeline of stages."""
    later: bool
    """Earlier micro-batches left gradients everywhere."""
    left: bool
    """The earlier micro-batches of a pipeline left parameters gathered."""
    stays: bool
    """Parameters stay gathered after their forward pass."""
    ahead: bool
    """A layer's all-gather begins while the layer before it computes."""
    chunked: bool
    resharded: bool
    """The head is resharded between its forward pass and its backward pass."""
    held: bool
    """FSDP2 holds reduced gradients until the backward pass ends (`Stage.held`)."""
    held_sums: bool
    """The same for a pipeline's sums."""


class Lifetime(NamedTuple):
    """One kind of tensor: there is one tensor (or one group of tensors) of it for each `per`."""

    name: str
    bytes: str
    """Where its size stands: an attribute of the unit named by `per` (timeline.py)."""
    born: Event
    dies: Event
    per: str
    source: str = ""


START, PASSES_OVER, SUMS_OVER, NEVER = map(Event, (Phase.START, Phase.PASSES_OVER, Phase.SUMS_OVER, Phase.NEVER))
GATHER, FORWARD, WAITING = map(Event, (Phase.GATHER, Phase.FORWARD, Phase.WAITING))
REGATHER, BACKWARD, REDUCE, DONE = map(Event, (Phase.REGATHER, Phase.BACKWARD, Phase.REDUCE, Phase.DONE))
SUM, SUMMED = map(Event, (Phase.SUM, Phase.SUMMED))


class Lifetimes:
    """The rows of a case, and how many tensors of each live at an instant."""

    def __init__(self, case: Case) -> None:
        self.rows = tuple(_rows(case))
        self.sizes = tuple((row.per, attrgetter(row.bytes)) for row in self.rows)
        """(unit, how to get the bytes of one tensor from it) of each row."""
        self._numbers = {**dict(case.units), MICRO_BATCH: 1}
        self._alive: dict[Instant, tuple[tuple[int, int], ...]] = {}

    def alive(self, now: Instant) -> tuple[tuple[int, int], ...]:
        """(row's number, how many of its tensors live) of each row that is alive."""
        found = self._alive.get(now)
        if found is None:
            counts = ((number, self._count(now, row)) for number, row in enumerate(self.rows))
            found = self._alive[now] = tuple((number, count) for number, count in counts if count)
        return found

    def _count(self, now: Instant, row: Lifetime) -> int:
        born = reached(now, self._numbers, row.per, row.born)
        return max(0, born - reached(now, self._numbers, row.per, row.dies)) if born else 0


@lru_cache(maxsize=4096)
def lifetimes(case: Case) -> Lifetimes:
    """One object for equal cases: a search meets thousands of layouts and few cases."""
    return Lifetimes(case)


def _rows(case: Case) -> Iterator[Lifetime]:
    yield Lifetime("rope tables, expert counts", "tables", START, NEVER, MICRO_BATCH)
    yield Lifetime("inputs, buffers between stages", "inputs", START, PASSES_OVER, MICRO_BATCH)
    yield Lifetime("kept beside the layers", "beside", START, PASSES_OVER, MICRO_BATCH)
    yield Lifetime("activations of other micro-batches in flight", "in_flight", START, PASSES_OVER, MICRO_BATCH)
    for unit, _ in case.units:
        if unit == EMBEDDING and case.tied:
            yield _flat(case, unit)
            continue
        yield Lifetime("parameters", "unit.parameters", START, NEVER, unit)
        yield Lifetime("moments", "unit.moments", START, NEVER, unit)
        yield from _gradients(case, unit)
        if unit == HEAD:
            yield from _head(case)
        else:
            yield from _gathered(case, unit)
            yield _flat(case, unit)
            if not case.stays:
                source = "FSDPParamGroup._backward_prefetch"
                begun = Event(Phase.BACKWARD, BEFORE)
                yield Lifetime("prefetched flat output", "unit.flat", begun, REGATHER, unit, source)
        if unit not in (EMBEDDING, HEAD):
            yield Lifetime("activations", "tape.kept", WAITING, REGATHER, unit)
            yield from _reduction(case, unit, "unit")


def _gradients(case: Case, unit: str) -> Iterator[Lifetime]:
    if not case.piped:
        # Both of a tied table's gradients are there when the embedding's is.
        done = Event(Phase.DONE, EMBEDDING) if case.tied and unit == HEAD else DONE
        born = START if case.later else done
        yield Lifetime("gradients", "unit.reduced", born, NEVER, unit, "FSDPParamGroup.post_backward")
        return
    yield Lifetime(
        "gradients summed over micro-batches",
        "unit.summed",
        START if case.later else DONE,
        SUM,
        unit,
        "pipelining's backward_maybe_with_nosync: set_requires_gradient_sync(False)",
    )
    yield Lifetime("gradients", "unit.reduced", SUMMED, NEVER, unit, "FSDPParamGroup.post_backward")
    if case.held_sums:
        yield Lifetime("reduced sums", "unit.outputs", SUMMED, SUMS_OVER, unit, "FSDPParamGroup._all_reduce_state")


def _gathered(case: Case, unit: str) -> Iterator[Lifetime]:
    """Gathered parameters of the embedding or of a layer."""
    name, size = "gathered parameters", "unit.gathered"
    if case.stays:
        end = SUM if case.piped else REDUCE
        source = "set_reshard_after_backward(False) in a pipeline" if case.piped else "reshard_after_forward=False"
        yield Lifetime(name, size, START if case.left else GATHER, end, unit, source)
        return
    yield Lifetime(name, size, GATHER, Event(Phase.GATHER, AFTER), unit, "FSDPParamGroup.post_forward")
    if case.piped:
        # A layer is gathered part by part: timeline.py counts its parts until the backward pass begins.
        born = REGATHER if unit == EMBEDDING else BACKWARD
        yield Lifetime(name, size, born, SUM, unit, "pipelining: set_reshard_after_backward(False)")
    elif unit != EMBEDDING:
        yield Lifetime(name, size, BACKWARD, REDUCE, unit, "FSDPParamGroup.pre_backward, post_backward")


def _flat(case: Case, unit: str) -> Lifetime:
    """The flat output of a unit's last all-gather in forward: the context refers to it until the next unit waits for
    its own.

    Begun ahead, the gather of a layer's last part finds the flat buffer of the layer before gone.
    """
    dies = Event(Phase.GATHER if case.ahead else Phase.FORWARD, AFTER)
    source = "FSDPParamGroup.wait_for_unshard: comm_ctx.all_gather_state"
    return Lifetime("flat all-gather output", "unit.last_flat", FORWARD, dies, unit, source)


def _head(case: Case) -> Iterator[Lifetime]:
    """Final norm and head; with tied weights the embedding too."""
    born = START if case.left else GATHER
    dies = SUM if case.piped else REDUCE
    if case.tied:
        born, dies = Event(Phase.GATHER, EMBEDDING), Event(Phase.BACKWARD, EMBEDDING)
    lives = [(born, Event(Phase.LOSS)), (REGATHER, dies)] if case.resharded else [(born, dies)]
    for start, end in lives:
        source = "apply_fsdp_to_decoder: norm and head are resharded for 'always' alone"
        yield Lifetime("gathered parameters", "unit.gathered", start, end, HEAD, source)
    yield Lifetime("kept by final norm and head", "loss.kept", FORWARD, REDUCE, HEAD)
    if case.chunked:
        source = "ChunkedLossWrapper: chunks add to one gradient"
        yield Lifetime("gradient of the table", "chunk_gradient", FORWARD, Event(Phase.TABLE), HEAD, source)
    elif case.tied:
        waits = Event(Phase.BACKWARD, EMBEDDING)
        source = "FSDPParamGroup.post_backward runs when both gradients of the table are there"
        yield Lifetime("gradient of the head", "table_gradient", BACKWARD, waits, HEAD, source)
    # Tied and unchunked, the head is reduced with the embedding. After a chunked loss of an untied head, the final
    # norm's reduction alone is in flight, which is left out.
    if case.tied == case.chunked:
        yield from _reduction(case, HEAD, "reduced_first")


def _reduction(case: Case, unit: str, of: str) -> Iterator[Lifetime]:
    """What a unit's reduction leaves behind; a pipeline reduces after all its passes."""
    if case.piped:
        return
    source = "FSDPParamGroup.post_backward: comm_ctx.reduce_scatter_states"
    yield Lifetime("reduce-scatter input in flight", f"{of}.inputs", DONE, Event(Phase.REDUCE, AFTER), unit, source)
    if case.held:
        source = "FSDPParamGroup._all_reduce_state, until finalize_backward"
        yield Lifetime("reduced gradients", f"{of}.outputs", DONE, PASSES_OVER, unit, source)
