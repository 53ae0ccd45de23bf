"""What a loss is worth: the cross-entropy that counting gets on the same held-out tokens, in nats per token."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["bigram_cross_entropy", "unigram_cross_entropy"]

Documents = Sequence[npt.NDArray[np.integer]]


def unigram_cross_entropy(train: Documents, validation: Documents, vocab_size: int) -> float:
    """Add-one smoothed unigram: p(t) = (count(t) + 1) / (N + V). Targets are every token but each document's first."""
    log_p = _log_unigram(train, vocab_size)
    targets = np.concatenate([document[1:] for document in validation])
    return float(-log_p[targets].mean())


def bigram_cross_entropy(train: Documents, validation: Documents, vocab_size: int) -> float:
    """Witten-Bell interpolated bigram over the add-one unigram.

    p(t|s) = (count(s,t) + T(s) p(t)) / (count(s) + T(s)), T(s) = number of distinct followers of s: no free parameter
    (Witten and Bell, 1991; Chen and Goodman, 1998, section 2.5).
    """
    p = np.exp(_log_unigram(train, vocab_size))
    pairs: Counter[tuple[int, int]] = Counter()
    for document in train:
        pairs.update(zip(document[:-1].tolist(), document[1:].tolist(), strict=True))
    count, followers = np.zeros(vocab_size), np.zeros(vocab_size)
    for (first, _), n in pairs.items():
        count[first] += n
        followers[first] += 1
    total, tokens = 0.0, 0
    for document in validation:
        for first, second in zip(document[:-1].tolist(), document[1:].tolist(), strict=True):
            seen = followers[first] > 0
            mixed = (
                (pairs[first, second] + followers[first] * p[second]) / (count[first] + followers[first])
                if seen
                else p[second]
            )
            total -= math.log(mixed)
            tokens += 1
    return total / tokens


def _log_unigram(train: Documents, vocab_size: int) -> npt.NDArray[np.float64]:
    counts = sum((np.bincount(document[1:], minlength=vocab_size) for document in train), np.zeros(vocab_size))
    return np.log((counts + 1) / (counts.sum() + vocab_size))
