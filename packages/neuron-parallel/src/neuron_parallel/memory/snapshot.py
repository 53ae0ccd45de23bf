"""What a memory report consists of: tensor groups with their formulas, the moments at which they live, and the table of
one.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from neuron_parallel.memory.quantity import Quantity

__all__ = ["PARTS", "Entry", "Group", "Memory", "Snapshot", "Term"]

PARTS = (
    "parameters",
    "gradients",
    "moments",
    "gathered parameters",
    "gradient buffers",
    "activations",
    "attention",
    "dispatch",
    "logits",
    "working",
    "tables",
)
"""Parts of a snapshot, in the order of the table."""


class Entry(NamedTuple):
    """A tensor group that lives at a moment."""

    part: str
    name: str
    size: Quantity

    @property
    def bytes(self) -> float:
        """Its size."""
        return self.size.value


class Group:
    """Tensors that come together so often that their sum is kept with them."""

    __slots__ = ("_terms", "bytes")

    def __init__(self, *terms: "Term") -> None:
        self._terms: tuple[Term, ...] | Callable[[], Iterable[Entry]] = terms
        self.bytes: float = sum(times * item.bytes for times, item in terms)

    @classmethod
    def of(cls, *entries: Entry) -> "Group":
        """A group of these entries, each of them once."""
        return cls(*((1, entry) for entry in entries))

    @classmethod
    def later(cls, size: float, entries: Callable[[], Iterable[Entry]]) -> "Group":
        """A group of so many bytes, whose entries are made when they are asked for.

        A search looks at thousands of sums and at few tables.
        """
        group = cls()
        group.bytes, group._terms = size, entries
        return group

    @property
    def terms(self) -> tuple["Term", ...]:
        """Its entries, and the groups in it."""
        if callable(self._terms):
            self._terms = tuple((1, entry) for entry in self._terms())
        return self._terms


Term = tuple[int, Entry | Group]
"""So many times that."""


class Snapshot(NamedTuple):
    """What lives on a core at one moment."""

    where: str
    terms: tuple[Term, ...]

    @property
    def bytes(self) -> float:
        """The sum of all tensors."""
        return sum(times * item.bytes for times, item in self.terms)

    @property
    def entries(self) -> list[Entry]:
        """Every tensor group, with its formula."""
        return [
            entry if times == 1 else Entry(entry.part, f"{times} x {entry.name}", times * entry.size)
            for times, entry in _flat(self.terms)
        ]

    def by_part(self) -> dict[str, float]:
        """Bytes of each part, all PARTS in order."""
        sums = dict.fromkeys(PARTS, 0.0)
        for times, entry in _flat(self.terms):
            sums[entry.part] += times * entry.bytes
        return sums

    def table(self) -> str:
        """A line for each entry: part, tensors, formula and MiB."""
        rows = [(e.part, e.name, str(e.size), f"{e.bytes / (1 << 20):,.1f}") for e in self._ordered()]
        rows = [("part", "tensors", "formula", "MiB"), *rows, ("sum", "", "", f"{self.bytes / (1 << 20):,.1f}")]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]:>{widths[3]}}".rstrip()
            for row in rows
        )

    def _ordered(self) -> list[Entry]:
        return sorted((e for e in self.entries if e.bytes), key=lambda e: (PARTS.index(e.part), -e.bytes))


def _flat(terms: Iterable[Term], outer: int = 1) -> Iterator[tuple[int, Entry]]:
    for times, item in terms:
        if times and isinstance(item, Entry):
            yield outer * times, item
        elif times and isinstance(item, Group):
            yield from _flat(item.terms, outer * times)


@dataclass(frozen=True)
class Memory:
    """The moments of a step on the pipeline stage that needs most, and what the symbols of their formulas stand for."""

    stage: int
    moments: tuple[Snapshot, ...]
    symbols: dict[str, float]
    kept: dict[str, float]
    """Bytes by part that one micro-batch leaves between forward and backward."""

    @cached_property
    def peak(self) -> Snapshot:
        """The largest moment."""
        return max(self.moments, key=lambda moment: moment.bytes)

    def largest(self, part: str) -> float:
        """The most bytes that `part` has at any moment."""
        return max(moment.by_part()[part] for moment in self.moments)
