"""How many rows of embedding and head are vocabulary, and how many only pad it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .names.rows import Shape
from .names.table import EMBED, HEAD
from .options import Options
from .plan import Plan

__all__ = ["MAX_PADDING", "size_vocabulary", "vocabulary"]

# The most rows that rounding a vocabulary up for tensor parallelism adds; with more, the config is wrong.
MAX_PADDING = 1024


def vocabulary(config: Mapping[str, Any], rows: int) -> int:
    """Rows of a stored embedding or head that are vocabulary; the rest is padding."""
    stated = config.get("vocab_size")
    return stated if type(stated) is int and 0 < rows - stated < MAX_PADDING else rows


def size_vocabulary(plan: Plan, parts: dict[str, Shape], options: Options) -> int:
    """Trim embedding and head to the config's vocabulary, and pad them to a multiple.

    Args:
        plan: its config and sizes are read; what is trimmed is noted in it.
        parts: shapes of what will be written, which get the new number of rows.
        options: the caller's choices.

    Returns:
        How many rows come from the source.

    Raises:
        ValueError: an export would not take so many rows for padding.
    """
    stored = plan.sizes.vocab_size
    vocab = stored if options.fit_config else vocabulary(plan.config, stored)
    if vocab != stored:
        plan.trimmed = {p: stored - vocab for p in (EMBED, HEAD) if p in parts}
    padded = vocab + -vocab % options.pad_vocab_to
    if padded - vocab >= MAX_PADDING:
        raise ValueError(
            f"a vocabulary of {vocab} padded to a multiple of {options.pad_vocab_to} gets {padded - vocab} rows; an "
            f"export takes fewer than {MAX_PADDING} for padding. Choose a smaller multiple (pad_vocab_to)."
        )
    for part in (EMBED, HEAD):
        if part in parts:
            parts[part] = (padded, *parts[part][1:])
    return vocab
