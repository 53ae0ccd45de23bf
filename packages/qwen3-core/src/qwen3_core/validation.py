"""How a config says no: field, value and rule, in one sentence."""

import math
from collections.abc import Iterable
from typing import Any

__all__ = ["agree", "check", "is_count", "is_number"]


def check(name: str, value: object, rule: str, ok: bool) -> None:
    """Raise ValueError unless `ok`; `rule` completes the sentence that `name` begins."""
    if not ok:
        raise ValueError(f"Qwen3 config: {name} = {value!r} breaks the rule: {name} {rule}")


def is_count(value: object) -> bool:
    """An integer >= 1; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_number(value: object) -> bool:
    """A finite integer or float; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def agree(values: Iterable[Any]) -> bool:
    """All equal, or none there."""
    values = list(values)
    return all(value == values[0] for value in values)
