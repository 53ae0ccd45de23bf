"""Embedding and head of a tied model: which of the two is written, and that they are one matrix."""

from __future__ import annotations

from dataclasses import replace

from .formats.tensors import TensorSource
from .names.rows import Shape
from .names.table import EMBED, HEAD
from .options import Options
from .plan import Output, Plan, Read

__all__ = ["settle_tie", "with_witness"]


def settle_tie(plan: Plan, parts: dict[str, Shape], options: Options) -> str | None:
    """Decide whether the model is tied, and which of the two matrices is written.

    Args:
        plan: its `tie`, `notes` and `reading` are settled.
        parts: shapes of what will be written; the head goes or comes.
        options: the caller's choices.

    Returns:
        The head's stored name when the embedding has to be compared with it, otherwise None.

    Raises:
        ValueError: the config ties two matrices of different shapes.
    """
    if not plan.tie or HEAD not in parts:
        if plan.tie and plan.to_hub and options.head == "write" and EMBED in parts:
            parts[HEAD], plan.reading.runs[HEAD] = parts[EMBED], plan.reading.runs[EMBED]
        return None
    if EMBED not in parts:
        parts[EMBED], plan.reading.runs[EMBED] = parts[HEAD], plan.reading.runs[HEAD]
        plan.notes.append("the embedding is absent; taken from the tied lm_head")
    elif parts[HEAD] != parts[EMBED]:
        shapes = f"lm_head is {list(parts[HEAD])} and the embedding {list(parts[EMBED])}"
        raise ValueError(f"config.json ties the head, but {shapes}")
    if options.on_untied == "untie":
        plan.tie = False
        return None
    if not (plan.to_hub and options.head == "write"):
        del parts[HEAD]
    elif options.on_untied == "drop":
        plan.reading.runs[HEAD] = plan.reading.runs[EMBED]
    return plan.reading.runs[HEAD][0].tensor if options.on_untied == "fail" else None


def with_witness(output: Output, twin: str, vocab: int, source: TensorSource) -> Output:
    """The embedding, to be compared with the stored head `twin` while it is read.

    It stays as it is when both are one region of the files.
    """
    info = source.tensors[twin]
    same = getattr(source, "same_bytes", None)
    stored = output.reads[0].tensor
    if stored == twin or (same is not None and same(stored, twin)):
        return output
    if info.dtype != output.stored:
        raise ValueError(
            f"config.json ties the head, but {stored!r} is {output.stored} and {twin!r} is {info.dtype}. "
            "Choose with on_untied (--on-untied): untie or drop."
        )
    return replace(output, witness=(Read(twin, 0, vocab),))
