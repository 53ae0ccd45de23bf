"""The contract: GpSimd's patterns, selection by position, gathers and cross-partition sums."""

import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from sim_harness import hbm, ps, randn, refused, run, sb

P, N = 16, 40


def test_iota_and_affine_select_follow_their_pattern():
    got = run(lambda d: nisa.iota(d, [[10, 3], [1, 4]], offset=5, channel_multiplier=100), dst=((P, 12), "int32"))
    p, i, j = np.ogrid[:P, :3, :4]
    np.testing.assert_array_equal(got, (5 + 100 * p + 10 * i + j).reshape(P, 12))
    x = randn(P, N)
    got = run(lambda d, a: nisa.affine_select(d, [[-1, N]], 1, a, -9.0, nl.greater_equal), x, dst=((P, N), "float32"))
    np.testing.assert_array_equal(got, np.where(np.arange(P)[:, None] >= np.arange(N), x, -9))


def test_gathers_take_by_partition_and_by_group_of_sixteen():
    x = randn(32, N)
    index = np.random.default_rng(0).integers(0, N, (32, 6))
    got = run(lambda d, a, i: nisa.nc_n_gather(d, a, i), x, index.astype(np.uint32), dst=((32, 6), "float32"))
    np.testing.assert_array_equal(got, np.take_along_axis(x, index, axis=1))
    index = np.random.default_rng(1).integers(0, N // 2, (32, 2)) * 2
    args = {"num_elem_per_idx": 2, "num_valid_indices": 20}
    got = run(lambda d, a, i: nisa.local_gather(d, a, i, **args), x, index.astype(np.uint16), dst=((32, 40), "float32"))
    for g in range(2):
        flat = index[16 * g : 16 * g + 16].flatten(order="F")[:20]
        at = (flat[:, None] + np.arange(2)).reshape(-1)
        np.testing.assert_array_equal(got[16 * g : 16 * g + 16], x[16 * g : 16 * g + 16][:, at])


@pytest.mark.parametrize(("name", "fold"), [("add", np.sum), ("average", np.mean), ("maximum", np.max)])
def test_tensor_partition_reduce_folds_partitions(name, fold):
    x = randn(100, N)
    got = run(lambda d, a: nisa.tensor_partition_reduce(d, getattr(nl, name), a), x, dst=((1, N), "float32"))
    np.testing.assert_allclose(got[0], fold(x, axis=0), rtol=1e-5, atol=1e-6)


def test_nonzero_with_count_reads_and_writes_every_sixteenth_partition_only():
    x = np.zeros((32, 8), np.int32)
    x[0, [1, 2, 5]], x[16, 7], x[1] = 1, 3, 1
    before = np.full((32, 9), -5, np.int32)
    got = run(lambda d, a: nisa.nonzero_with_count(d, a, index_offset=16), x, dst=((32, 9), "int32"), before=before)
    assert got[0].tolist() == [17, 18, 21, -1, -1, -1, -1, -1, 3] and got[16].tolist() == [23] + [-1] * 7 + [1]
    assert (np.delete(got, [0, 16], axis=0) == -5).all()


def test_iota_starts_where_a_register_says():
    def kernel(start):
        tile, register, out = nl.ndarray((P, 4), "int32"), nisa.register_alloc(), hbm(P, 4, dtype="int32")
        nisa.register_load(register, nl.load(start))
        nisa.iota(tile, [[1, 4]], offset=register, channel_multiplier=10)
        nisa.dma_copy(out, tile)
        return out

    for start in (0, -7):
        got = nki_sim.simulate(kernel)(np.array([[start]], np.int32))
        np.testing.assert_array_equal(got, start + 10 * np.arange(P)[:, None] + np.arange(4))


I32, U32, U16 = {"dtype": "int32"}, {"dtype": "uint32"}, {"dtype": "uint16"}
REFUSALS = [
    ("buffer", lambda: nisa.iota(ps(8, 4), [[1, 4]])),
    ("shape", lambda: nisa.iota(sb(8, 4), [[1, 5]])),
    ("access-pattern", lambda: nisa.iota(sb(8, 4), [[1, 4], [1, 1], [1, 1], [1, 1], [1, 1]])),
    ("buffer", lambda: nisa.affine_select(sb(8, 4), [[1, 4]], 0, ps(8, 4), 0.0)),
    ("op", lambda: nisa.affine_select(sb(8, 4), [[1, 4]], 0, sb(8, 4), 0.0, cmp_op=nl.bitwise_and)),
    ("dtype", lambda: nisa.nc_n_gather(sb(8, 4), sb(8, 4), sb(8, 4, **I32))),
    ("dtype", lambda: nisa.nc_n_gather(sb(8, 4, **I32), sb(8, 4), sb(8, 4, **U32))),
    ("out-of-bounds", lambda: nisa.nc_n_gather(sb(8, 4), sb(8, 4), nl.full((8, 4), 4, "uint32"))),
    ("dtype", lambda: nisa.local_gather(sb(16, 16), sb(16, 4), sb(16, 1, **I32))),
    ("shape", lambda: nisa.local_gather(sb(8, 16), sb(8, 4), sb(8, 1, **U16))),
    ("value", lambda: nisa.local_gather(sb(16, 48), sb(16, 4), sb(16, 1, **U16), num_elem_per_idx=3)),
    ("value", lambda: nisa.local_gather(sb(16, 17), sb(16, 4), sb(16, 1, **U16), num_valid_indices=17)),
    ("out-of-bounds", lambda: nisa.local_gather(sb(16, 16), sb(16, 4), nl.full((16, 1), 4, "uint16"))),
    ("op", lambda: nisa.tensor_partition_reduce(sb(1, 4), nl.multiply, sb(8, 4))),
    ("shape", lambda: nisa.tensor_partition_reduce(sb(2, 4), nl.add, sb(8, 4))),
    ("dtype", lambda: nisa.tensor_partition_reduce(sb(1, 4), nl.bitwise_or, sb(8, 4))),
    ("shape", lambda: nisa.nonzero_with_count(sb(16, 8, **I32), sb(16, 8))),
    ("dtype", lambda: nisa.nonzero_with_count(sb(16, 9), sb(16, 8))),
]


@pytest.mark.parametrize(("rule", "body"), REFUSALS)
def test_what_gpsimd_cannot_do_is_refused(rule, body):
    refused(rule, body)
