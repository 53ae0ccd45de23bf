"""What a run did that a device makes one pay for, with the line of Python that did it."""

import sys
from dataclasses import dataclass
from pathlib import Path

from neuron_emu.build import extension
from neuron_emu.rules import RULES

__all__ = ["Count", "counts", "report", "reset_counts"]


@dataclass(frozen=True)
class Count:
    """How often one line met one rule.

    Attributes:
        rule: the rule's name in RULES.
        detail: the operator, or what else was met.
        module: the Python module of the line; its file where no module has it.
        line: the line in that file.
        function: the function; "(backward)" behind it where the backward of that line is meant.
        amount: how often; for counts of bytes, how many.
    """

    rule: str
    detail: str
    module: str
    line: int
    function: str
    amount: int


def counts(rule: str | None = None) -> list[Count]:
    """All counts since the start or reset_counts(), or one rule's; the most frequent first."""
    modules = _modules_by_file()
    rows = [
        Count(name, detail, modules.get(file, file), line, function, amount)
        for name, detail, file, line, function, amount in extension().counts()
        if rule is None or name == rule
    ]
    return sorted(rows, key=lambda row: (row.rule, -row.amount, row.module, row.line, row.detail))


def reset_counts() -> None:
    """Count from 0 again. Signatures and graphs that were seen stay seen."""
    extension().reset_counts()


def report(lines_per_rule: int = 12) -> str:
    """The counts as text: a heading for each rule that was met, and its lines below."""
    rows = counts()
    text = [f"neuron (emulated): what this run did{'' if rows else ': nothing that counts'}"]
    for rule in RULES:
        mine = [row for row in rows if row.rule == rule.name]
        if not mine:
            continue
        text.append(f"{rule.name}: {sum(row.amount for row in mine):,}  ({rule.fact} {rule.source})")
        text += [
            f"  {row.amount:>10,}  {row.detail:<40} {row.module}:{row.line} {row.function}".rstrip()
            for row in mine[:lines_per_rule]
        ]
        if len(mine) > lines_per_rule:
            text.append(f"  and {len(mine) - lines_per_rule} more lines")
    return "\n".join(text)


def _modules_by_file() -> dict[str, str]:
    table: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and name != "__main__":
            table.setdefault(file, name)
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if isinstance(main, str):
        table.setdefault(main, Path(main).name)
    return table
