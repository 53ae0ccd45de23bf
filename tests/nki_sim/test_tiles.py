"""The contract: nl's functions on tiles give numpy's values, and AWS's quick start runs as it is written there."""

import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from sim_harness import hbm, ps, randn, refused, run, sb

P, N = 32, 24
ONE = {
    "exp": np.exp, "tanh": np.tanh, "square": np.square, "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc,
    "negative": np.negative, "sign": np.sign, "copy": lambda x: x, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "reciprocal": lambda x: 1 / x, "relu": lambda x: np.maximum(x, 0),
}  # fmt: skip
TWO = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
}
FOLDS = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod, "mean": np.mean, "var": np.var}


@pytest.mark.parametrize("name", ONE)
def test_functions_of_one_tile(name):
    x = randn(P, N) * (5 if name in ("sin", "cos", "floor", "ceil", "trunc") else 1)
    got = run(lambda d, a: nisa.tensor_copy(d, getattr(nl, name)(a)), x, dst=((P, N), "float32"))
    np.testing.assert_allclose(got, ONE[name](x), rtol=1e-3 if name == "tan" else 2e-6, atol=3e-6)


@pytest.mark.parametrize("name", TWO)
def test_functions_of_two_tiles_columns_rows_and_numbers(name):
    x, y, column = randn(P, N), randn(P, N, seed=1) + 4, randn(P, 1, seed=2) + 4
    function, close = getattr(nl, name), {"rtol": 3e-7, "atol": 1e-7}
    out = {"dst": ((P, N), "float32")}
    np.testing.assert_allclose(
        run(lambda d, a, b: nisa.tensor_copy(d, function(a, b)), x, y, **out), TWO[name](x, y), **close
    )
    np.testing.assert_allclose(
        run(lambda d, a, b: nisa.tensor_copy(d, function(a, b)), x, column, **out), TWO[name](x, column), **close
    )
    np.testing.assert_allclose(
        run(lambda d, a: nisa.tensor_copy(d, function(a, 3.0)), x, **out), TWO[name](x, 3), **close
    )
    np.testing.assert_allclose(
        run(lambda d, a: nisa.tensor_copy(d, function(3.0, a)), y, **out), TWO[name](3, y), **close
    )


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("axis", [2, (1, 2), -1])
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions_over_the_last_free_axes(name, axis, keepdims):
    x = randn(8, 3, 4)
    want = FOLDS[name](x, axis=axis, keepdims=keepdims)
    want = want.reshape(8, 1) if want.ndim == 1 else want

    def kernel(x):
        result = getattr(nl, name)(nl.load(x), axis=axis, keepdims=keepdims)
        out = hbm(*result.shape)
        nl.store(out, result)
        return out

    got = nki_sim.simulate(kernel)(x)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_softmax_rms_norm_where_and_comparisons():
    x, w = randn(P, N), randn(P, N, seed=1)
    out = {"dst": ((P, N), "float32")}
    grown = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(
        run(lambda d, a: nisa.tensor_copy(d, nl.softmax(a, axis=1)), x, **out),
        grown / grown.sum(1, keepdims=True),
        rtol=1e-5,
    )
    got = run(lambda d, a, b: nisa.tensor_copy(d, nl.rms_norm(a, b, 1, N)), x, w, **out)
    np.testing.assert_allclose(got, x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * w, rtol=1e-5, atol=1e-6)
    got = run(lambda d, a, b: nisa.tensor_copy(d, nl.where(nl.greater(a, 0.0), a, b)), x, w, **out)
    np.testing.assert_array_equal(got, np.where(x > 0, x, w))
    got = run(lambda d, a: nisa.tensor_copy(d, nl.where(nl.less_equal(a, 0.5), a, -1.0)), x, **out)
    np.testing.assert_array_equal(got, np.where(x <= 0.5, x, np.float32(-1)))


def test_one_partition_is_broadcast_over_many():
    row = randn(1, 700)
    got = run(lambda d, a: nisa.tensor_copy(d, nl.broadcast_to(a, (128, 700))), row, dst=((128, 700), "float32"))
    np.testing.assert_array_equal(got, np.broadcast_to(row, (128, 700)))


def test_matmul_and_transpose_take_either_layout():
    x, y = randn(24, 40), randn(40, 16, seed=1)
    for turned in (False, True):
        body = lambda d, a, b, t=turned: nisa.tensor_copy(d, nl.matmul(nl.transpose(a) if t else a, b, transpose_x=t))  # noqa: E731
        np.testing.assert_allclose(run(body, x, y, dst=((24, 16), "float32")), x @ y, rtol=1e-4, atol=1e-5)


def test_the_quick_start_of_the_simulators_page_runs():
    @nki_sim.jit
    def quick(a_ptr, b_ptr):
        result = nl.add(nl.load(a_ptr), nl.load(b_ptr))
        out = nl.ndarray(a_ptr.shape, dtype=a_ptr.dtype, buffer=nl.shared_hbm)
        nl.store(out, value=result)
        return out

    a, b = randn(128, 512), randn(128, 512, seed=1)
    np.testing.assert_array_equal(nki_sim.simulate(quick)(a, b), a + b)


def test_a_pooling_by_an_access_pattern_and_a_reduction():
    def pooled(x, size):
        (c, h, w), tile = x.shape, nl.load(x)
        windows = tile.ap([[h * w, c], [size * w, h // size], [size, w // size], [w, size], [1, size]])
        out = hbm(c, h // size, w // size)
        nl.store(out, nl.max(windows, axis=[3, 4]))
        return out

    x = randn(4, 6, 8)
    np.testing.assert_array_equal(nki_sim.simulate(pooled)(x, 2), x.reshape(4, 3, 2, 4, 2).max((2, 4)))


def test_what_functions_cannot_take_is_refused():
    refused("shape", lambda: nl.add(sb(8, 4), sb(8, 5)))
    refused("buffer", lambda: nl.exp(hbm(8, 4)))
    refused("axis", lambda: nl.sum(sb(8, 3, 4), axis=1))
    refused("", lambda: nl.exp(1.0), error=TypeError)
    refused("", lambda: nl.mod(sb(8, 4), 2.0), error=NotImplementedError)
    nki_sim.simulate(lambda: two_in_psum())()


def ps_filled():
    tile = ps(8, 4)
    nisa.memset(tile, 0.0)
    return tile


def two_in_psum():
    nl.add(nl.matmul(sb(8, 8), sb(8, 4)), ps_filled())
