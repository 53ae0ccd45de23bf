"""How to convert: every choice that a caller has, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .formats.tensors import WEIGHT_DTYPES
from .names.table import HUB_LAYOUTS, Layout

__all__ = ["EXPERTS", "HEADS", "ON_UNTIED", "Options"]

EXPERTS = ("per-expert", "fused", "as-source")
HEADS = ("omit", "write")
ON_UNTIED = ("fail", "untie", "drop")


@dataclass(frozen=True)
class Options:
    """How to convert. Every field is a flag of `hf-ckpt convert`.

    Attributes:
        dtype: cast floating tensors to this; None keeps the config's dtype on export and the stored one on import.
        experts: `per-expert`, `fused` or `as-source`, for a Hugging Face folder.
        head: what becomes of a tied model's head: `omit` it (as the config implies) or `write` it too.
        on_untied: what happens when the config ties embedding and head and they differ: `fail`, `untie` (keep both, the
            config says untied) or `drop` the head.
        allow_missing_head: accept a backbone without lm_head whose config is untied.
        fit_config: take sizes from the tensors where the config disagrees, instead of refusing.
        trim_vocab: cut rows past the config's vocabulary whatever they hold; unless set, only rows of zeros are cut.
        max_shard_bytes: largest output file in bytes, unless one tensor alone is larger.
        pad_vocab_to: round the vocabulary up to a multiple of this, with zero rows (import).

    Raises:
        ValueError: a word or a number that means nothing.
    """

    dtype: torch.dtype | None = None
    experts: str = "per-expert"
    head: str = "omit"
    on_untied: str = "fail"
    allow_missing_head: bool = False
    fit_config: bool = False
    trim_vocab: bool = False
    max_shard_bytes: int = 5_000_000_000
    pad_vocab_to: int = 1

    def __post_init__(self) -> None:
        words = {"experts": EXPERTS, "head": HEADS, "on_untied": ON_UNTIED}
        for name, known in words.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")
        if self.dtype is not None and self.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"dtype is {self.dtype}; weights can be cast to {', '.join(map(str, WEIGHT_DTYPES))}")
        for name in ("max_shard_bytes", "pad_vocab_to"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")

    def refuse_idle(self, layout: Layout) -> None:
        """ValueError for an option that could change nothing in this layout: somebody meant something else."""
        to_hub = layout in HUB_LAYOUTS
        idle = {
            "experts (--expert-layout)": self.experts != "per-expert" and not to_hub,
            "head (--tied-head)": self.head != "omit" and not to_hub,
            "pad_vocab_to (--pad-vocab-to)": self.pad_vocab_to != 1 and to_hub,
        }
        for name, wrong in idle.items():
            if wrong:
                kind = "a Hugging Face folder, whose vocabulary is that of config.json" if to_hub else "TorchTitan"
                raise ValueError(f"{name} has no meaning in layout {layout.value!r}, for {kind}. Leave it out.")
