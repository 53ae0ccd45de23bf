"""The contract: DMA copies, gathers, scatters, accumulates and transposes as documented; what it cannot reach or hit is refused."""

import ml_dtypes
import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from sim_harness import hbm, ps, randn, refused, sb

SKIP = nisa.oob_mode.skip


def gather(x, index, oob=nisa.oob_mode.error, before=None):
    def kernel(x, index, before):
        rows, width = index.shape[0], x.shape[1]
        tile = nl.load(before) if before is not None else nl.ndarray((rows, width), x.dtype)
        nisa.dma_copy(tile, x.ap([[width, rows], [1, width]], vector_offset=nl.load(index)), oob_mode=oob)
        out = hbm(rows, width, dtype=x.dtype)
        nisa.dma_copy(out, tile)
        return out

    return nki_sim.simulate(kernel)(x, index, before)


def test_a_copy_converts_through_float32_and_pairs_elements_in_order():
    def kernel(x):
        tile, out = nl.ndarray((4, 6), "int8"), hbm(24, dtype="float32")
        nisa.dma_copy(tile, x.reshape(4, 6))
        nisa.dma_copy(out.reshape(2, 12), tile.reshape(4, 2, 3))
        return out

    x = randn(24) * 100
    want = np.clip(np.rint(x), -128, 127)
    np.testing.assert_array_equal(nki_sim.simulate(kernel)(x), want)


def test_a_gather_takes_rows_by_index_and_skips_those_outside_when_told():
    x, index = randn(20, 6), np.array([[3], [19], [0], [3]], np.int32)
    np.testing.assert_array_equal(gather(x, index), x[index[:, 0]])
    index[1], before = -1, randn(4, 6, seed=1)
    want = np.where(index >= 0, x[index[:, 0]], before)
    np.testing.assert_array_equal(gather(x, index, SKIP, before), want)
    index[2] = 20
    with pytest.raises(
        nki_sim.NkiError, match=r"^out-of-bounds: dma_copy: index -1 of row 1 .*, as do 2 of 4.*test_dma.py"
    ):
        gather(x, index)
    with pytest.raises(nki_sim.NkiError, match="uninitialized"):  # skipped rows hold nothing
        gather(x, index, SKIP)


def test_a_scatter_writes_rows_by_index():
    def kernel(x, index, out):
        nisa.dma_copy(out.ap([[6, 4], [1, 6]], vector_offset=nl.load(index)), nl.load(x), oob_mode=SKIP)
        return out

    x, index, out = randn(4, 6), np.array([[3], [99], [0], [7]], np.uint32), np.zeros((8, 6), np.float32)
    want = out.copy()
    want[[3, 0, 7]] = x[[0, 2, 3]]
    got = nki_sim.simulate(kernel)(x, index, out)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(out, want)  # arguments the kernel writes are updated in place


def test_dma_compute_adds_sources_and_reads_modifies_writes_by_index():
    def kernel(x, y, index, table):
        row = {"vector_offset": nl.load(index)}
        tile, sums = nl.load(x), hbm(4, 6)
        at = table.ap([[6, 4], [1, 6]], **row)
        nisa.dma_compute(at, [at, tile], nl.add)
        nisa.dma_compute(tile, [table.ap([[6, 4], [1, 6]], **row), tile], nl.add)
        nisa.dma_compute(sums, [tile, y, y], nl.add)
        return sums, table

    x, y, table = randn(4, 6), randn(4, 6, seed=1), randn(8, 6, seed=2).astype(ml_dtypes.bfloat16)
    index = np.array([[3], [5], [0], [7]], np.int32)
    want = table.copy()
    want[index[:, 0]] = (table[index[:, 0]].astype(np.float32) + x).astype(ml_dtypes.bfloat16)
    sums, got = nki_sim.simulate(kernel)(x, y, index, table)
    assert got.tobytes() == want.tobytes()
    np.testing.assert_array_equal(sums, want[index[:, 0]].astype(np.float32) + x + y + y)


def test_repeated_indices_in_a_read_modify_write_are_refused():
    def body():
        table, index = nl.ndarray((8, 6), "float32", buffer=nl.hbm), sb(4, 1, dtype="int32")
        nisa.dma_copy(table, sb(8, 6))
        at = table.ap([[6, 4], [1, 6]], vector_offset=index)
        nisa.dma_compute(at, [at, sb(4, 6)], nl.add)

    assert "index 0 occurs 4 times" in refused("unique-indices", body)


