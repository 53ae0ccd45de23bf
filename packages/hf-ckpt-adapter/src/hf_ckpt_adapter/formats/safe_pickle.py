"""Unpickle what a checkpoint's descriptions consist of, and nothing else.

A pickle is a program. This one may build records of a fixed list and call no other code; a fixed list of opcodes keeps
its memory in proportion to its bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch

from .dcp_records import Index, are_sizes

__all__ = ["safe_unpickle"]

# What pickles of plain records of names, numbers, tuples, lists and dicts consist of.
_OPCODES = """
    PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET POP
    NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
    GLOBAL STACK_GLOBAL REDUCE BUILD NEWOBJ BINPERSID
""".split()  # noqa: SIM905
_CODES = [getattr(pickle, name)[0] for name in _OPCODES]


class _Refused(ValueError):
    """A refusal that already says what and where."""


class _Opcodes(dict[int, Callable[[Any], None]]):
    """Opcode -> what reads it."""

    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise ValueError(f"opcode {bytes([code])!r} is not among those that records need")


class _Unpickler(pickle._Unpickler):
    """The standard library's reader in Python, with the opcodes above and no others.

    A pickle can do harm with allowed classes too, and does not here: BUILD changes records, never a class or a
    function; a key is a name or a plain `Index`, since the hash of tuples in tuples in tuples can take forever.
    """

    def __init__(
        self,
        data: bytes,
        allowed: Mapping[tuple[str, str], Any],
        what: str,
        persistent_load: Callable[[Any], Any] | None,
    ) -> None:
        file = io.BytesIO(data)
        super().__init__(file)
        self._allowed, self._what, self._persistent_load = allowed, what, persistent_load
        # The library's own loop reads through a Python function for each byte; this is as it is otherwise.
        self.read, self.readline = file.read, file.readline
        self.metastack: list[list[Any]] = []
        self.stack: list[Any] = []
        self.append = self.stack.append

    def load(self) -> Any:
        try:
            while True:
                self.dispatch[self.read(1)[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value

    def load_frame(self) -> None:
        self.read(8)  # a hint for readers that buffer

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._allowed:
            return self._allowed[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None  # getattr would import what torch imports late
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _Refused(f"{self._what} wants to load {module}.{name}, which no checkpoint needs. Refused.")

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent_load is None:
            raise _Refused(f"{self._what} refers to an outside object. Refused.")
        return self._persistent_load(pid)

    def load_build(self) -> None:
        target = self.stack[-2]
        if isinstance(target, type) or not is_dataclass(target):
            raise _Refused(f"{self._what} wants to change what is no record of its own. Refused.")
        super().load_build()  # type: ignore[misc]

    def load_setitem(self) -> None:
        self._check_keys(self.stack[-2:-1])
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        self._check_keys(self.stack[::2])
        super().load_setitems()  # type: ignore[misc]

    def _check_keys(self, keys: list[Any]) -> None:
        for key in keys:
            plain = type(key) is str or (
                type(key) is Index and type(key.fqn) is str and (key.offset is None or are_sizes(key.offset))
            )
            if not plain:
                raise _Refused(f"{self._what} has a {type(key).__name__} where a name is expected. Refused.")

    dispatch = _Opcodes({code: pickle._Unpickler.dispatch[code] for code in _CODES})
    dispatch[pickle.FRAME[0]] = load_frame
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems


def safe_unpickle(
    data: bytes,
    allowed: Mapping[tuple[str, str], Any],
    what: str,
    persistent_load: Callable[[Any], Any] | None = None,
) -> Any:
    """Unpickle `data` using only the globals in `allowed` (and torch dtypes).

    Raises:
        ValueError: naming `what` and the refused class or opcode, or for a broken pickle. Memory stays
            proportional to `data`. What comes back may still be nested without end: print types of it, not values.
    """
    try:
        return _Unpickler(data, allowed, what, persistent_load).load()
    except _Refused:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise ValueError(f"{what} is broken: {type(error).__name__}: {str(error)[:200]}") from None
