"""Contract of tiling.py: every row is in one slot, and the two cores have half the work each."""

from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nki_moe.hardware import TILE
from nki_moe.tiling import (
    COLUMN,
    EXPERT,
    FULL,
    MIDDLE,
    ROW,
    TAIL_ROW,
    TAIL_ROWS,
    TAILS,
    WEIGHTS,
    Routing,
    columns,
    lists,
    routing,
)


class Slot(NamedTuple):
    expert: int
    row: int
    column: int
    full: int
    tail: int


def slots(t: Routing, number: int) -> list[Slot]:
    """A list of the plan: whose tiles, where the full ones begin and how many, and the rows of the tail (0: none)."""
    table = t.plan[number].tolist()
    found = []
    for entry in table[1 : 1 + table[0][0]]:
        size = sum(flag * rows for flag, rows in zip(entry[TAILS:], TAIL_ROWS, strict=True))
        assert entry[MIDDLE] == max(entry[FULL] - 1, 0) and sum(entry[TAILS:]) <= 1
        found.append(Slot(entry[EXPERT], entry[ROW], entry[COLUMN], entry[FULL], size))
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1500), min_size=1, max_size=6), st.integers(0, 300), st.sampled_from([1, 2]))
def test_every_list_covers_its_rows_once_with_at_most_127_of_padding(counts: list[int], spare: int, cores: int) -> None:
    rows = max(1, sum(counts) + spare)
    t = routing(torch.tensor(counts), rows, None, None, cores)
    start, column = torch.tensor(counts).cumsum(0).tolist(), t.column_R.tolist()
    of_cores, of_one, of_several = lists(cores)
    load, store, real = t.tails[:, :, 0], t.tails[:, :, 1], t.factors[:, :, 0]  # (P, E, BLOCKS)

    def covered(slot: Slot) -> list[int]:
        e, n = slot.expert, counts[slot.expert]
        padding = slot.full * TILE + slot.tail - n
        assert padding <= 127
        written = [*range(slot.row, slot.row + slot.full * TILE)]
        if written:
            assert slot.column == column[slot.row]
        if slot.tail:
            table = [tensor[:, e].T.flatten().tolist() for tensor in (load, store, real)]
            kept = [r for r in table[1][: slot.tail] if r < rows]
            first = int(t.plan[of_cores[0] : of_cores[-1] + 1, 1:, TAIL_ROW][t.plan[:cores, 1:, EXPERT] == e].max())
            assert kept == list(range(first, start[e])) and sum(table[2][: slot.tail]) == len(kept)
            assert set(table[0][: slot.tail]) == set(kept)
            written += kept
        return written

    assert sorted(r for i in of_cores for s in slots(t, i) for r in covered(s)) == list(range(sum(counts)))
    several = slots(t, of_several)
    assert [s.expert for s in several] == [e for e, n in enumerate(counts) if n > TILE]
    assert all(len(covered(s)) == counts[s.expert] for s in several)
    alone = [s for i in of_one for s in slots(t, i)]
    assert sorted(s.expert for s in alone) == [e for e, n in enumerate(counts) if n <= TILE]
    assert all(not s.full and len(covered(s)) == counts[s.expert] for s in alone)
    assert not alone or max(map(len, (slots(t, i) for i in of_one))) <= -(-len(alone) // cores)
    assert max([c + 1 for c in column[: sum(counts)]], default=0) <= columns(rows, len(counts))
    cleared = t.clear[: int(t.plan[0, 0, 1])].flatten()
    assert sorted(r for r in cleared.tolist() if r < rows) == list(range(sum(counts), rows))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40_000), min_size=1, max_size=40))
def test_the_two_cores_of_a_pair_have_half_the_work_each(counts: list[int]) -> None:
    """The bound is a tile, with the weights of experts of few rows counted as theirs, also where one expert owns
    everything."""
    t = routing(torch.tensor(counts), max(1, sum(counts)), None, None, 2)
    work = [
        sum(s.full * TILE + (max(s.tail, WEIGHTS) if not s.full else s.tail) for s in slots(t, i)) for i in range(2)
    ]
    assert abs(work[0] - work[1]) <= TILE + WEIGHTS
    experts = [{s.expert for s in slots(t, i)} for i in range(2)]
    assert len(experts[0] & experts[1]) <= 1
