"""Names with numbers in them: their pattern in the table, and the order of the forward pass."""

from __future__ import annotations

import re

from .table import EMBED, HEAD

__all__ = ["abstract", "natural"]

_NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,3})(?=\.)")  # up to 9999; anything else is no layer or expert


def abstract(name: str) -> tuple[str, tuple[str, ...]]:
    """A name with `{}` in the place of its numbers, as the table spells it, and the numbers."""
    return _NUMBER.sub("{}", name), tuple(_NUMBER.findall(name))


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key: embedding, layers, norm, head, in the order of the forward pass; numbers go by value."""
    if name in (EMBED, "tok_embeddings.weight"):
        place = 0
    elif "layers." in name:
        place = 1
    else:
        place = 3 if name.endswith(HEAD) else 2
    return [(place, 0, "")] + [(0, int(s), "") if s.isdecimal() else (1, 0, s) for s in name.split(".")]