@pytest.mark.parametrize("shape", [(40, 24), (4, 3, 24), (5, 2, 3, 16)])
def test_transposes_exchange_first_and_last_dimension(shape):
    x = randn(*shape).astype(ml_dtypes.bfloat16)
    axes = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(shape)]

    def kernel(x):
        turned = nl.ndarray(tuple(shape[a] for a in axes), "bfloat16")
        nisa.dma_transpose(turned, x, axes=axes)
        out = hbm(*turned.shape, dtype="bfloat16")
        nisa.dma_copy(out, turned)
        return out

    assert nki_sim.simulate(kernel)(x).tobytes() == np.ascontiguousarray(x.transpose(axes)).tobytes()


@pytest.mark.parametrize("mode", ["none", "hwdge"])
def test_sixteen_rows_are_transposed_at_a_fixed_address_in_either_mode_and_at_a_run_time_one(mode):
    def kernel(x, start):
        register, tile, out = nisa.register_alloc(), nl.ndarray((24, 16), "bfloat16"), hbm(2, 24, 16, dtype="bfloat16")
        nisa.dma_transpose(tile, x[:16], dge_mode=nisa.dge_mode[mode])
        nisa.dma_copy(out[0], tile)
        nisa.register_load(register, nl.load(start))
        moved_x = x.ap([[24, 16], [1, 24]], scalar_offset=register, indirect_dim=0)
        nisa.dma_transpose(tile, moved_x)
        nisa.dma_copy(out[1], tile)
        return out

    x = randn(40, 24).astype(ml_dtypes.bfloat16)
    got = nki_sim.simulate(kernel)(x, np.array([[20]], np.int32))
    assert (got[0] == x[:16].T).all() and (got[1] == x[20:36].T).all()


def test_an_indirect_transpose_gathers_rows_down_the_columns_of_its_indices():
    x = randn(300, 64).astype(ml_dtypes.bfloat16)
    index = np.random.default_rng(0).integers(0, 300, (128, 2)).astype(np.uint32)

    def kernel(x, index):
        turned, out = nl.ndarray((64, 256), "bfloat16"), hbm(64, 256, dtype="bfloat16")
        nisa.dma_transpose(turned, x.ap([[64, 256], [1, 64]], vector_offset=nl.load(index)))
        nisa.dma_copy(out, turned)
        return out

    assert (nki_sim.simulate(kernel)(x, index) == x[index.T.reshape(-1)].T).all()


def test_a_scalar_offset_from_sbuf_or_a_register_moves_a_whole_view():
    def kernel(x, where):
        out, reg = hbm(2, 4, 6), nisa.register_alloc(3)
        tile = nl.ndarray((4, 6), "float32")
        nisa.dma_copy(tile, x.ap([[6, 4], [1, 6]], scalar_offset=nl.load(where), indirect_dim=0))
        nisa.dma_copy(out[0], tile)
        nisa.dma_copy(out[1], x[nl.ds(reg, 4)])
        return out

    x = randn(10, 6)
    got = nki_sim.simulate(kernel)(x, np.array([[6]], np.int32))
    np.testing.assert_array_equal(got, np.stack([x[6:10], x[3:7]]))
    with pytest.raises(nki_sim.NkiError, match="out-of-bounds"):
        nki_sim.simulate(kernel)(x, np.array([[7]], np.int32))


BF, I32, U32 = {"dtype": "bfloat16"}, {"dtype": "int32"}, {"dtype": "uint32"}
MODE = nisa.dge_mode


def rows(source=(8, 6), n=4, dtype="float32", index=None):
    """A view that gathers n rows."""
    table = nl.ndarray(source, dtype, buffer=nl.hbm)
    return table.ap([[source[1], n], [1, source[1]]], vector_offset=index if index is not None else sb(n, 1, **U32))


def add(dst, *srcs, op=nl.add, **options):
    nisa.dma_compute(dst, list(srcs), op, **options)


def moved(n, width, dtype="bfloat16"):
    """Rows of HBM that begin where a register says."""
    table = nl.ndarray((256, width), dtype, buffer=nl.hbm)
    return table.ap([[width, n], [1, width]], scalar_offset=nisa.register_alloc(0), indirect_dim=0)


