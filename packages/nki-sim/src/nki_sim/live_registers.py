"""How many registers hold a value at once: what the compiler must fit into an engine's sequencer."""

from collections.abc import Sequence


def most_live(uses: Sequence[tuple[int, int]], loops: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The largest number of registers live at one position, and the register with which it was reached.

    A register lives from its first use to its last; one that comes into a loop from outside lives to the loop's end, since the
    next pass reads it again.

    Args:
        uses: (position, register) of every write and read, positions rising as the program is written.
        loops: (begin, end) positions of every loop.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, register in uses:
        first.setdefault(register, position)
        last[register] = position
    for begin, end in sorted(loops, key=lambda span: span[1] - span[0]):
        for register, position in last.items():
            if first[register] <= begin < position < end:
                last[register] = end
    events = sorted([(at, 1, r) for r, at in first.items()] + [(at, 2, r) for r, at in last.items()])
    live, best = 0, (0, 0)
    for _, kind, register in events:
        live += 1 if kind == 1 else -1
        if live > best[0]:
            best = (live, register)
    return best
