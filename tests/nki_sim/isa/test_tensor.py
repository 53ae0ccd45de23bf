"""The contract: nc_matmul and nc_transpose compute what NKI documents, accumulate as PSUM does, and refuse what trn2 cannot do."""

import ml_dtypes
import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from sim_harness import hbm, ps, randn, refused, sb

BF16 = ml_dtypes.bfloat16


def matmul(*steps, m=8, n=16, dtype="bfloat16", **options):
    """PSUM after nc_matmul of each (stationary, moving, accumulate)."""

    def kernel(pairs):
        acc = ps(m, n)
        for (x, w), flag in zip(pairs, [s[2] for s in steps], strict=True):
            nisa.nc_matmul(acc, nl.load(x), nl.load(w), accumulate=flag, **options)
        result = nl.ndarray((m, n), "float32")
        nisa.tensor_copy(result, acc)
        out = hbm(m, n)
        nisa.dma_copy(out, result)
        return out

    kind = np.dtype(dtype)
    return nki_sim.simulate(kernel)(tuple((x.astype(kind), w.astype(kind)) for x, w, _ in steps))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2"])
def test_matmul_is_stationary_transposed_times_moving_in_float32(dtype):
    x, w = randn(64, 8), randn(64, 16, seed=1)
    rounded = [a.astype(np.dtype(dtype)).astype(np.float32) for a in (x, w)]
    np.testing.assert_allclose(matmul((x, w, None), dtype=dtype), rounded[0].T @ rounded[1], rtol=1e-5, atol=1e-5)