def at(index, dim=0):
    """Rows that a run-time number chooses."""
    return hbm(8, 6).ap([[6, 4], [1, 6]], scalar_offset=index, indirect_dim=dim)


REFUSALS = [
    ("operand", lambda: at(sb(1, 2, **I32))),
    ("operand", lambda: at(sb(1, 1))),
    ("operand", lambda: at("1")),
    ("operand", lambda: hbm(8, 6)[nl.ds(sb(1, 1), 4)]),
    ("operand", lambda: hbm(8, 6).select(0, sb(1, 2, **I32))),
    ("view", lambda: at(nisa.register_alloc(0), 2)),
    ("ap", lambda: hbm(8, 6).ap([[6, 4], [1, 6]], scalar_offset=nisa.register_alloc(0), vector_offset=sb(4, 1, **I32))),
    ("out-of-bounds", lambda: hbm(8, 6)[nl.ds(nisa.register_alloc(0), 9)]),
    ("target", lambda: nisa.dma_transpose(sb(4, 8), sb(8, 4), priority=1)),
    ("dma-mode", lambda: nisa.dma_transpose(sb(6, 32, **BF), rows((64, 6), 32, "bfloat16"), dge_mode=MODE.hwdge)),
    ("indirect", lambda: add(sb(4, 6), sb(4, 6), at(nisa.register_alloc(0)))),
    ("buffer", lambda: nisa.dma_copy(ps(8, 4), sb(8, 4))),
    ("buffer", lambda: nisa.dma_copy(sb(8, 4), ps(8, 4))),
    ("shape", lambda: nisa.dma_copy(sb(8, 4), sb(8, 5))),
    ("target", lambda: nisa.dma_copy(sb(8, 4), sb(8, 4), priority=1)),
    ("dma-mode", lambda: nisa.dma_copy(sb(8, 4), sb(8, 4, **BF), dge_mode=MODE.hwdge)),
    ("dma-mode", lambda: nisa.dma_copy(sb(4, 6), rows(), dge_mode=MODE.hwdge)),
    ("dma-mode", lambda: nisa.dma_copy(sb(4, 6), rows(), dge_mode=MODE.none)),
    ("dma-mode", lambda: nisa.dma_copy(sb(8, 4), sb(8, 4), engine=nisa.engine.sync)),
    ("dma-mode", lambda: nisa.dma_copy(rows(), rows())),
    ("vector-offset", lambda: nisa.dma_copy(sb(4, 6), rows(index=sb(4, 1)))),
    ("vector-offset", lambda: nisa.dma_copy(sb(4, 6), rows(index=sb(3, 1, **I32)))),
    ("vector-offset", lambda: nisa.dma_copy(sb(4, 6), rows(index=hbm(4, 1, **I32)))),
    ("op", lambda: add(sb(4, 6), sb(4, 6), sb(4, 6), op=nl.maximum)),
    ("value", lambda: add(sb(4, 6), sb(4, 6), sb(4, 6), scales=[1.0, 2.0])),
    ("value", lambda: add(sb(4, 6), rows(), sb(4, 6), unique_indices=False)),
    ("dma-sources", lambda: add(sb(4, 6), *[sb(4, 6)] * 17)),
    ("dma-sources", lambda: add(sb(4, 6), rows(), sb(4, 6), sb(4, 6))),
    ("dma-sources", lambda: add(rows(), sb(4, 6), sb(4, 6))),
    ("shape", lambda: add(sb(4, 6), sb(4, 5))),
    ("axes", lambda: nisa.dma_transpose(sb(4, 8), sb(8, 4), axes=(0, 1))),
    ("shape", lambda: nisa.dma_transpose(sb(8, 4), sb(8, 4))),
    ("shape", lambda: nisa.dma_transpose(sb(4, 6), sb(2, 3, 4))),
    ("dtype", lambda: nisa.dma_transpose(sb(4, 8), sb(8, 4, **BF))),
    ("dma-mode", lambda: nisa.dma_transpose(sb(4, 16, **BF), moved(16, 4), dge_mode=MODE.none)),
    ("dynamic-dma-transpose", lambda: nisa.dma_transpose(sb(4, 32, **BF), moved(32, 4))),
    ("dynamic-dma-transpose", lambda: nisa.dma_transpose(sb(4, 16), moved(16, 4, "float32"))),
    ("dynamic-dma-transpose", lambda: nisa.dma_transpose(sb(128, 2, 128, **BF)[:, 0], moved(128, 128))),
    ("access-pattern", lambda: hbm(8, 6).ap([[1, 1]] * 6)),
    ("dtype", lambda: nisa.dma_transpose(sb(4, 8, dtype="int8"), sb(8, 4, dtype="int8"))),
    ("buffer", lambda: nisa.dma_transpose(hbm(4, 8), sb(8, 4))),
    ("dma-mode", lambda: nisa.dma_transpose(sb(4, 8), sb(8, 4), dge_mode=MODE.swdge)),
    ("dma-mode", lambda: nisa.dma_transpose(sb(4, 8), sb(8, 4), oob_mode=SKIP)),
    ("dma-transpose", lambda: nisa.dma_transpose(sb(4, 8, **BF), sb(8, 4, **BF), dge_mode=MODE.hwdge)),
    ("dma-transpose", lambda: nisa.dma_transpose(sb(4, 16), sb(16, 4), dge_mode=MODE.hwdge)),
    ("dma-transpose", lambda: nisa.dma_transpose(sb(6, 24), rows((64, 6), 24, index=sb(32, 1, **U32)))),
    ("vector-offset", lambda: nisa.dma_transpose(sb(6, 32, **BF), rows((64, 6), 32, "bfloat16", sb(32, 1, **I32)))),
    ("vector-offset", lambda: nisa.dma_transpose(sb(6, 32, **BF), rows((64, 6), 32, "bfloat16", sb(16, 1, **U32)))),
    ("buffer", lambda: nisa.tensor_copy(sb(4, 6), rows())),
]


