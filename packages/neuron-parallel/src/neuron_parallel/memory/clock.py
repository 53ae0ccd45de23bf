"""How far a step has come: which units of FSDP have had their turn in which phase.

A stage's units stand in a chain: the embedding, the layers of each kind, the head. The forward pass takes them in this
order, the backward pass in the opposite one, and a pipeline's final reductions in the first order again. A lifetime
(lifetimes.py) begins and ends with an event: a unit reaches a phase. As many tensors of a row live as units have
reached its birth but not its death.
"""

from enum import IntEnum
from typing import NamedTuple

__all__ = ["AFTER", "BEFORE", "OWN", "Event", "Instant", "Phase", "reached"]


class Phase(IntEnum):
    """What happens to a unit, in order."""

    # Phases are parts of many keys, and an Enum's own hash is a call of Python code.
    __hash__ = int.__hash__

    START = 0
    """The step, or this micro-batch of it, has not begun."""
    BEGUN = 1
    """The unit's all-gather was begun while the unit before it still computes."""
    GATHER = 2
    FORWARD = 3
    LOSS = 4
    """The head alone."""
    TABLE = 5
    """The head alone: a chunked loss reduces the gradient of the head's table."""
    WAITING = 6
    """The unit waits for its backward pass."""
    REGATHER = 7
    BACKWARD = 8
    REDUCE = 9
    DONE = 10
    PASSES_OVER = 11
    """The last micro-batch went backward."""
    SUM = 12
    """A pipeline reduces the unit's gradients, which it summed over its micro-batches."""
    SUMMED = 13
    SUMS_OVER = 14
    OPTIMIZER = 15
    NEVER = 16


_SWEEPS = (
    (Phase.START,),
    (Phase.BEGUN, Phase.GATHER, Phase.FORWARD, Phase.LOSS, Phase.TABLE, Phase.WAITING),
    (Phase.REGATHER, Phase.BACKWARD, Phase.REDUCE, Phase.DONE),
    (Phase.PASSES_OVER,),
    (Phase.SUM, Phase.SUMMED),
    (Phase.SUMS_OVER,),
    (Phase.OPTIMIZER,),
    (Phase.NEVER,),
)
"""Phases that a unit goes through before the next unit has its turn."""
_SWEEP = {phase: number for number, phases in enumerate(_SWEEPS) for phase in phases}
_BACKWARD = _SWEEP[Phase.BACKWARD]

OWN, AFTER, BEFORE = "own", "after", "before"
"""Whose event it is: the unit's own, that of the unit whose turn is next, or that of the unit whose turn was before."""


class Event(NamedTuple):
    """A unit reaches a phase. `whose`: OWN, AFTER, BEFORE, or the name of a unit."""

    phase: Phase
    whose: str = OWN


class Instant(NamedTuple):
    """A moment of the step as far as lifetimes depend on it."""

    phase: Phase
    unit: str
    """The unit whose turn it is."""
    passed: int
    """Units of this name that had their turn in this sweep already."""
    chain: tuple[str, ...]
    """Names of the units, in the order of the forward pass."""


def reached(now: Instant, numbers: dict[str, int], unit: str, event: Event) -> int:
    """How many of the units of that name have had the event by now. `numbers`: how many units each name has."""
    if event.whose == OWN:
        return _passed(now, numbers, unit, event.phase)
    if event.whose not in (AFTER, BEFORE):
        return numbers[unit] if _passed(now, numbers, event.whose, event.phase) else 0
    if _SWEEP[event.phase] < _SWEEP[now.phase]:
        return numbers[unit]
    own = _passed(now, numbers, unit, event.phase)
    onward = -1 if _SWEEP[event.phase] == _BACKWARD else 1
    place = now.chain.index(unit) + (onward if event.whose == AFTER else -onward)
    neighbour = now.chain[place] if 0 <= place < len(now.chain) else None
    if event.whose == AFTER:
        # Of units of one name, each but the last has the next one after it; the last has the neighbour.
        begun = neighbour is not None and _passed(now, numbers, neighbour, event.phase) > 0
        return max(0, own - 1) + begun
    done = own > 0 if neighbour is None else _passed(now, numbers, neighbour, event.phase) == numbers[neighbour]
    return done + min(own, numbers[unit] - 1)


def _passed(now: Instant, numbers: dict[str, int], unit: str, phase: Phase) -> int:
    """How many of the units of that name have reached the phase."""
    sweep = _SWEEP[now.phase]
    if _SWEEP[phase] != sweep:
        return numbers[unit] if _SWEEP[phase] < sweep else 0
    behind = now.chain.index(now.unit) - now.chain.index(unit)
    if behind == 0:
        return now.passed + (now.phase >= phase)
    return numbers[unit] if (behind > 0) != (sweep == _BACKWARD) else 0
