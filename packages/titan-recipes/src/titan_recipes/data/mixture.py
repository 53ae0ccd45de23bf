"""Several sources of samples in one numbered stream, by weight: which source sample g comes from is a function of g."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from .packing import Sample, Samples

__all__ = ["Mixture"]

BLOCK = 10_000
"""Samples after which the pattern of sources repeats: weights hold exactly over a block, to 1/BLOCK."""


class Mixture:
    """K sources, of which source k gives weights[k] / sum(weights) of the samples, spread evenly.

    Each source goes through epochs of its own. `length` is the number of samples until the first source has given all
    of its own: where a pass over the data ends.
    """

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float], names: Sequence[str]) -> None:
        self.sources = sources
        counts = _apportion(weights, BLOCK if len(sources) > 1 else 1)
        for name, weight, count in zip(names, weights, counts, strict=True):
            if count == 0:
                raise UserError(
                    f"The weight {weight} of {name!r} is under 1/{BLOCK} of all: it would never be read. Raise it or "
                    "leave it out."
                )
        spread = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        self._source_of_slot = np.repeat(np.arange(len(counts)), counts)[np.argsort(spread, kind="stable")]
        self._slots = [np.flatnonzero(self._source_of_slot == k) for k in range(len(counts))]
        self._rank_of_slot = np.empty(len(spread), np.int64)
        for slots in self._slots:
            self._rank_of_slot[slots] = np.arange(len(slots))

    def locate(self, number: int) -> tuple[int, int]:
        """(source, how many of its samples came before) of sample `number`."""
        block, slot = divmod(number, len(self._source_of_slot))
        source = int(self._source_of_slot[slot])
        return source, block * len(self._slots[source]) + int(self._rank_of_slot[slot])

    def sample(self, number: int) -> Sample:
        """Return sample `number` of the stream."""
        source, index = self.locate(number)
        epoch, within = divmod(index, self.sources[source].samples)
        return self.sources[source].sample(epoch, within)

    @property
    def length(self) -> int:
        """Samples until the first source is through."""
        return min(self._number(k, source.samples) for k, source in enumerate(self.sources))

    def _number(self, source: int, index: int) -> int:
        """The stream's number of a source's sample `index`: the inverse of `locate`."""
        block, rank = divmod(index, len(self._slots[source]))
        return block * len(self._source_of_slot) + int(self._slots[source][rank])


def _apportion(weights: Sequence[float], total: int) -> npt.NDArray[np.int64]:
    """Whole numbers in the weights' proportion that add up to `total` (largest remainders)."""
    exact = np.array(weights, float) / sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]] += 1
    return counts
