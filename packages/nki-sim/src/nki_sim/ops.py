"""Operators that instructions take as `op`: ALU operators and the Scalar Engine's activation functions, in float32.

nl.add and friends are values here, not functions on tiles: instructions say where their operands live.
Sources: NKI API, "Supported Math Operators" and "Supported Activation Functions" (nki.api.shared, NKI 0.6).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import pi, sqrt
from typing import NoReturn

import numpy as np

from nki_sim.errors import refuse, unsupported

__all__ = ["OPS", "Op", "alu"]

Function = Callable[..., np.ndarray]


@dataclass(frozen=True)
class Op:
    """A named operator. `alu` has two inputs (one when `unary`), `activation` one."""

    name: str
    alu: Function | None = None
    activation: Function | None = None
    bitvec: bool = False
    unary: bool = False
    identity: float | None = None  # of a reduction
    reduce: Function | None = None

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        unsupported(
            f"nl.{self.name}(...)",
            "element-wise functions that allocate their result are not modelled; allocate a tile and use the nisa instruction",
        )

    def __repr__(self) -> str:
        return f"nl.{self.name}"


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _erf(x: np.ndarray) -> np.ndarray:
    """Abramowitz and Stegun 7.1.26 refined by one Newton step would cost more than it gives: the rational Chebyshev fit of
    Numerical Recipes 6.2 (erfc), relative error below 1.2e-7, is at float32's own precision."""
    z = np.abs(x.astype(np.float64))
    t = 1 / (1 + 0.5 * z)
    coefficients = (
        0.17087277,
        -0.82215223,
        1.48851587,
        -1.13520398,
        0.27886807,
        -0.18628806,
        0.09678418,
        0.37409196,
        1.00002368,
        -1.26551223,
    )
    return (np.sign(x) * (1 - t * np.exp(-z * z + np.polyval(coefficients, t)))).astype(x.dtype)


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + _erf(x / sqrt(2)))


def _gelu_dx(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + _erf(x / sqrt(2))) + x * np.exp(-x * x / 2) / sqrt(2 * pi)


def _silu_dx(x: np.ndarray, k: float = 1.0) -> np.ndarray:
    s = _sigmoid(k * x)
    return s * (1 + k * x * (1 - s))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, 0)


def _sin(x: np.ndarray) -> np.ndarray:
    if np.any(np.abs(x) > pi + 1e-3):
        refuse(
            "activation-range",
            f"sin takes [-pi, pi] and the Scalar Engine does not reduce its argument; found up to {np.abs(x).max():.4g}. Reduce it first",
        )
    return np.sin(x)


def _compare(function: Function) -> Function:
    return lambda a, b: function(a, b).astype(np.float32)


def _truth(function: Function) -> Function:
    return lambda a, b: function(a != 0, b != 0).astype(np.float32)


def _abs_pick(function: Function) -> Function:
    return lambda a, b: function(np.abs(a), np.abs(b))


_SIGMOID_GELU = 1.702  # gelu_apprx_sigmoid(x) = x * sigmoid(1.702 x)

_ALL = [
    Op("add", np.add, identity=0.0, reduce=np.add),
    Op("subtract", np.subtract, identity=0.0, reduce=np.subtract),
    Op("multiply", np.multiply, identity=1.0, reduce=np.multiply),
    Op("divide", np.divide),
    Op("maximum", np.maximum, identity=-np.inf, reduce=np.maximum),
    Op("minimum", np.minimum, identity=np.inf, reduce=np.minimum),
    Op("power", np.power),
    Op("abs_max", _abs_pick(np.maximum)),
    Op("abs_min", _abs_pick(np.minimum)),
    Op("mod", np.mod),
    Op("fmod", np.fmod),
    *(
        Op(name, _compare(getattr(np, name)))
        for name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
    ),
    Op("logical_and", _truth(np.logical_and), identity=1.0, reduce=_truth(np.logical_and)),
    Op("logical_or", _truth(np.logical_or), identity=0.0, reduce=_truth(np.logical_or)),
    Op("logical_xor", _truth(np.logical_xor), identity=0.0, reduce=_truth(np.logical_xor)),
    Op("logical_not", lambda a, *_: (a == 0).astype(np.float32), unary=True),
    Op("bitwise_and", np.bitwise_and, bitvec=True, reduce=np.bitwise_and),
    Op("bitwise_or", np.bitwise_or, bitvec=True, reduce=np.bitwise_or),
    Op("bitwise_xor", np.bitwise_xor, bitvec=True, reduce=np.bitwise_xor),
    Op("invert", lambda a, *_: np.invert(a), bitvec=True, unary=True),
    Op("left_shift", np.left_shift, bitvec=True),
    Op("right_shift", np.right_shift, bitvec=True),
    Op("average"),
    Op("bypass", lambda a, *_: a, unary=True),
    Op("copy", activation=lambda x: x),
    Op("abs", lambda a, *_: np.abs(a), np.abs, unary=True),
    Op("square", lambda a, *_: np.square(a), np.square, unary=True),
    Op("relu", lambda a, *_: np.maximum(a, 0), lambda x: np.maximum(x, 0), unary=True),
    Op("rsqrt", lambda a, *_: 1 / np.sqrt(a), lambda x: 1 / np.sqrt(x), unary=True),
    Op("reciprocal", lambda a, *_: 1 / a, lambda x: 1 / x, unary=True),
    Op("sqrt", activation=np.sqrt),
    Op("exp", activation=np.exp),
    Op("log", activation=np.log),
    Op("sin", activation=_sin),
    Op("arctan", activation=np.arctan),
    Op("sign", activation=np.sign),
    Op("tanh", activation=np.tanh),
    Op("sigmoid", activation=_sigmoid),
    Op("softplus", activation=_softplus),
    Op("mish", activation=lambda x: x * np.tanh(_softplus(x))),
    Op("erf", activation=_erf),
    Op("erf_dx", activation=lambda x: 2 / sqrt(pi) * np.exp(-x * x)),
    Op("gelu", activation=_gelu),
    Op("gelu_dx", activation=_gelu_dx),
    Op("gelu_apprx_tanh", activation=lambda x: 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))),
    Op("gelu_apprx_sigmoid", activation=lambda x: x * _sigmoid(_SIGMOID_GELU * x)),
    Op("gelu_apprx_sigmoid_dx", activation=lambda x: _silu_dx(x, _SIGMOID_GELU)),
    Op("silu", activation=lambda x: x * _sigmoid(x)),
    Op("silu_dx", activation=_silu_dx),
]
OPS = {op.name: op for op in _ALL}


def alu(op: Op, a: np.ndarray, b: np.ndarray | float | None, reverse: bool = False) -> np.ndarray:
    """a <op> b, or b <op> a."""
    if op.alu is None:
        raise ValueError(f"{op} is not an ALU operator")
    return op.alu(b, a) if reverse and not op.unary else op.alu(a, b)
