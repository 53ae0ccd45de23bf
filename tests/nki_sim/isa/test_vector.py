"""The contract: the Vector Engine's instructions give what NKI documents, rounded as their output dtype rounds, and each
documented limit is refused."""

import ml_dtypes
import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from sim_harness import hbm, ps, randn, refused, run, sb

BF16 = ml_dtypes.bfloat16
P, N = 16, 40
MAX, RESET = nl.maximum, nisa.reduce_cmd.reset_reduce


def test_a_copy_keeps_bits_for_one_dtype_and_goes_through_float32_for_two():
    big = np.array([[2**31 - 1, -(2**24) - 1]], np.int32)
    assert (run(lambda d, x: nisa.tensor_copy(d, x), big, dst=((1, 2), "int32")) == big).all()
    got = run(lambda d, x: nisa.tensor_copy(d, x), big, dst=((1, 2), "uint32"))
    assert got.tolist() == [[2**31, 0]]  # rounded to float32, then saturated


@pytest.mark.parametrize(
    ("dtype", "values", "want"),
    [
        ("int8", [0.5, 1.5, 2.5, 300, -300, np.nan], [0, 2, 2, 127, -128, 0]),
        ("uint8", [-1, 254.5, 255.5, 1e9, np.inf, -np.inf], [0, 254, 255, 255, 255, 0]),
        ("int32", [2.0**40, -(2.0**40), 3.5, 4.5, np.inf, -0.5], [2**31 - 1, -(2**31), 4, 4, 2**31 - 1, 0]),
    ],
)
def test_floats_round_to_nearest_even_and_saturate_as_integers(dtype, values, want):
    x = np.array([values], np.float32)
    assert run(lambda d, x: nisa.tensor_copy(d, x), x, dst=((1, 6), dtype)).tolist() == [want]


def test_small_floats_round_as_ml_dtypes_do_and_overflow_to_infinity():
    x = np.array([[1.0009765625, 1e30, 300.0, -500.0]], np.float32)
    assert run(lambda d, x: nisa.tensor_copy(d, x), x, dst=((1, 4), "bfloat16")).tobytes() == x.astype(BF16).tobytes()
    assert np.isinf(
        run(lambda d, x: nisa.tensor_copy(d, x), x, dst=((1, 4), "float8_e4m3")).astype(np.float32)[0, 1:]
    ).all()
    assert run(lambda d, x: nisa.tensor_copy(d, x), x, dst=((1, 4), "float8_e4m3fn")).astype(np.float32)[0, 1] == 448


def test_memset_fills_every_dtype():
    for dtype, value in [("float32", 1.5), ("bfloat16", -2), ("int32", 7), ("uint8", 0)]:
        assert (run(lambda d, v=value: nisa.memset(d, v), dst=((P, N), dtype)).astype(np.float32) == value).all()


ARITHMETIC = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "logical_and": lambda a, b: (a != 0) & (b != 0),
    "logical_or": lambda a, b: (a != 0) | (b != 0),
    "logical_xor": lambda a, b: (a != 0) ^ (b != 0),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_tensor_tensor_and_tensor_scalar_apply_every_arithmetic_operator(name):
    x, y = np.round(randn(P, N) * 2), np.round(randn(P, N, seed=1) * 2)
    op, c = getattr(nl, name), y[:, :1]
    with np.errstate(divide="ignore", invalid="ignore"):
        want, column = ARITHMETIC[name](x, y), ARITHMETIC[name](c, x)
    got = run(lambda d, a, b: nisa.tensor_tensor(d, a, b, op), x, y, dst=((P, N), "float32"))
    np.testing.assert_array_equal(got, want.astype(np.float32))
    got = run(lambda d, a, b: nisa.tensor_scalar(d, a, op, b, reverse0=True), x, c, dst=((P, N), "float32"))
    np.testing.assert_array_equal(got, column.astype(np.float32))


def test_power_runs_on_gpsimd():
    x = np.abs(randn(P, N))
    got = run(lambda d, a: nisa.tensor_tensor(d, a, a, nl.power), x, dst=((P, N), "float32"))
    np.testing.assert_allclose(got, x**x, rtol=1e-6)


