"""The contract: under LNC2 two cores share HBM, meet at barriers, exchange tiles, and a race is found whatever the values are."""

import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from sim_harness import hbm, randn, refused, sb


def exchange(barrier):
    """Each core writes half of a shared tensor and reads the other half."""

    def kernel(x):
        me, n = nl.program_id(0), x.shape[0] // 2
        shared, out, tile = hbm(*x.shape), hbm(*x.shape), nl.load(x[me * n : me * n + n])
        nisa.dma_copy(shared[me * n : me * n + n], tile)
        if barrier:
            nisa.core_barrier(shared, (0, 1))
        other = nl.load(shared[(1 - me) * n : (2 - me) * n])
        nisa.dma_copy(out[(1 - me) * n : (2 - me) * n], other)
        return out

    return nki_sim.jit(kernel)


@pytest.mark.parametrize("order", ["core0", "core1", "alternate", "all"])
def test_cores_that_meet_before_reading_give_one_result_in_every_order(order):
    x = randn(64, 8)
    assert (nki_sim.simulate(exchange(True)[2], order=order)(x) == x).all()


@pytest.mark.parametrize("order", ["core0", "core1", "alternate"])
def test_a_missing_barrier_is_a_race_even_where_the_values_agree(order):
    x = np.zeros((64, 8), np.float32)
    with nki_sim.checks(record=["race", "uninitialized"]) as findings:
        nki_sim.simulate(exchange(False)[2], order=order)(x)
    races = [f for f in findings if f.rule == "race"]
    assert races and "no core_barrier" in races[0].message and "test_machine.py" in str(races[0].where)
    with pytest.raises(nki_sim.NkiError, match=r"^race|^uninitialized"):
        nki_sim.simulate(exchange(False)[2], order=order)(x)


def scatter_race(x, index, out):
    """Both cores zero and scatter one table: the planted fault of a zero-init without a barrier."""
    me = nl.program_id(0)
    if me == 0:
        nisa.dma_copy(out, sb(8, 6))
    nisa.dma_copy(out.ap([[6, 4], [1, 6]], vector_offset=nl.load(index[me * 4 : me * 4 + 4])), nl.load(x))
    return out


def test_a_scatter_before_the_other_core_zeroed_is_a_race_and_orders_differ():
    x, index = randn(4, 6), np.arange(8, dtype=np.int32)[:, None]
    kernel = nki_sim.jit(scatter_race)[2]
    with pytest.raises(
        nki_sim.NkiError, match=r"^race: dma_copy: core 1 writes what core 0 writes \(dma_copy at .*test_machine"
    ):
        nki_sim.simulate(kernel)(x, index, np.ones((8, 6), np.float32))
    with nki_sim.checks(record=["race"]) as findings, pytest.raises(nki_sim.NkiError, match="interleaving"):
        nki_sim.simulate(kernel, order="all")(x, index, np.ones((8, 6), np.float32))
    assert findings


def test_rows_that_interleave_without_touching_are_no_race():
    def kernel(x):
        me, out = nl.program_id(0), hbm(8, 6)
        nisa.dma_copy(out[nl.ds(me, 7)][::2] if me == 0 else out[1:8:2], nl.load(x)[0:4])
        return out

    got = nki_sim.simulate(nki_sim.jit(kernel)[2])(randn(8, 6))
    assert got.shape == (8, 6)


def test_each_core_has_its_own_on_chip_and_private_memory():
    def kernel(x):
        me = nl.program_id(0)
        private, out = nl.ndarray((1, 4), "float32", buffer=nl.private_hbm), hbm(2, 4)
        nisa.dma_copy(private, nl.full((1, 4), float(me), "float32"))
        nisa.dma_copy(out[me : me + 1], private)
        assert nl.num_programs(0) == 2 and nl.program_ndim() == 1
        return out

    assert nki_sim.simulate(nki_sim.jit(kernel)[2])(randn(1, 1)).tolist() == [[0.0] * 4, [1.0] * 4]


def test_sendrecv_swaps_tiles():
    def kernel(x):
        me, out = nl.program_id(0), hbm(2, 4, 6)
        mine, theirs = nl.load(x[me]), nl.ndarray((4, 6), "float32")
        nisa.sendrecv(mine, theirs, 1 - me, 1 - me, 0)
        nisa.dma_copy(out[me], theirs)
        return out

    x = randn(2, 4, 6)
    for order in ("core0", "core1", "alternate"):
        np.testing.assert_array_equal(nki_sim.simulate(nki_sim.jit(kernel)[2], order=order)(x), x[::-1])


def only_core_0():
    if nl.program_id(0) == 0:
        nisa.core_barrier(hbm(8, 4), (0, 1))
    else:
        hbm(8, 4)


def different_shapes():
    nisa.core_barrier(hbm(8, 4 + nl.program_id(0)), (0, 1))


