"""How a kernel is refused: one exception, naming the rule, the kernel's line, the values found and the fix."""

import sys
from contextlib import contextmanager
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

__all__ = ["Finding", "NkiError", "Where", "checks", "kernel_line", "refuse"]

_PACKAGE = str(Path(__file__).parent)
compat: str | None = None  # "0.3" while install(compat="0.3") is in force: what that release accepted is not refused


class Where(NamedTuple):
    """A line of the kernel's source."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class NkiError(ValueError):
    """A rule of the hardware or of the language that the kernel breaks; `rule` is its stable name."""

    def __init__(self, rule: str, message: str, where: Where | None = None) -> None:
        self.rule, self.message, self.where = rule, message, where
        super().__init__(f"{rule}: {message}" + (f" [{where}]" if where else ""))


@dataclass(frozen=True)
class Finding:
    """A broken rule that was recorded instead of raised (see `checks`)."""

    rule: str
    message: str
    where: Where | None


@dataclass
class Checks:
    """Rules that are recorded rather than raised, and what they found."""

    recorded: frozenset[str] = frozenset()
    findings: list[Finding] = field(default_factory=list)


_checks = [Checks()]


@contextmanager
def checks(*, record: tuple[str, ...] | list[str] = ()) -> Iterator[list[Finding]]:
    """Record breaches of the named rules instead of raising at the first: `with checks(record=["race"]) as findings:`.

    A rule is named by the first word of its error. Recording is for looking at kernels one cannot change; what the
    hardware would do there is undefined, and the results are only one possibility.
    """
    _checks.append(Checks(frozenset(record)))
    try:
        yield _checks[-1].findings
    finally:
        _checks.pop()


def refuse(rule: str, message: str, where: Where | None = None) -> None:
    """Raise NkiError, or note the finding when this rule is only recorded."""
    where = where or kernel_line()
    active = _checks[-1]
    if rule not in active.recorded:
        raise NkiError(rule, message, where)
    finding = Finding(rule, message, where)
    if finding not in active.findings:
        active.findings.append(finding)


def unsupported(name: str, why: str) -> NoReturn:
    """What this simulator does not model is an error with its name, never a guess."""
    raise NotImplementedError(f"{name}: {why} [{kernel_line()}]")


def kernel_line() -> Where | None:
    """The innermost line outside this package: where the kernel is."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    return Where(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame else None