def test_int32_tensor_tensor_is_exact_on_gpsimd_and_rounds_through_float32_on_the_vector_engine():
    x = np.array([[2**30 + 1, 2**24 + 1]], np.int32)
    one = np.ones((1, 2), np.int32)
    got = run(lambda d, a, b: nisa.tensor_tensor(d, a, b, nl.add), x, one, dst=((1, 2), "int32"))
    assert got.tolist() == [[2**30 + 2, 2**24 + 2]]
    vector = nisa.engine.vector
    got = run(lambda d, a, b: nisa.tensor_tensor(d, a, b, nl.add, engine=vector), x, one, dst=((1, 2), "int32"))
    assert got[0, 0] == np.float32(2**30 + 1) + np.float32(1)


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"])
def test_bitwise_operators_work_on_the_bits(name):
    x, y = np.array([[0b1100, 1, 2**20]], np.int32), np.array([[3, 1, 2]], np.int32)
    op, want = getattr(nl, name), getattr(np, name)(x, y)
    assert (run(lambda d, a, b: nisa.tensor_tensor(d, a, b, op), x, y, dst=((1, 3), "int32")) == want).all()
    want = getattr(np, name)(x, 3)
    assert (run(lambda d, a: nisa.tensor_scalar(d, a, op, 3), x, dst=((1, 3), "int32")) == want).all()


def test_a_right_shift_is_logical():
    x = np.array([[-8, 8]], np.int32)
    got = run(lambda d, a: nisa.tensor_scalar(d, a, nl.right_shift, 1), x, dst=((1, 2), "int32"))
    assert got.tolist() == [[2**31 - 4, 4]]


def test_tensor_scalar_applies_two_operators_with_columns_and_constants():
    x, c = randn(P, N), randn(P, 1, seed=1)
    got = run(
        lambda d, a, b: nisa.tensor_scalar(d, a, nl.multiply, b, op1=nl.subtract, operand1=2.0, reverse1=True),
        x,
        c,
        dst=((P, N), "float32"),
    )
    np.testing.assert_array_equal(got, np.float32(2) - x * c)
    got = run(lambda d, a: nisa.tensor_scalar(d, a, nl.rsqrt, 0.0), np.abs(x), dst=((P, N), "float32"))
    np.testing.assert_allclose(got, 1 / np.sqrt(np.abs(x)), rtol=1e-6)


def test_scalar_tensor_tensor_reciprocal_and_predicated_copy():
    x, y, c = randn(P, N), randn(P, N, seed=1), randn(P, 1, seed=2)
    got = run(
        lambda d, a, b, s: nisa.scalar_tensor_tensor(d, a, nl.subtract, s, nl.multiply, b),
        x,
        y,
        c,
        dst=((P, N), "float32"),
    )
    np.testing.assert_array_equal(got, (x - c) * y)
    np.testing.assert_array_equal(run(lambda d, a: nisa.reciprocal(d, a), x, dst=((P, N), "float32")), 1 / x)
    mask = (x > 0).astype(np.uint8)
    got = run(lambda d, a, m: nisa.tensor_copy_predicated(d, a, m), x, mask, dst=((P, N), "float32"), before=y)
    np.testing.assert_array_equal(got, np.where(mask, x, y))
    got = run(
        lambda d, m: nisa.tensor_copy_predicated(d, 3.0, m, reverse_pred=True), mask, dst=((P, N), "float32"), before=y
    )
    np.testing.assert_array_equal(got, np.where(mask, y, 3))


def test_a_predicated_copy_leaves_unwritten_what_it_did_not_write():
    def body():
        target, mask = nl.ndarray((P, N), "float32"), nl.ndarray((P, N), "uint8")
        nisa.iota(mask, [[1, N]])  # the first element is not chosen
        nisa.tensor_copy_predicated(target, sb(P, N), mask)
        nisa.tensor_copy(sb(P, N), target)

    assert "16 of 640" in refused("uninitialized", body)


@pytest.mark.parametrize("name", ["add", "maximum", "minimum", "multiply"])
def test_tensor_reduce_folds_the_trailing_free_axes(name):
    x = randn(P, 4, 5)
    fold = {"add": np.sum, "maximum": np.max, "minimum": np.min, "multiply": np.prod}[name]
    op = getattr(nl, name)
    got = run(lambda d, a: nisa.tensor_reduce(d, op, a, axis=2), x, dst=((P, 4), "float32"))
    np.testing.assert_allclose(got, fold(x, axis=2), rtol=1e-5)
    got = run(lambda d, a: nisa.tensor_reduce(d, op, a, axis=(1, 2), negate=True), x, dst=((P, 1), "float32"))
    np.testing.assert_allclose(got, -fold(x, axis=(1, 2))[:, None], rtol=1e-5)


