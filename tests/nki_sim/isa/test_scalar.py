"""The contract: activation functions with scale, bias and running sums, inside the ranges they are fitted for."""

from math import erf, pi

import ml_dtypes
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from sim_harness import hbm, randn, refused, run, sb

P, N = 16, 40
SIGMOID = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
FUNCTIONS = {
    "copy": lambda x: x,
    "square": np.square,
    "sigmoid": SIGMOID,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x * SIGMOID(x),
    "gelu": lambda x: x * (1 + np.vectorize(erf)(x / np.sqrt(2))) / 2,
    "gelu_apprx_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / pi) * (x + 0.044715 * x**3))),
    "gelu_apprx_sigmoid": lambda x: x * SIGMOID(1.702 * x),
    "tanh": np.tanh,
    "softplus": lambda x: np.log1p(np.exp(x)),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "erf": np.vectorize(erf),
    "exp": np.exp,
    "log": lambda x: np.log(np.abs(x)),
    "sqrt": lambda x: np.sqrt(np.abs(x)),
    "rsqrt": lambda x: 1 / np.sqrt(np.abs(x)),
    "reciprocal": lambda x: 1 / x,
    "sin": np.sin,
    "arctan": np.arctan,
    "sign": np.sign,
    "abs": np.abs,
}
DERIVATIVES = {"silu_dx": "silu", "gelu_dx": "gelu", "gelu_apprx_sigmoid_dx": "gelu_apprx_sigmoid", "erf_dx": "erf"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_activation_function_matches_its_definition(name):
    x = np.clip(randn(P, N), -3, 3) / (2 if name == "arctan" else 1)
    x = np.abs(x) if name in ("log", "sqrt", "rsqrt") else x
    got = run(lambda d, a: nisa.activation(d, getattr(nl, name), a), x, dst=((P, N), "float32"))
    np.testing.assert_allclose(got, FUNCTIONS[name](x.astype(np.float64)), rtol=2e-6, atol=5e-7)


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_match_finite_differences(name):
    x = np.clip(randn(P, N), -3, 3).astype(np.float64)
    f, h = FUNCTIONS[DERIVATIVES[name]], 1e-5
    got = run(lambda d, a: nisa.activation(d, getattr(nl, name), a), x.astype(np.float32), dst=((P, N), "float32"))
    np.testing.assert_allclose(got, (f(x + h) - f(x - h)) / (2 * h), rtol=1e-4, atol=1e-5)


def test_activation_applies_scale_then_bias_as_columns_or_numbers():
    x, s, b = randn(P, N), randn(P, 1, seed=1), randn(P, 1, seed=2)
    got = run(lambda d, a, c, e: nisa.activation(d, nl.exp, a, bias=e, scale=c), x, s, b, dst=((P, N), "float32"))
    np.testing.assert_allclose(got, np.exp(x * s + b), rtol=1e-6)
    got = run(lambda d, a: nisa.activation(d, nl.copy, a, bias=1.0, scale=0.5), x, dst=((P, N), "bfloat16"))
    assert got.tobytes() == (x * np.float32(0.5) + np.float32(1)).astype(ml_dtypes.bfloat16).tobytes()


def test_activation_sums_persist_in_the_registers_and_before_rounding():
    x = randn(P, N)
    cmd = nisa.reduce_cmd

    def body(d, a):
        narrow = nl.ndarray((P, N), "bfloat16")
        nisa.activation(narrow, nl.exp, a, reduce_cmd=cmd.reset_reduce)
        nisa.activation(narrow, nl.square, a, reduce_op=nl.add, reduce_res=d, reduce_cmd=cmd.reduce)

    np.testing.assert_allclose(
        run(body, x, dst=((P, 1), "float32"))[:, 0], np.exp(x).sum(1) + (x * x).sum(1), rtol=1e-5
    )

    def reduce(d, a):
        nisa.activation_reduce(nl.ndarray((P, N), "float32"), nl.exp, a, nl.add, d, scale=2.0)

    np.testing.assert_allclose(run(reduce, x, dst=((P, 1), "float32"))[:, 0], np.exp(2 * x).sum(1), rtol=1e-5)


RANGES = [
    ("sin", 9.0),
    ("arctan", 2.0),
    ("log", 0.0),
    ("sqrt", -1.0),
    ("sqrt", 0.0),
    ("rsqrt", 0.0),
    ("reciprocal", -(2.0**43)),
]


@pytest.mark.parametrize(("name", "value"), RANGES)
def test_an_argument_outside_a_functions_range_is_refused_rather_than_answered(name, value):
    body = lambda: nisa.activation(sb(8, 4), getattr(nl, name), nl.full((8, 4), value, "float32"))  # noqa: E731
    assert f"found {value:.4g}" in refused("activation-range", body).replace("found 8.796e+12", "found -8.796e+12")


def test_a_range_holds_for_the_argument_after_scale_and_bias_and_nan_passes():
    x = np.full((8, 4), np.nan, np.float32)
    assert np.isnan(run(lambda d, a: nisa.activation(d, nl.log, a), x, dst=((8, 4), "float32"))).all()
    refused("activation-range", lambda: nisa.activation(sb(8, 4), nl.rsqrt, nl.full((8, 4), 1.0, "float32"), bias=-1.0))
    nine = np.full((8, 4), 9.0, np.float32)
    got = run(lambda d, a: nisa.activation(d, nl.sin, a, scale=0.1), nine, dst=((8, 4), "float32"))
    np.testing.assert_allclose(got, np.sin(0.9), rtol=1e-6)


REFUSALS = [
    ("op", lambda: nisa.activation(sb(8, 4), nl.add, sb(8, 4))),
    ("op", lambda: nisa.activation(sb(8, 4), nl.exp, sb(8, 4), reduce_op=nl.maximum)),
    ("dtype", lambda: nisa.activation(sb(8, 4), nl.exp, sb(8, 4), scale=sb(8, 1, dtype="bfloat16"))),
    ("shape", lambda: nisa.activation(sb(8, 4), nl.exp, sb(8, 4), bias=sb(8, 4))),
    ("shape", lambda: nisa.activation(sb(8, 4), nl.exp, sb(8, 5))),
    ("buffer", lambda: nisa.activation(hbm(8, 4), nl.exp, sb(8, 4))),
    ("op", lambda: nisa.activation_reduce(sb(8, 4), nl.exp, sb(8, 4), nl.maximum, sb(8, 1))),
]


@pytest.mark.parametrize(("rule", "body"), REFUSALS)
def test_what_the_scalar_engine_cannot_do_is_refused(rule, body):
    refused(rule, body)
