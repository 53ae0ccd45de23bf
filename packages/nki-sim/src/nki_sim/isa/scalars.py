"""NKI 0.7's scalars: integers of the device that a kernel computes with in Python's own signs.

Arithmetic is recorded, not evaluated: `i * 4 + 1` becomes two instructions of the sequencers, in 32 bits that wrap.
"""

from typing import Any

import numpy as np

from nki_sim.errors import need
from nki_sim.instruction import HBM, REQUIRED, SBUF, Args, Compute, Tile, instruction
from nki_sim.machine import Machine
from nki_sim.program import tracer
from nki_sim.tensor import VirtualRegister

_OPERATORS = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply}


class NkiScalar(VirtualRegister):
    """One integer of 32 bits, computed on the device: an operand of + - *, a scalar_offset, a bound of nl.fori_loop.

    Comparisons are refused: NKI 0.7 records them, but what they give cannot be used.
    """

    dtype = "int32"

    def __add__(self, other: Any) -> "NkiScalar":
        return _compute("add", self, other)

    def __sub__(self, other: Any) -> "NkiScalar":
        return _compute("subtract", self, other)

    def __mul__(self, other: Any) -> "NkiScalar":
        return _compute("multiply", self, other)

    def __radd__(self, other: Any) -> "NkiScalar":
        return _compute("add", other, self)

    def __rsub__(self, other: Any) -> "NkiScalar":
        return _compute("subtract", other, self)

    def __rmul__(self, other: Any) -> "NkiScalar":
        return _compute("multiply", other, self)

    def __neg__(self) -> "NkiScalar":
        return _compute("subtract", 0, self)

    def __pos__(self) -> "NkiScalar":
        return self


def scalar_load(src: Any) -> NkiScalar:
    """A scalar with a tensor's single integer.

    Args:
        src: (1, 1) or (1,), int32, in SBUF or HBM. (NKI 0.7 also takes int64, which is not modelled.)

    Returns:
        The scalar.
    """
    scalar = tracer().register(NkiScalar)
    _load(scalar, src)
    return scalar


@instruction("Y", special=True, hidden=True, dst=REQUIRED, src=Tile(HBM | SBUF, ("int32",)))
def _load(a: Args) -> Compute:
    """Put a tensor's single int32 in a scalar."""
    need(a.src.size == 1, "shape", "a scalar holds one element; got {}", a.src)
    return lambda machine: _set(machine, a.dst, machine.value(a.src))


@instruction("Y", special=True, dst=Tile(HBM | SBUF, ("int32",), write=True), src=REQUIRED)
def scalar_store(a: Args) -> Compute:
    """Write a scalar to a tensor of one int32."""
    need(isinstance(a.src, NkiScalar), "operand", "{!r} is no scalar (nisa.scalar_load)", a.src)
    need(a.dst.size == 1, "shape", "a scalar is one element; got {}", a.dst)
    return lambda machine: machine.write(a.dst, np.asarray(machine.value(a.src)))


@instruction("Y", special=True, hidden=True, dst=REQUIRED, op=REQUIRED, left=REQUIRED, right=REQUIRED)
def _arithmetic(a: Args) -> Compute:
    """dst = left <op> right, in 32 bits that wrap."""
    operator = _OPERATORS[a.op]

    def execute(machine: Machine) -> None:
        wide = operator(np.int64(machine.value(a.left)), np.int64(machine.value(a.right)))
        _set(machine, a.dst, int(wide.astype(np.int32)))

    return execute


def _set(machine: Machine, scalar: NkiScalar, value: int) -> None:
    machine.registers[machine.core][scalar.number] = value


def _compute(op: str, left: Any, right: Any) -> NkiScalar:
    for value in (left, right):
        good = isinstance(value, NkiScalar) or (isinstance(value, (int, np.integer)) and -(2**31) <= value < 2**31)
        need(good, "operand", "arithmetic of scalars is with scalars and 32-bit integers; got {!r}", value)
    scalar = tracer().register(NkiScalar)
    _arithmetic(scalar, op, left, right)
    return scalar
