"""Tokenised documents as samples of one constant length, addressable by number.

Sample i of an epoch is a function of i alone, so any rank can build any sample, and "how many samples were seen" is all
the state there is: it holds for any number of ranks.

Shapes: S = sequence length, N = documents.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from .tokens import TokenStore

__all__ = ["IGNORE_INDEX", "Documents", "Packing", "Sample", "Samples", "SplitDocuments", "WholeDocuments", "pad"]

IGNORE_INDEX = -100
"""Label that the loss skips (torch's cross-entropy default)."""

Tokens = npt.NDArray[np.int64]

Packing = Literal["split", "whole", "none"]
"""split: documents one after the other, cut where a sample is full. whole: several to a sample, none cut. none: one
each.
"""


@dataclass(frozen=True)
class Sample:
    """One sequence: input_S[t] predicts labels_S[t]; positions_S restarts at 0 with each document."""

    input_S: Tokens
    positions_S: Tokens
    labels_S: Tokens


class Documents:
    """Some of the documents of some stores, as one sequence."""

    def __init__(self, parts: Sequence[tuple[TokenStore, npt.NDArray[np.int64]]]) -> None:
        self.stores = [store for store, _ in parts]
        self.store_N = np.repeat(np.arange(len(parts)), [len(chosen) for _, chosen in parts])
        self.index_N = np.concatenate([chosen for _, chosen in parts])
        self.sizes_N = np.concatenate([store.sizes_N[chosen] for store, chosen in parts])

    def __len__(self) -> int:
        return len(self.index_N)

    def tokens(self, document: int) -> npt.NDArray[np.int32]:
        """The document's token ids."""
        store = self.stores[self.store_N[document]]
        return store.tokens_T[store.slice_of(int(self.index_N[document]))]

    def pairs(self, document: int, begin: int = 0, end: int | None = None) -> Sample:
        """The document's (input, label) pairs [begin, end). It has one fewer than tokens: its last predicts nothing."""
        store = self.stores[self.store_N[document]]
        where = store.slice_of(int(self.index_N[document]))
        stop = where.stop if end is None else where.start + end + 1
        where = slice(where.start + begin, stop)
        tokens = store.tokens_T[where].astype(np.int64)
        labels = tokens[1:]
        if store.learned_T is not None:
            labels = np.where(store.learned_T[where][1:], labels, IGNORE_INDEX)
        return Sample(tokens[:-1], np.arange(len(labels)), labels)


class Samples(Protocol):
    """Something that has samples by epoch and number."""

    @property
    def samples(self) -> int:
        """Number of samples in an epoch: the same in each."""

    def sample(self, epoch: int, index: int) -> Sample:
        """Sample `index` of `epoch`; IndexError outside [0, samples)."""


class SplitDocuments:
    """Sample i is the pairs [i*S, (i+1)*S) of the epoch's documents one after the other; `shuffle` reorders them each
    epoch.

    What is left at the end of an epoch is padded.
    """

    def __init__(self, documents: Documents, seq_len: int, *, shuffle: bool, seed: int = 0) -> None:
        self.documents, self.seq_len, self.shuffle, self.seed = documents, seq_len, shuffle, seed
        self._pairs = int((documents.sizes_N - 1).sum())
        self._epoch = -1

    @property
    def samples(self) -> int:
        """Samples of one epoch."""
        return -(-self._pairs // self.seq_len)

    def sample(self, epoch: int, index: int) -> Sample:
        """Return sample `index` of an epoch."""
        _check(index, self.samples)
        if epoch != self._epoch:
            self._order_N = _order(len(self.documents), epoch, self.shuffle, self.seed)
            self._ends_N = np.cumsum(self.documents.sizes_N[self._order_N] - 1)
            self._epoch = epoch
        begin, end = index * self.seq_len, min((index + 1) * self.seq_len, self._pairs)
        pieces = []
        which = int(np.searchsorted(self._ends_N, begin, side="right"))
        while begin < end:
            document = int(self._order_N[which])
            offset = begin - (int(self._ends_N[which]) - int(self.documents.sizes_N[document] - 1))
            take = min(int(self._ends_N[which]), end) - begin
            pieces.append(self.documents.pairs(document, offset, offset + take))
            begin += take
            which += 1
        return pad(pieces, self.seq_len)


class WholeDocuments:
    """No document is cut. `together` puts several into a sample, as many as fit; else each has one of its own, padded.

    What is together stays together; `shuffle` reorders the samples each epoch. Documents over S pairs are left out:
    `dropped` counts them.
    """

    def __init__(self, documents: Documents, seq_len: int, *, together: bool, shuffle: bool, seed: int = 0) -> None:
        self.documents, self.seq_len, self.shuffle, self.seed = documents, seq_len, shuffle, seed
        lengths_N = documents.sizes_N - 1
        fitting = np.flatnonzero(lengths_N <= seq_len)
        self.dropped = len(documents) - len(fitting)
        self._bins = _best_fit(fitting, lengths_N, seq_len) if together else [[int(n)] for n in fitting]
        self._epoch = -1

    @property
    def samples(self) -> int:
        """Samples of one epoch."""
        return len(self._bins)

    def sample(self, epoch: int, index: int) -> Sample:
        """Return sample `index` of an epoch."""
        _check(index, self.samples)
        if epoch != self._epoch:
            self._order = _order(self.samples, epoch, self.shuffle, self.seed)
            self._epoch = epoch
        return pad([self.documents.pairs(n) for n in self._bins[self._order[index]]], self.seq_len)


def pad(pieces: Sequence[Sample], seq_len: int) -> Sample:
    """One sample of length S from shorter pieces; the rest is a document of its own without labels.

    `[]`: nothing but that.
    """
    missing = seq_len - sum(len(piece.input_S) for piece in pieces)
    assert missing >= 0, f"{seq_len - missing} tokens in a sample of {seq_len}"
    rest = Sample(np.zeros(missing, np.int64), np.arange(missing), np.full(missing, IGNORE_INDEX))
    pieces = [*pieces, rest]
    return Sample(
        np.concatenate([piece.input_S for piece in pieces]),
        np.concatenate([piece.positions_S for piece in pieces]),
        np.concatenate([piece.labels_S for piece in pieces]),
    )


def _best_fit(fitting: npt.NDArray[np.int64], lengths_N: npt.NDArray[np.int64], room: int) -> list[list[int]]:
    """Best fit, longest first: each document goes where it leaves the least room, or opens a new bin. O(N log S)."""
    bins: list[list[int]] = []
    spaces: list[int] = []  # the distinct rooms left, ascending
    by_space: dict[int, list[int]] = {}
    for n in fitting[np.argsort(-lengths_N[fitting], kind="stable")].tolist():
        length = int(lengths_N[n])
        at = bisect.bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces[at]
            chosen = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[at]
        else:
            space, chosen = room, len(bins)
            bins.append([])
        bins[chosen].append(n)
        left = space - length
        if left:
            if left not in by_space:
                bisect.insort(spaces, left)
            by_space.setdefault(left, []).append(chosen)
    return bins


def _order(count: int, epoch: int, shuffle: bool, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(count) if shuffle else np.arange(count)


def _check(index: int, samples: int) -> None:
    if not 0 <= index < samples:
        raise IndexError(f"sample {index} of {samples}")
