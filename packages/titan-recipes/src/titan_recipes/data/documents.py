"""The built-in documents, and the split of any documents into a training and a held-out part."""

import hashlib
import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..errors import UserError

__all__ = ["PYTHON_DOCS", "digest", "held_out", "python_docs"]

Digests = npt.NDArray[np.uint64]
Sizes = npt.NDArray[np.int64]

PYTHON_DOCS = "python-docs"
"""The built-in source: the language reference that every CPython ships, in English, about 0.4 MB."""


def python_docs() -> list[str]:
    """The sections of `pydoc_data.topics`, each paragraph kept once.

    Topics quote each other (the one on compound statements contains those on `if` and `while`), so whole topics would
    leak from the training part into the held-out one. Shorter topics keep the paragraph, longer ones lose it.
    """
    from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]

    seen: set[str] = set()
    documents = []
    for name in sorted(topics, key=lambda name: (len(topics[name]), name)):
        section: list[str] = []
        for paragraph in topics[name].split("\n\n"):
            if _HEADING.match(paragraph) and section:
                documents.append("\n\n".join(section))
                section = []
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                section.append(paragraph.strip("\n"))
        if section:
            documents.append("\n\n".join(section))
    return documents


_HEADING = re.compile(r"\s*\S[^\n]*\n[*=~^-]{3,}$")
"""A line of text with a line of punctuation under it: how pydoc renders a section's title."""


def digest(text: str) -> int:
    """64 bits that stand for a document: for finding duplicates and for choosing what is held out."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def held_out(sources: Mapping[str, tuple[Digests, Sizes]], share: float) -> list[npt.NDArray[np.bool_]]:
    """Return, for each source, True for the documents that are held out: those of the lowest digests, up to one bound
    for all.

    The bound is the least by which every source holds out at least `share` of its size. So the choice depends on the
    texts alone, not on their order or any seed, and a text that two sources have is on the same side in both. A share
    of 0 holds out nothing. Raises UserError, naming the source, when nothing of it would be left to train on.
    """
    if share <= 0:
        return [np.zeros(len(digests_N), bool) for digests_N, _ in sources.values()]
    bound = max(_bound(digests_N, sizes_N, share) for digests_N, sizes_N in sources.values())
    chosen = [digests_N <= bound for digests_N, _ in sources.values()]
    for name, chosen_N in zip(sources, chosen, strict=True):
        if chosen_N.all():
            raise UserError(
                f"{name} has {len(chosen_N)} document(s), too few to hold out {share:.0%} for validation.\n"
                "Use a file with a document a row or a folder of text files, or turn validation off: "
                "--dataloader.holdout 0 --validator.no-enable."
            )
    return chosen


def _bound(digests_N: Digests, sizes_N: Sizes, share: float) -> np.uint64:
    """The lowest digest up to which documents hold `share` of the size."""
    order_N = np.argsort(digests_N, kind="stable")
    last = int(np.searchsorted(np.cumsum(sizes_N[order_N]), share * sizes_N.sum()))
    return np.uint64(digests_N[order_N[min(last, len(order_N) - 1)]])
