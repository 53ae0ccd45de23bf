"""Operators that instructions take as `op`: ALU operators and the Scalar Engine's activation functions, in float32.

nl.add and friends are values that instructions take; called, they are functions on tiles.
Sources: NKI 0.6, "Supported Math Operators" and "Supported Activation Functions" (nki.api.shared).
"""

from collections.abc import Callable
from math import pi, sqrt
from typing import Any, NamedTuple

import numpy as np

from nki_sim.errors import need

Function = Callable[..., Any]


FUNCTIONS: dict[str, Function] = {}  # tiles.py: what each operator does when it is called


class Op(NamedTuple):
    """A named operator: `alu` of two values (one when `unary`), `activation` of one; `identity` when it can reduce."""

    name: str
    alu: Any
    activation: Function | None
    identity: float | None
    bitvec: bool
    unary: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function of this name on tiles (tiles.py)."""
        return FUNCTIONS[self.name](*args, **kwargs)

    def __repr__(self) -> str:
        return f"nl.{self.name}"


def alu(op: Op, a: Any, b: Any, reverse: bool = False) -> Any:
    """a <op> b, or b <op> a."""
    return op.alu(a) if op.unary else op.alu(b, a) if reverse else op.alu(a, b)


def _erf(x: np.ndarray) -> np.ndarray:
    """Numerical Recipes 6.2's Chebyshev fit of erfc: relative error below 1.2e-7, float32's own precision."""
    c: tuple[float, ...] = (0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807)
    c += (-0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223)
    z = np.abs(x.astype(np.float64))
    t = 1 / (1 + z / 2)
    return (np.sign(x) * (1 - t * np.exp(-z * z + np.polyval(c, t)))).astype(x.dtype)


# Arguments that the Scalar Engine's polynomials are fitted for (Valid Input Range); beyond, results are invalid.
RANGES = {
    "sin": (-pi - 1e-3, pi + 1e-3),
    "arctan": (-pi / 2 - 1e-3, pi / 2 + 1e-3),
    "log": (2.0**-64, 2.0**64),
    "sqrt": (2.0**-116, 2.0**118),
    "rsqrt": (2.0**-87, 2.0**97),
    "reciprocal": (2.0**-42, 2.0**42),  # of its magnitude
}
TRN3_ONLY = ("abs_max", "abs_min")  # nl.abs_max: "NeuronCore-v4 (trn3) and newer"
UNLISTED = ("divide", "mod", "fmod", "bypass", "logical_not")  # NKI 0.6 knows the names; its ALU table has none of them


def need_range(op: "Op", x: np.ndarray) -> None:
    """Refuse arguments that an activation function is not fitted for. NaN passes: it is no range's."""
    if op.name in RANGES:
        low, high = RANGES[op.name]
        size = np.abs(x) if op.name == "reciprocal" else x
        bottom, top = np.fmin.reduce(size, axis=None), np.fmax.reduce(size, axis=None)
        wrong = bottom if bottom < low else top
        found = "{} takes {:.4g} to {:.4g} on the Scalar Engine, which does not reduce its argument; found {:.4g}"
        need(not (bottom < low or top > high), "activation-range", found, op.name, low, high, wrong)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _silu_dx(x: Any, k: float = 1.0) -> Any:
    return _sigmoid(k * x) * (1 + k * x * (1 - _sigmoid(k * x)))


def _softplus(x: Any) -> Any:
    return np.logaddexp(x, 0)


def _shift_right(a: np.ndarray, b: Any) -> np.ndarray:
    """Logical: zeros come in from the left; an arithmetic shift right is not supported."""
    unsigned = np.dtype(f"u{a.itemsize}")
    return np.right_shift(a.view(unsigned), np.asarray(b).astype(unsigned)).view(a.dtype)


def _truth(function: Function) -> Function:
    return lambda a, b: function(a != 0, b != 0)


_COMPARE = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
_LOGICAL = ("logical_and", "logical_or", "logical_xor")
_BITVEC = ("bitwise_and", "bitwise_or", "bitwise_xor", "invert", "left_shift", "right_shift")
_PLAIN = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "mod", "fmod")
_IDENTITY = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf, "logical_and": 1.0}
_IDENTITY |= {"logical_or": 0.0, "logical_xor": 0.0, "bitwise_and": -1, "bitwise_or": 0, "bitwise_xor": 0}
_UNARY: dict[str, Function] = {
    "abs": np.abs,
    "square": np.square,
    "relu": lambda x: np.maximum(x, 0),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
}
_ALU: dict[str, Function] = {n: getattr(np, n) for n in (*_PLAIN, *_COMPARE, *_BITVEC)} | _UNARY
_ALU |= {n: _truth(getattr(np, n)) for n in _LOGICAL} | {"logical_not": lambda x: x == 0, "bypass": lambda x: x}
_ALU["right_shift"] = _shift_right
_ALU["abs_max"] = lambda a, b: np.where(np.abs(a) > np.abs(b), a, b)
_ALU["abs_min"] = lambda a, b: np.where(np.abs(a) < np.abs(b), a, b)
_ACTIVATION = {n: getattr(np, n) for n in ("sqrt", "exp", "log", "arctan", "sign", "tanh")} | _UNARY
_ACTIVATION |= {
    "copy": lambda x: x,
    "sin": np.sin,
    "sigmoid": _sigmoid,
    "softplus": _softplus,
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "erf": _erf,
    "erf_dx": lambda x: 2 / sqrt(pi) * np.exp(-x * x),
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / sqrt(2))),
    "gelu_dx": lambda x: 0.5 * (1 + _erf(x / sqrt(2))) + x * np.exp(-x * x / 2) / sqrt(2 * pi),
    "gelu_apprx_tanh": lambda x: 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))),
    "gelu_apprx_sigmoid": lambda x: x * _sigmoid(1.702 * x),
    "gelu_apprx_sigmoid_dx": lambda x: _silu_dx(x, 1.702),
    "silu": lambda x: x * _sigmoid(x),
    "silu_dx": _silu_dx,
}
_ONE = (*_UNARY, "logical_not", "bypass", "invert")
OPS = {
    n: Op(n, _ALU.get(n), _ACTIVATION.get(n), _IDENTITY.get(n), n in _BITVEC, n in _ONE)
    for n in sorted({*_ALU, *_ACTIVATION, "average"})
}
