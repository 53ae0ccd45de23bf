"""Turning rules: each can be counted, refused or left out while a program runs."""

from collections.abc import Iterator
from contextlib import contextmanager

from neuron_emu import rules
from neuron_emu.build import extension
from neuron_emu.rules import Mode

__all__ = ["relax", "relaxed", "set_compile_delay", "set_rule"]


def set_rule(name: str, mode: Mode | str) -> None:
    """Refuse, count or leave out what a rule is about: Mode.REFUSE, Mode.COUNT, Mode.OFF, or their names.

    Raises:
        ValueError: there is no such rule or mode.
    """
    if isinstance(mode, str):
        if mode.upper() not in Mode.__members__:
            raise ValueError(f"mode {mode!r} is not known; choose off, count or refuse")
        mode = Mode[mode.upper()]
    rules.set_mode(name, mode)
    extension().set_mode(name, int(mode))


def relax(*names: str) -> None:
    """Let pass, and count, what these rules refuse. Raises ValueError for a name that is none."""
    for name in names:
        set_rule(name, Mode.COUNT)


@contextmanager
def relaxed(*names: str) -> Iterator[None]:
    """relax() for a while."""
    before = {name: rules.mode(name) for name in names}
    relax(*names)
    try:
        yield
    finally:
        for name, mode in before.items():
            set_rule(name, mode)


def set_compile_delay(seconds: float) -> None:
    """Let each new operator signature and each new graph take so long, as a compiler does."""
    extension().set_compile_delay(float(seconds))
