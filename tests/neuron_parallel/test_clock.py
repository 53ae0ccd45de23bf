"""Contract: the clock counts units as a walk through the whole step would, for every instant and every event."""

import random

import pytest
from neuron_parallel.memory.clock import AFTER, BEFORE, OWN, Event, Instant, Phase, reached

SWEEPS = (
    (Phase.BEGUN, Phase.GATHER, Phase.FORWARD, Phase.LOSS, Phase.TABLE, Phase.WAITING),
    (Phase.REGATHER, Phase.BACKWARD, Phase.REDUCE, Phase.DONE),
    (Phase.SUM, Phase.SUMMED),
)


def walk(chain, numbers):
    """(phase, unit, its number in its turn) of the whole step, in order of time."""
    copies = [(unit, number) for unit in chain for number in range(numbers[unit])]
    for sweep, phases in enumerate(SWEEPS):
        turn = copies[::-1] if sweep == 1 else copies
        yield from ((phase, *copy) for copy in turn for phase in phases)


@pytest.mark.parametrize("seed", range(6))
def test_units_are_counted_as_a_walk_through_the_step_counts_them(seed):
    draw = random.Random(seed)
    chain = draw.sample(("a", "b", "c", "d"), draw.choice((1, 2, 3, 4)))
    numbers = {unit: draw.choice((1, 1, 2, 5)) for unit in chain}
    steps = list(walk(chain, numbers))
    when = {step: time for time, step in enumerate(steps)}
    copies = [(unit, number) for unit in chain for number in range(numbers[unit])]
    checked = 0
    for phase, unit, number in steps:
        sweep = next(i for i, phases in enumerate(SWEEPS) if phase in phases)
        passed = numbers[unit] - 1 - number if sweep == 1 else number
        now, time = Instant(phase, unit, passed, tuple(chain)), when[phase, unit, number]
        for event_sweep, phases in enumerate(SWEEPS):
            turn = copies[::-1] if event_sweep == 1 else copies
            for event in phases:
                own = [when[event, *copy] <= time for copy in turn]
                # Nothing comes after the last unit until the sweep is over; the first one goes with itself.
                after = [*own[1:], event_sweep < sweep]
                before = [own[0], *own[:-1]]
                for whose, had in ((OWN, own), (AFTER, after), (BEFORE, before)):
                    for other in chain:
                        expected = sum(had[i] for i, copy in enumerate(turn) if copy[0] == other)
                        assert reached(now, numbers, other, Event(event, whose)) == expected, (now, event, whose)
                        checked += 1
    assert checked > 400


def test_the_step_begins_before_and_ends_after_every_turn():
    now = Instant(Phase.FORWARD, "a", 0, ("a", "b"))
    numbers = {"a": 3, "b": 1, "other": 2}
    assert reached(now, numbers, "other", Event(Phase.START)) == 2
    assert reached(now, numbers, "other", Event(Phase.PASSES_OVER)) == 0
    assert reached(now._replace(phase=Phase.OPTIMIZER), numbers, "other", Event(Phase.SUMS_OVER)) == 2
    assert reached(now._replace(phase=Phase.OPTIMIZER), numbers, "b", Event(Phase.NEVER)) == 0


def test_the_event_of_a_named_unit_is_everybodys():
    now = Instant(Phase.BACKWARD, "a", 0, ("a", "b"))
    numbers = {"a": 3, "b": 1}
    assert reached(now, numbers, "a", Event(Phase.DONE, "b")) == 3  # b went backward before
    assert reached(now, numbers, "b", Event(Phase.REDUCE, "a")) == 0