@pytest.mark.parametrize(("rule", "body"), REFUSALS)
def test_what_dma_cannot_do_is_refused(rule, body):
    refused(rule, body)


def test_a_run_time_index_stays_in_its_dimension():
    """Not only in the tensor: past the end of a row is the next row, past that of a view what it left out."""

    def kernel(x, start, where):
        reg, tile = nisa.register_alloc(), nl.ndarray((2, 4), "float32")
        nisa.register_load(reg, nl.load(start))
        part = nl.ds(reg, 4)
        if where == "columns":
            nisa.dma_copy(tile, x[0:2, part])
        elif where == "view":
            nisa.dma_copy(tile, x[0:5][nl.ds(reg, 2), 0:4])
        elif where == "rows":
            nisa.dma_copy(tile, x[0:5].vector_select(0, nl.full((2, 1), 5, "int32"))[:, 0:4])
        else:
            nisa.tensor_copy(tile, nl.load(x[0:2])[:, part])
        out = hbm(2, 4)
        nisa.dma_copy(out, tile)
        return out

    x, start = randn(8, 6), np.array([[2]], np.int32)
    for where in ("columns", "tile"):
        np.testing.assert_array_equal(nki_sim.simulate(kernel)(x, start, where), x[:2, 2:6])
    np.testing.assert_array_equal(nki_sim.simulate(kernel)(x, start, "view"), x[2:4, :4])
    for where, value in (("columns", 3), ("tile", 3), ("view", 4), ("columns", -1), ("rows", 0)):
        with pytest.raises(nki_sim.NkiError, match=r"^out-of-bounds"):
            nki_sim.simulate(kernel)(x, start * 0 + value, where)


def test_a_pattern_on_chip_stays_in_each_partitions_own_elements():
    for pattern in ([[6, 4], [1, 7]], [[6, 1], [6, 4]]):  # in an (8, 6) tile: there is more of it, but elsewhere
        refused("out-of-bounds", lambda pattern=pattern: sb(8, 6).ap(pattern))
    moving = lambda n: nisa.tensor_copy(sb(4, 2), sb(8, 6).ap([[6, 4], [1, 2]], scalar_offset=nisa.register_alloc(n), indirect_dim=1))  # noqa: E731  # fmt: skip
    nki_sim.simulate(lambda: moving(4) and None)()
    refused("out-of-bounds", lambda: moving(5))


def test_a_static_pattern_outside_its_tensor_is_refused_when_it_is_made():
    refused("", lambda: nl.ndarray((8, 6), "float32", buffer=nl.hbm).ap([[6, 9], [1, 6]]), error=ValueError)
    refused("", lambda: hbm(8, 6)[4:9], error=ValueError)
