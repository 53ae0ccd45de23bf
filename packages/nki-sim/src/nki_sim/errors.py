"""How a kernel is refused: one exception, naming the rule, the kernel's line, the values found and the fix."""

import contextlib
import difflib
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from nki_sim.rules import RULES

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


class Unproven(UserWarning):
    """A kernel does what no document forbids and no one has shown to work (a rule that is recorded by default)."""


class _Checks(NamedTuple):
    """One `with checks(...)`: which rules it decides about, and what was found."""

    record: frozenset[str]
    refuse: frozenset[str]
    findings: list[NkiError]


_checks: list[_Checks] = []


@contextlib.contextmanager
def checks(*, record: Sequence[str] = (), refuse: Sequence[str] = ()) -> Iterator[list[NkiError]]:
    """Say which rules are recorded instead of raised: `with checks(record=["race"]) as findings:`.

    Of nested contexts the innermost that names a rule decides about it. Recording is for looking at kernels one cannot
    change; what the hardware would do there is undefined, and the results are only one possibility.

    Args:
        record: rules whose breaches are noted in `findings` instead of raised at the first. A rule's name is the first
            word of its error; rules.py lists them all.
        refuse: rules that are raised although they are only recorded by default, or by an outer context.

    Raises:
        ValueError: a name that is no rule.
    """
    for name in (*record, *refuse):
        if name not in RULES:
            raise ValueError(f"{name!r} is no rule of nki-sim{near(name, RULES)}; docs/nki-sim.md lists them")
    _checks.append(_Checks(frozenset(record), frozenset(refuse), []))
    try:
        yield _checks[-1].findings
    finally:
        _checks.pop()


def near(name: str, known: Iterable[str]) -> str:
    """ ", did you mean ...?" for the known name most like this one, or nothing."""
    found = difflib.get_close_matches(name, list(known), 1, 0.6)
    return f", did you mean {found[0]!r}?" if found else ""


def refuse(rule: str, message: str, where: Where | None = None) -> None:
    """Raise NkiError, or note the finding where this rule is only recorded. Instruction and line come from `doing`."""
    title, line = doing[-1] if doing else ("", None)
    finding = NkiError(rule, f"{title}: {message}" if title else message, where or line or kernel_line())
    decides = next((c for c in reversed(_checks) if rule in c.record or rule in c.refuse), None)
    if decides is None and RULES[rule].recorded and not _checks:
        warnings.warn(f"{finding}", Unproven, stacklevel=2)
        return
    findings = decides.findings if decides else _checks[-1].findings if _checks else []
    if rule in decides.refuse if decides else not RULES[rule].recorded:
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


def misused(message: str) -> TypeError:
    """A TypeError that carries the kernel's line, to be raised."""
    return TypeError(f"{message} [{kernel_line()}]")


def kernel_line() -> Where | None:
    """The innermost line outside this package: where the kernel is."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back  # type: ignore[assignment]
    return Where(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame else None
