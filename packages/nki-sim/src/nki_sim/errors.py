"""How a kernel is refused: one exception, naming the rule, the kernel's line, the values found and the fix."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

_INSIDE = (str(Path(__file__).parent), contextlib.__file__)
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


class NotModelled(NotImplementedError, AttributeError):
    """A name that NKI may know and this simulator does not; hasattr() answers no."""


# What is being traced or executed now, innermost last: the instruction's name, and its line when it executes.
doing: list[tuple[str, Where | None]] = []

_recorded: list[tuple[frozenset[str], list[NkiError]]] = [(frozenset(), [])]


@contextlib.contextmanager
def checks(*, record: Sequence[str] = ()) -> Iterator[list[NkiError]]:
    """Record breaches of the named rules instead of raising at the first: `with checks(record=["race"]) as findings:`.

    A rule's name is the first word of its error. Recording is for looking at kernels one cannot change; what the hardware
    would do there is undefined, and the results are only one possibility.
    """
    _recorded.append((frozenset(record), []))
    try:
        yield _recorded[-1][1]
    finally:
        _recorded.pop()


def refuse(rule: str, message: str, where: Where | None = None) -> None:
    """Raise NkiError, or note the finding when this rule is only recorded. Instruction and line come from `doing`."""
    rules, findings = _recorded[-1]
    title, line = doing[-1] if doing else ("", None)
    finding = NkiError(rule, f"{title}: {message}" if title else message, where or line or kernel_line())
    if rule not in rules:
        raise finding
    if str(finding) not in map(str, findings):
        findings.append(finding)


def need(holds: object, rule: str, message: str, *values: object) -> None:
    """Refuse under `rule` unless it holds; values are put into the message only then."""
    if not holds:
        refuse(rule, message.format(*values))


def unsupported(name: str, why: str) -> NoReturn:
    """What this simulator does not model is an error with its name, never a guess."""
    raise NotModelled(f"{name}: {why} [{kernel_line()}]")


def kernel_line() -> Where | None:
    """The innermost line outside this package: where the kernel is."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back  # type: ignore[assignment]
    return Where(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame else None