def test_tensor_scalar_reduce_carries_its_registers_over_calls():
    x, c = randn(P, N), randn(P, 1, seed=1)

    def body(d, a, b):
        out = nl.ndarray((P, N), "float32")
        nisa.tensor_scalar_reduce(out, a, nl.add, 1.0, nl.add, reduce_cmd=RESET)
        nisa.tensor_scalar_reduce(out, a, nl.multiply, 2.0, nl.add, d, reduce_cmd=nisa.reduce_cmd.reduce)

    got = run(body, x, c, dst=((P, 1), "float32"))
    np.testing.assert_allclose(got[:, 0], (x + 1).sum(1) + (2 * x).sum(1), rtol=1e-5, atol=1e-5)

    def loaded(d, a, b):
        load = nisa.reduce_cmd.load_reduce
        nisa.tensor_scalar_reduce(
            nl.ndarray((P, N), "float32"),
            a,
            nl.add,
            0.0,
            MAX,
            d,
            reduce_cmd=load,
            reduce_init=b,
            reduce_res_negate=True,
        )

    got = run(loaded, x, c, dst=((P, 1), "float32"))
    np.testing.assert_array_equal(got, -np.maximum(x.max(1, keepdims=True), c))


def test_select_reduce_selects_and_takes_the_maximum():
    x, mask = randn(P, N), (randn(P, N, seed=3) > 0).astype(np.uint8)

    def body(d, a, m):
        nisa.select_reduce(nl.ndarray((P, N), "float32"), m, a, -5.0, d, RESET)

    np.testing.assert_array_equal(run(body, x, mask, dst=((P, 1), "float32"))[:, 0], np.where(mask, x, -5).max(1))
    got = run(lambda d, a, m: nisa.select_reduce(d, m, a, -5.0, reverse_pred=True), x, mask, dst=((P, N), "float32"))
    np.testing.assert_array_equal(got, np.where(mask, np.float32(-5), x))


def test_range_select_keeps_the_elements_between_two_bounds():
    x, low, high = randn(P, N), np.arange(P, dtype=np.float32)[:, None], np.full((P, 1), 30, np.float32)

    def body(d, a, lo, hi):
        nisa.range_select(d, a, nl.greater_equal, nl.less, lo, hi, range_start=2)

    index = np.arange(2, N + 2)
    want = np.where((index >= low) & (index < high), x, np.finfo(np.float32).min)
    np.testing.assert_array_equal(run(body, x, low, high, dst=((P, N), "float32")), want)


def test_scans_run_along_the_free_elements():
    x, y = randn(P, N), randn(P, N, seed=1)
    got = run(lambda d, a, b: nisa.tensor_tensor_scan(d, a, b, 0.5, nl.multiply, nl.add), x, y, dst=((P, N), "float32"))
    state, want = np.full(P, 0.5, np.float32), []
    for i in range(N):
        state = x[:, i] * state + y[:, i]
        want.append(state)
    np.testing.assert_allclose(got, np.stack(want, 1), rtol=1e-6)


def test_bn_stats_and_bn_aggr_give_mean_and_variance():
    x = randn(P, 100)

    def body(d, a):
        stats = nl.ndarray((P, 2, 6), "float32")
        for i in range(2):
            nisa.bn_stats(stats[:, i, :], a[:, i * 50 : i * 50 + 50])
        nisa.bn_aggr(d, stats)

    got = run(body, x, dst=((P, 2), "float32"))
    np.testing.assert_allclose(got, np.stack([x.mean(1), x.var(1)], 1), rtol=1e-4, atol=1e-6)


def test_max8_find_index8_and_match_replace8_agree_with_sorting_ties_included():
    x = np.round(randn(P, N) * 3)
    x[0] = [1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8] + [0] * (N - 11)
    best = run(lambda d, a: nisa.max8(d, a), x, dst=((P, 8), "float32"))
    np.testing.assert_array_equal(best, -np.sort(-x, axis=1)[:, :8])
    where = run(lambda d, a, v: nisa.nc_find_index8(d, a, v), x, best, dst=((P, 8), "uint32"))
    np.testing.assert_array_equal(where, np.argsort(-x, axis=1, kind="stable")[:, :8])
    vals = best.copy()
    vals[0] = [3, 8, 8, 8, 8, 8, 8, 8]
    vals[1, 7] = 99

    def both(d, a, v):
        nisa.nc_match_replace8(nl.ndarray((P, N), "float32"), a, v, -99.0, d)

    at = run(both, x, vals, dst=((P, 8), "uint32"))
    assert at[0].tolist() == [2, 10, 9, 8, 7, 6, 5, 4] and at[1, 7] == 0xFFFFFFFF
    replaced = run(lambda d, a, v: nisa.nc_match_replace8(d, a, v, -99.0), x, vals, dst=((P, N), "float32"))
    assert (replaced[0] == -99).sum() == 8 and (replaced[1] == -99).sum() == 7


