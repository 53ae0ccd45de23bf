"""How many rows of embedding and head are vocabulary, and how many only pad it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .formats.tensors import TensorInfo, TensorSource
from .names.rows import Piece, Shape
from .names.table import EMBED, HEAD
from .names.write import Target
from .options import Options
from .plan import Output, Plan, resolve
from .stream import blocks

__all__ = ["MAX_PADDING", "refuse_trained_rows", "size_vocabulary", "vocabulary"]

# The most rows that rounding a vocabulary up for tensor parallelism adds; with more, the config is wrong.
MAX_PADDING = 1024


def vocabulary(config: Mapping[str, Any], rows: int) -> int:
    """Rows of a stored embedding or head that are vocabulary; the rest is padding."""
    stated = config.get("vocab_size")
    return stated if type(stated) is int and 0 < rows - stated < MAX_PADDING else rows


def refuse_trained_rows(source: TensorSource, plan: Plan, options: Options) -> None:
    """ValueError when rows that would be cut as padding hold anything but zeros: somebody may have trained them."""
    for part, count in {} if options.trim_vocab else plan.trimmed.items():
        rows, cols = plan.reading.parts[part]
        reads = resolve(Target(part, (count, cols), (Piece(part, rows - count, count),)), plan.reading)
        assert reads[0].tensor is not None, part
        dtype = source.tensors[reads[0].tensor].dtype
        output = Output(part, TensorInfo(dtype, (count, cols)), dtype, reads)
        if any(tensor.any() for _, tensor in blocks(source, output, reads)):
            raise ValueError(
                f"{reads[0].tensor!r} has {count} rows more than the vocab_size {rows - count} of config.json, and "
                "they are "
                "not zero: are these tokens that were added and trained? Keep them by correcting vocab_size or with "
                "fit_config (--fit-config); cut them with trim_vocab (--trim-vocab)."
            )


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