def test_without_a_flag_the_first_matmul_overwrites_and_later_ones_add():
    x, w = randn(32, 8).astype(BF16).astype(np.float32), randn(32, 16, seed=1).astype(BF16).astype(np.float32)
    np.testing.assert_allclose(matmul((x, w, None), (x, w, None)), 2 * x.T @ w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(matmul((x, w, False), (x, w, True)), 2 * x.T @ w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(matmul((x, w, None), (x, w, False)), x.T @ w, rtol=1e-5, atol=1e-5)


def test_double_row_contracts_over_partitions_and_the_first_free_dimension():
    x, w = randn(16, 2, 8).astype(ml_dtypes.float8_e4m3), randn(16, 2, 16, seed=1).astype(ml_dtypes.float8_e5m2)

    def kernel(x, w):
        acc = ps(8, 16)
        nisa.nc_matmul(acc, nl.load(x), nl.load(w), perf_mode=nisa.matmul_perf_mode.double_row)
        out, sbuf = hbm(8, 16), nl.ndarray((8, 16), "float32")
        nisa.tensor_copy(sbuf, acc)
        nisa.dma_copy(out, sbuf)
        return out

    want = np.einsum("kim,kin->mn", x.astype(np.float32), w.astype(np.float32))
    np.testing.assert_allclose(nki_sim.simulate(kernel)(x, w), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("through", ["nc_transpose", "nc_matmul"])
def test_a_transpose_through_the_tensor_engine_keeps_every_bit_nan_and_inf_too(through):
    x = randn(32, 24).astype(BF16)
    x[3, 5], x[0, 0] = np.nan, np.inf

    def kernel(x):
        turned, tile = ps(24, 32, dtype="bfloat16"), nl.load(x)
        if through == "nc_transpose":
            nisa.nc_transpose(turned, tile)
        else:
            nisa.nc_matmul(turned, tile, nl.shared_identity_matrix(32, "bfloat16"), is_transpose=True)
        out, sbuf = hbm(24, 32, dtype="bfloat16"), nl.ndarray((24, 32), "bfloat16")
        nisa.tensor_copy(sbuf, turned)
        nisa.dma_copy(out, sbuf)
        return out

    assert nki_sim.simulate(kernel)(x).tobytes() == x.T.tobytes()


def test_the_vector_engine_transposes_small_tiles_in_sbuf():
    def kernel(x):
        turned, out = nl.ndarray((32, 16), "float32"), hbm(32, 16)
        nisa.nc_transpose(turned, nl.load(x), engine=nisa.engine.vector)
        nisa.dma_copy(out, turned)
        return out

    x = randn(16, 32)
    assert (nki_sim.simulate(kernel)(x) == x.T).all()


BF = {"dtype": "bfloat16"}
FP8 = {"dtype": "float8_e4m3"}


def small(dst=None, x=None, w=None, **options):
    nisa.nc_matmul(
        dst if dst is not None else ps(8, 16),
        x if x is not None else sb(32, 8, **BF),
        w if w is not None else sb(32, 16, **BF),
        **options,
    )


REFUSALS = [
    ("buffer", lambda: small(dst=sb(8, 16))),
    ("buffer", lambda: small(x=ps(32, 8))),
    ("dtype", lambda: small(x=sb(32, 8, dtype="int32"))),
    ("dtype", lambda: small(x=sb(32, 8))),  # float32 with bfloat16
    ("dtype", lambda: small(dst=ps(8, 16, **BF))),
    ("dtype", lambda: small(perf_mode=nisa.matmul_perf_mode.double_row)),
    ("dtype", lambda: nisa.nc_matmul(ps(8, 8), sb(8, 8, **BF), sb(8, 8, **BF), is_transpose=True)),
    ("shape", lambda: small(w=sb(16, 16, **BF))),
    ("shape", lambda: small(dst=ps(16, 8))),
    ("shape", lambda: small(x=sb(32, 8, **FP8), w=sb(32, 16, **FP8), perf_mode=nisa.matmul_perf_mode.double_row)),
    ("stationary-free", lambda: small(dst=ps(128, 16), x=sb(32, 129, **BF))),
    ("moving-free", lambda: small(dst=ps(8, 513), w=sb(32, 513, **BF))),
    ("psum-bank", lambda: small(dst=ps(8, 1024)[:, 504:520])),
    ("tile-position", lambda: small(tile_size=(32, 128))),
    (
        "tile-position",
        lambda: small(
            x=sb(32, 2, 8, **FP8),
            w=sb(32, 2, 16, **FP8),
            perf_mode=nisa.matmul_perf_mode.double_row,
            tile_position=(0, 0),
            tile_size=(32, 32),
        ),
    ),
    ("tile-position", lambda: small(tile_position=(16, 0), tile_size=(32, 128))),
    ("start-partition", lambda: small(x=sb(64, 8, **BF)[16:48], w=sb(64, 16, **BF)[16:48])),
    ("transpose-size", lambda: nisa.nc_transpose(ps(128, 128), sb(128, 129))),
    ("transpose-size", lambda: nisa.nc_transpose(sb(33, 16), sb(16, 33), engine=nisa.engine.vector)),
    ("buffer", lambda: nisa.nc_transpose(sb(8, 8), sb(8, 8), engine=nisa.engine.tensor)),
    ("dtype", lambda: nisa.nc_transpose(ps(8, 8), sb(8, 8, **BF))),
    ("shape", lambda: nisa.nc_transpose(ps(8, 16), sb(8, 16))),
    ("engine", lambda: nisa.nc_transpose(ps(8, 8), sb(8, 8), engine=nisa.engine.scalar)),
]


@pytest.mark.parametrize(("rule", "body"), REFUSALS)
def test_what_the_tensor_engine_cannot_do_is_refused(rule, body):
    refused(rule, body)


def test_adding_to_psum_that_no_matmul_wrote_is_refused():
    refused("accumulate", lambda: small(accumulate=True))

    def after_memset(flag):
        acc = ps(8, 16)
        nisa.memset(acc, 0.0)
        small(dst=acc, accumulate=flag)

    assert "memset is no base" in refused("accumulate", lambda: after_memset(True))
    refused("accumulate", lambda: after_memset(None))


def test_an_undecidable_accumulation_in_a_device_loop_is_refused():
    def body():
        acc = ps(8, 16)
        nl.fori_loop(0, 2, lambda i: small(dst=acc))

    assert "compile time" in refused("accumulate", body)