def test_a_shuffle_moves_partitions_within_each_quadrant():
    x, before = randn(64, 4), randn(64, 4, seed=1)
    mask = [31 - i for i in range(31)] + [255]
    got = run(lambda d, a: nisa.nc_stream_shuffle(d, a, mask), x, dst=((64, 4), "float32"), before=before)
    for q in (0, 32):
        np.testing.assert_array_equal(got[q : q + 31], x[q : q + 32][::-1][:31])
        np.testing.assert_array_equal(got[q + 31], before[q + 31])


F16, I32, U8 = {"dtype": "bfloat16"}, {"dtype": "int32"}, {"dtype": "uint8"}
REFUSALS = [
    ("shape", lambda: nisa.tensor_copy(sb(8, 4), sb(8, 5))),
    ("engine", lambda: nisa.tensor_copy(sb(8, 4), sb(8, 4), engine=nisa.engine.tensor)),
    ("engine-buffer", lambda: nisa.tensor_copy(ps(8, 4), sb(8, 4), engine=nisa.engine.gpsimd)),
    ("buffer", lambda: nisa.tensor_copy(sb(8, 4), hbm(8, 4))),
    ("memset-value", lambda: nisa.memset(nl.ndarray((8, 4), "int32"), 0.5)),
    ("memset-value", lambda: nisa.memset(nl.ndarray((8, 4), "int32"), 2.0)),
    ("broadcast-write", lambda: nisa.memset(sb(8, 1).broadcast(1, 4), 0)),
    ("start-partition", lambda: nisa.memset(sb(128, 4)[32:128], 0)),
    ("start-partition", lambda: nisa.memset(sb(128, 4)[8:16], 0)),
    ("access-pattern", lambda: nisa.memset(sb(2, 3, 4, 5, 6, 7)[:, 0:2, 0:3, 0:4, 0:5, 0:6], 0)),
    ("dtype", lambda: nisa.tensor_copy_predicated(sb(8, 4), sb(8, 4), sb(8, 4))),
    ("dtype", lambda: nisa.tensor_copy_predicated(sb(8, 4), sb(8, 4, **F16), sb(8, 4, **U8))),
    ("engine-buffer", lambda: nisa.tensor_copy_predicated(sb(8, 4), ps(8, 4), ps(8, 4, **U8))),
    ("engine-buffer", lambda: nisa.tensor_tensor(sb(8, 4), ps(8, 4), ps(8, 4), nl.add)),
    ("dtype", lambda: nisa.tensor_tensor(sb(8, 4), sb(8, 4), sb(8, 4), nl.bitwise_and)),
    ("engine-buffer", lambda: nisa.tensor_tensor(ps(8, 4), sb(8, 4), sb(8, 4), nl.power)),
    ("engine-buffer", lambda: nisa.tensor_tensor(sb(8, 4), sb(8, 4), sb(8, 4), nl.power, engine=nisa.engine.vector)),
    ("engine-buffer", lambda: nisa.tensor_scalar(sb(8, 4), ps(8, 4), nl.rsqrt, None, engine=nisa.engine.gpsimd)),
    ("alu-operator", lambda: nisa.tensor_tensor(sb(8, 4), sb(8, 4), sb(8, 4), nl.divide)),
    ("alu-operator", lambda: nisa.tensor_scalar(sb(8, 4), sb(8, 4), nl.mod, 2.0)),
    ("target", lambda: nisa.tensor_tensor(sb(8, 4), sb(8, 4), sb(8, 4), nl.abs_max)),
    ("op", lambda: nisa.tensor_tensor(sb(8, 4), sb(8, 4), sb(8, 4), nl.abs)),
    ("op", lambda: nisa.tensor_scalar(sb(8, 4), sb(8, 4), nl.abs, 1.0)),
    ("op", lambda: nisa.tensor_scalar(sb(8, 4), sb(8, 4), nl.add, 1.0, op1=nl.rsqrt, operand1=sb(8, 1))),
    ("op", lambda: nisa.tensor_reduce(sb(8, 1, **I32), nl.bitwise_or, sb(8, 4, **I32), axis=1, negate=True)),
    ("op", lambda: nisa.tensor_tensor(sb(8, 4), sb(8, 4), sb(8, 4), nl.exp)),
    ("op", lambda: nisa.tensor_scalar(sb(8, 4), sb(8, 4), nl.add, 1.0, engine=nisa.engine.gpsimd)),
    ("op", lambda: nisa.tensor_scalar(sb(8, 4), sb(8, 4), nl.subtract, 1.0, engine=nisa.engine.scalar)),
    ("op", lambda: nisa.tensor_scalar(sb(8, 4, **I32), sb(8, 4, **I32), nl.bitwise_and, 1, op1=nl.add, operand1=1)),
    ("op", lambda: nisa.tensor_scalar(sb(8, 4), sb(8, 4), nl.add, 1.0, operand1=2.0)),
    (
        "engine",
        lambda: nisa.tensor_scalar(sb(8, 4, **I32), sb(8, 4, **I32), nl.bitwise_or, 1, engine=nisa.engine.scalar),
    ),
    ("dtype", lambda: nisa.tensor_scalar(sb(8, 4), sb(8, 4), nl.add, sb(8, 1, **F16))),
    ("shape", lambda: nisa.tensor_scalar(sb(8, 4), sb(8, 4), nl.add, sb(8, 2))),
    ("op", lambda: nisa.scalar_tensor_tensor(sb(8, 4, **I32), sb(8, 4, **I32), nl.bitwise_and, 1, nl.add, sb(8, 4))),
    ("engine-buffer", lambda: nisa.scalar_tensor_tensor(sb(8, 4), ps(8, 4), nl.add, 1.0, nl.add, ps(8, 4))),
    ("axis", lambda: nisa.tensor_reduce(sb(8, 1), nl.add, sb(8, 4), axis=0)),
    ("axis", lambda: nisa.tensor_reduce(sb(8, 5), nl.add, sb(8, 4, 5), axis=1)),
    ("op", lambda: nisa.tensor_reduce(sb(8, 1), nl.equal, sb(8, 4), axis=1)),
    ("shape", lambda: nisa.tensor_reduce(sb(8, 2), nl.add, sb(8, 4), axis=1)),
    ("dtype", lambda: nisa.tensor_reduce(sb(8, 1), nl.bitwise_or, sb(8, 4), axis=1)),
    ("op", lambda: nisa.tensor_scalar_reduce(sb(8, 4), sb(8, 4), nl.add, 1.0, nl.subtract)),
    ("op", lambda: nisa.tensor_scalar_reduce(sb(8, 4), sb(8, 4), nl.add, 1.0, nl.add, reverse0=True)),
    ("reduce-cmd", lambda: nisa.tensor_scalar_reduce(sb(8, 4), sb(8, 4), nl.add, 1.0, nl.add, reduce_init=0.0)),
    ("op", lambda: nisa.select_reduce(sb(8, 4), sb(8, 4, **U8), sb(8, 4), 0.0, reduce_op=nl.add)),
    ("dtype", lambda: nisa.select_reduce(sb(8, 4), sb(8, 4), sb(8, 4), 0.0)),
    ("dtype", lambda: nisa.select_reduce(sb(8, 4), sb(8, 4, **U8), sb(8, 4, **I32), 0.0)),
    ("engine-buffer", lambda: nisa.select_reduce(sb(8, 4), ps(8, 4, **U8), ps(8, 4), 0.0)),
    ("op", lambda: nisa.range_select(sb(8, 4), sb(8, 4), nl.add, nl.less, sb(8, 1), sb(8, 1))),
    ("op", lambda: nisa.range_select(sb(8, 4), sb(8, 4), nl.less, nl.less, sb(8, 1), sb(8, 1), reduce_op=nl.add)),
    ("value", lambda: nisa.range_select(sb(8, 4), sb(8, 4), nl.less, nl.less, sb(8, 1), sb(8, 1), on_false_value=0.0)),
    ("value", lambda: nisa.range_select(sb(8, 4), sb(8, 4), nl.less, nl.less, sb(8, 1), sb(8, 1), range_start=2**24)),
    ("dtype", lambda: nisa.range_select(sb(8, 4), sb(8, 4), nl.less, nl.less, sb(8, 1, **F16), sb(8, 1))),
    ("engine-buffer", lambda: nisa.tensor_tensor_scan(sb(8, 4), ps(8, 4), ps(8, 4), 0.0, nl.add, nl.add)),
    ("op", lambda: nisa.tensor_tensor_scan(sb(8, 4), sb(8, 4), sb(8, 4), 0.0, nl.bitwise_and, nl.add)),
    ("bn-stats-free", lambda: nisa.bn_stats(sb(8, 6), sb(8, 513))),
    ("shape", lambda: nisa.bn_stats(sb(8, 5), sb(8, 4))),
    ("shape", lambda: nisa.bn_aggr(sb(8, 2), sb(8, 4))),
    ("search-size", lambda: nisa.max8(sb(8, 8), sb(8, 7))),
    ("search-size", lambda: nisa.max8(sb(8, 8), sb(8, 16385))),
    ("shape", lambda: nisa.max8(sb(8, 4), sb(8, 16))),
    ("dtype", lambda: nisa.nc_find_index8(sb(8, 8), sb(8, 16), sb(8, 8))),
    ("shape", lambda: nisa.nc_match_replace8(sb(8, 16), sb(8, 16), sb(8, 7), 0.0)),
    ("shuffle-mask", lambda: nisa.nc_stream_shuffle(sb(32, 4), sb(32, 4), [0] * 31)),
    ("shuffle-mask", lambda: nisa.nc_stream_shuffle(sb(32, 4), sb(16, 4), [31] * 32)),
    ("dtype", lambda: nisa.nc_stream_shuffle(sb(32, 4), sb(32, 4, **F16), [0] * 32)),
]


