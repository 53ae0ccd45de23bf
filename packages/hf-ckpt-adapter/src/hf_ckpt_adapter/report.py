"""What a conversion did, for people (`summary`) and for scripts (`to_dict`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Report", "size_text"]


@dataclass
class Report:
    """Counts and names of everything that was read, written, changed or left behind.

    Bytes are tensor bytes, `bytes_resumed` those that an earlier run had finished. `missing` are parts that
    are allowed to be absent; anything else missing, or unexpected, is an error and not a line in a report.
    `left_out` counts state that is not weights, by kind. `not_finite` and `vanished` count, for each tensor, NaN and
    infinity that were written and numbers that the cast made zero.
    """

    source: str = ""
    out: str = ""
    layout: str = ""
    dtype: str = ""
    tensors_read: int = 0
    tensors_written: int = 0
    bytes_written: int = 0
    bytes_resumed: int = 0
    files: list[str] = field(default_factory=list)
    cast: dict[str, int] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    trimmed: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    not_finite: dict[str, int] = field(default_factory=dict)
    vanished: dict[str, int] = field(default_factory=dict)
    side_state: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return dataclasses.asdict(self)

    def summary(self) -> str:
        """A few lines that say what happened, warnings last."""
        speed = f", {size_text(self.bytes_written / self.seconds)}/s" if self.seconds > 0 else ""
        lines = [
            f"{self.source} -> {self.out}",
            f"  {self.tensors_read} tensors read, {self.tensors_written} written as {self.layout} in "
            f"{self.dtype}: "
            f"{size_text(self.bytes_written)} in {len(self.files)} file(s), {self.seconds:.1f} s{speed}",
        ]
        if self.bytes_resumed:
            lines.append(f"  resumed: {size_text(self.bytes_resumed)} were already there")
        lines += [f"  cast: {n} tensors {what}" for what, n in self.cast.items()]
        lines += [f"  trimmed: {n} padding rows of {name}" for name, n in self.trimmed.items()]
        if self.dropped:
            lines.append(f"  dropped: {len(self.dropped)} ({', '.join(self.dropped[:3])})")
        if self.left_out:
            lines.append("  left out, not weights: " + _counts(self.left_out))
        if self.side_state:
            lines.append(f"  native-only state in a side file: {len(self.side_state)} tensors")
        odd = (
            (self.not_finite, "are NaN or infinite"),
            (self.vanished, "are not zero in the source and are zero in the dtype written"),
        )
        lines += [
            f"  warning: {sum(counts.values())} numbers in {len(counts)} tensors, such as {next(iter(counts))}, {what}"
            for counts, what in odd
            if counts
        ]
        return "\n".join(lines + [f"  warning: {w}" for w in self.warnings])


def _counts(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({n} entries)" for name, n in sorted(counts.items()))


def size_text(count: float) -> str:
    """Bytes for people: 1.19 GB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