REFUSALS = [
    (1, "cores", lambda: nisa.core_barrier(hbm(8, 4), (0, 1))),
    (2, "cores", lambda: nisa.core_barrier(hbm(8, 4), (0,))),
    (2, "buffer", lambda: nisa.core_barrier(sb(8, 4), (0, 1))),
    (2, "deadlock", only_core_0),
    (1, "cores", lambda: nisa.sendrecv(sb(8, 4), sb(8, 4), 0, 0, 0)),
    (2, "cores", lambda: nisa.sendrecv(sb(8, 4), sb(8, 4), 2, 0, 0)),
    (2, "shape", lambda: nisa.sendrecv(sb(8, 4), sb(8, 5), 0, 0, 0)),
    (2, "dtype", lambda: nisa.sendrecv(sb(8, 4), sb(8, 4, dtype="int32"), 0, 0, 0)),
    (2, "value", lambda: nisa.sendrecv(sb(8, 257), sb(8, 257), 0, 0, 0, nisa.dma_engine.gpsimd_dma)),
    (2, "deadlock", lambda: nisa.sendrecv(sb(8, 4), sb(8, 4), 0, 1, 0)),
]


@pytest.mark.parametrize(("cores", "rule", "body"), REFUSALS)
def test_meetings_refuse_what_cannot_work(cores, rule, body):
    refused(rule, body, cores)


def test_cores_must_allocate_the_same_shared_tensors():
    with pytest.raises(nki_sim.NkiError, match="divergence"):
        nki_sim.simulate(nki_sim.jit(lambda: different_shapes())[2])()


@pytest.mark.parametrize("grid", [0, 3, (1, 2)])
def test_a_grid_is_one_or_two_cores(grid):
    with pytest.raises(ValueError, match="1 or 2"):
        exchange(True)[grid]


def test_an_order_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="'fast' is not one of core0, core1, alternate, all"):
        nki_sim.simulate(exchange(True)[2], order="fast")(randn(4, 8))


def test_every_order_compares_arguments_that_are_written_as_well():
    def kernel(x):
        nisa.dma_copy(x, nl.full((2, 4), float(nl.program_id(0)), "float32"))

    with nki_sim.checks(record=["race"]), pytest.raises(nki_sim.NkiError, match="interleaving: array 0"):
        nki_sim.simulate(nki_sim.jit(kernel)[2], order="all")(randn(2, 4))


def counted(x, n):
    """Each core of a pair runs its own number of passes."""
    me, out, register = nl.program_id(0), hbm(2, 4), nisa.register_alloc()
    total = nl.load(x)
    nisa.register_load(register, nl.load(n[me : me + 1]))
    nl.fori_loop(0, register, lambda i: nisa.tensor_scalar(total, total, nl.add, 1.0) and None)
    nisa.dma_copy(out[me : me + 1], total)
    return out


@pytest.mark.parametrize("order", ["core0", "core1", "alternate"])
def test_loops_of_a_pair_run_equally_often_on_both_cores(order):
    x, kernel = np.zeros((1, 4), np.float32), nki_sim.jit(counted)[2]
    same, other = np.array([[3], [3]], np.int32), np.array([[3], [2]], np.int32)
    assert (nki_sim.simulate(kernel, order=order)(x, same) == 3).all()
    with pytest.raises(nki_sim.NkiError, match=r"^lnc-trips: .*3 times.*2 times|^lnc-trips: .*2 times.*3 times"):
        nki_sim.simulate(kernel, order=order)(x, other)
    with nki_sim.checks(record=["lnc-trips"]) as findings:
        assert nki_sim.simulate(kernel, order=order)(x, other)[:, 0].tolist() == [3, 2]
    assert [f.rule for f in findings] == ["lnc-trips"]


def test_a_loop_that_only_one_core_runs_is_refused():
    def body():
        if nl.program_id(0):
            nl.fori_loop(0, 2, lambda i: None)

    assert "core 0 does not run it" in refused("lnc-trips", body, cores=2)


def test_a_while_loop_may_skip_its_body_on_one_core_but_not_on_a_pair():
    def body():
        nl.while_loop(nisa.register_alloc(0), lambda r: r)

    nki_sim.simulate(lambda: body())()
    refused("zero-trip", body, cores=2)


def test_unequal_loops_inside_equal_ones_are_found_in_the_pass_where_they_differ():
    def kernel(n):
        me, register = nl.program_id(0), nisa.register_alloc()
        counts = nl.load(n)

        def outer(i):
            nisa.register_load(register, counts[0:1, nl.ds(i, 1)] if me == 0 else counts[0:1, 0:1])
            nl.fori_loop(0, register, lambda j: None)

        nl.fori_loop(0, 3, outer)

    with nki_sim.checks():
        nki_sim.simulate(nki_sim.jit(kernel)[2])(np.array([[2, 2, 2]], np.int32))
        with pytest.raises(nki_sim.NkiError, match="lnc-trips"):
            nki_sim.simulate(nki_sim.jit(kernel)[2])(np.array([[2, 2, 1]], np.int32))