@pytest.mark.parametrize(("rule", "body"), REFUSALS)
def test_what_the_vector_engine_cannot_do_is_refused(rule, body):
    refused(rule, body)


def test_more_than_128_partitions_do_not_exist():
    refused("partitions", lambda: nl.ndarray((129, 4), "float32"))
    moving = {"scalar_offset": None, "indirect_dim": 1}  # known to be outside only when it runs
    refused(
        "partitions",
        lambda: nisa.memset(sb(8, 4).ap([[4, 129], [1, 1]], **moving | {"scalar_offset": nisa.register_alloc(0)}), 0),
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda: nisa.tensor_copy(sb(8, 4)),
        lambda: nisa.tensor_copy(src=sb(8, 4)),
        lambda: nisa.tensor_copy(sb(8, 4), sb(8, 4), dtype="float32"),
        lambda: nisa.tensor_copy(sb(8, 4), 1.0),
    ],
)
def test_a_call_that_does_not_fit_the_signature_names_it(call):
    assert "tensor_copy" in refused("", call, error=TypeError)


@pytest.mark.parametrize(
    "name", ["nc_matmul_mx", "quantize_mx", "activate2", "exponential", "rand2", "dropout", "topk", "no_such_thing"]
)
def test_what_is_not_modelled_raises_with_its_name(name):
    with pytest.raises(NotImplementedError, match=name):
        getattr(nisa, name)
    with pytest.raises(NotImplementedError, match=r"nl\.rand"):
        _ = nl.rand
    assert "Trn3" in refused("", lambda: sb(8, 4).indirect(sb(8, 1)), error=NotImplementedError)
    assert not hasattr(nisa, name) and getattr(nl, name, None) is None


def test_a_run_time_index_may_start_a_tile_only_where_a_fixed_one_may():
    def kernel(at):
        tile, register = nl.zeros((128, 4), "float32"), nisa.register_alloc()
        nisa.register_load(register, nl.load(at))
        nisa.memset(tile[nl.ds(register, 32)], 1.0)

    nki_sim.simulate(kernel)(np.array([[96]], np.int32))
    with pytest.raises(nki_sim.NkiError, match=r"start-partition: memset: .*partition 16 by its run-time index"):
        nki_sim.simulate(kernel)(np.array([[16]], np.int32))


def test_what_the_table_of_operators_does_not_list_can_be_allowed_by_name():
    x = np.abs(randn(P, N)) + 1
    with nki_sim.checks(record=["alu-operator"]) as findings:
        got = run(lambda d, a: nisa.tensor_tensor(d, a, a, nl.divide), x, dst=((P, N), "float32"))
    assert (got == 1).all() and [f.rule for f in findings] == ["alu-operator"]
