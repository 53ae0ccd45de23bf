"""The contract: costs are the documented formulas, times are ideal <= scheduled, and the schedule respects what instructions need."""

import json
import sys
from dataclasses import replace
from itertools import pairwise

import ml_dtypes
import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from nki_sim.cost import Model, cost, descriptor_ns
from sim_harness import hbm, ps, randn, sb

BF = {"dtype": "bfloat16"}
M = Model()
DOCUMENTED_MODEL = replace(M, two_sbuf_cycles=2)  # what calibration changed, as the pages had it


def cycles(body, ghz, model=M):
    """Cycles of the instruction that `body` emits last."""

    def kernel():
        body()

    return cost(nki_sim.trace(kernel).instructions[-1], model).ns * ghz


def mm(m, n, k=128, dtype="bfloat16", **options):
    return lambda: nisa.nc_matmul(ps(m, n), sb(k, m, dtype=dtype), sb(k, n, dtype=dtype), **options)


DOCUMENTED = [  # aws-neuron-sdk 1db4d74, "Estimated instruction cost", and the Vector Engine mode of the Trainium2 guide
    (2.4, 512, mm(128, 512)),
    (2.4, 64, mm(128, 16)),
    (2.4, 16, mm(8, 16)),
    (2.4, 2048, mm(128, 512, dtype="float32")),
    (2.4, 100, lambda: nisa.nc_transpose(ps(40, 100, **BF), sb(100, 40, **BF))),
    (0.96, 64, lambda: nisa.nc_transpose(sb(32, 32), sb(32, 32), engine=nisa.engine.vector)),
    (0.96, 1000, lambda: nisa.tensor_copy(sb(8, 1000), sb(8, 1000))),
    (0.96, 250, lambda: nisa.tensor_copy(sb(8, 1000, **BF), sb(8, 1000, **BF))),
    (0.96, 500, lambda: nisa.tensor_copy(sb(8, 1000, **BF), sb(8, 2000, **BF)[:, ::2])),
    (0.96, 250, lambda: nisa.tensor_copy(sb(8, 500, **BF), ps(8, 500, **BF))),
    (1.2, 1000, lambda: nisa.tensor_copy(sb(8, 1000), sb(8, 1000), engine=nisa.engine.scalar)),
    (0.96, 2000, lambda: nisa.tensor_tensor(sb(8, 1000), sb(8, 1000), sb(8, 1000), nl.add)),
    (0.96, 500, lambda: nisa.tensor_tensor(sb(8, 1000, **BF), sb(8, 1000, **BF), sb(8, 1000, **BF), nl.add)),
    (0.96, 500, lambda: nisa.tensor_tensor(sb(8, 500), ps(8, 500), sb(8, 500), nl.add)),
    (0.96, 64, lambda: nisa.tensor_scalar(sb(8, 10), sb(8, 10), nl.add, 1.0)),
    (0.96, 2000, lambda: nisa.scalar_tensor_tensor(sb(8, 1000), sb(8, 1000), nl.add, 1.0, nl.add, sb(8, 1000))),
    (0.96, 1000, lambda: nisa.tensor_reduce(sb(8, 1), nl.add, sb(8, 1000), axis=1)),
    (0.96, 500, lambda: nisa.tensor_reduce(sb(8, 1, **BF), nl.add, sb(8, 1000, **BF), axis=1)),
    (0.96, 8000, lambda: nisa.reciprocal(sb(8, 1000), sb(8, 1000))),
    (0.96, 500, lambda: nisa.memset(nl.ndarray((8, 1000), "bfloat16"), 0)),
    (0.96, 1064, lambda: nisa.tensor_scalar_reduce(sb(8, 1000), sb(8, 1000), nl.add, 1.0, nl.add, sb(8, 1))),
    (0.96, 2000, lambda: nisa.tensor_tensor_scan(sb(8, 1000), sb(8, 1000), sb(8, 1000), 0.0, nl.add, nl.add)),
    (1.2, 1000, lambda: nisa.activation(sb(8, 1000), nl.silu, sb(8, 1000))),
    (1.2, 1064, lambda: nisa.activation_reduce(sb(8, 1000), nl.exp, sb(8, 1000), nl.add, sb(8, 1))),
    (1.2, 1150, lambda: nisa.iota(sb(8, 1000), [[1, 1000]])),
    (0.96, 600, lambda: nisa.tensor_copy(sb(8, 10), sb(8, 100)[:, nl.ds(nisa.register_alloc(0), 10)])),
]


@pytest.mark.parametrize(("ghz", "want", "body"), DOCUMENTED)
def test_instruction_costs_are_the_documented_formulas(ghz, want, body):
    assert cycles(body, ghz, DOCUMENTED_MODEL) == pytest.approx(want)


def test_every_assumption_is_a_knob():
    body = DOCUMENTED[7][2]
    assert cycles(body, 0.96, replace(M, vector_modes=False)) == pytest.approx(1000)
    assert cycles(DOCUMENTED[14][2], 0.96, replace(M, min_cycles=10)) == pytest.approx(10)


def dma(body, model=M):
    def kernel():
        body()

    return cost(nki_sim.trace(kernel).instructions[-1], model)


def test_dma_counts_bytes_descriptors_and_direction():
    c = dma(lambda: nisa.dma_copy(sb(128, 1024), hbm(128, 1024)))
    assert (c.bytes, c.descriptors, c.direction) == (2**19, 128, "hbm->sbuf") and c.ns == pytest.approx(
        8 * descriptor_ns(4096, M)
    )
    strided = dma(lambda: nisa.dma_copy(sb(128, 64), hbm(128, 128)[:, ::2]))
    assert strided.descriptors == 128 * 64 and strided.ns == pytest.approx(128 * 64 / 16 * descriptor_ns(4, M))
    assert (
        dma(lambda: nisa.dma_copy(nl.ndarray((64, 512), "float32", buffer=nl.hbm), sb(64, 512))).direction
        == "sbuf->hbm"
    )
    turned = dma(lambda: nisa.dma_transpose(sb(128, 512, **BF), hbm(512, 128, **BF)))
    assert turned.ns == pytest.approx(2**17 / 368 / 0.9)


def pipeline(x, tiles=4, buffers=4):
    out = hbm(*x.shape, dtype=x.dtype)
    tile = [nl.ndarray((128, x.shape[1]), x.dtype) for _ in range(buffers)]
    for t in range(tiles):
        rows = slice(t * 128, t * 128 + 128)
        nisa.dma_copy(tile[t % buffers], x[rows])
        nisa.activation(tile[t % buffers], nl.exp, tile[t % buffers])
        nisa.dma_copy(out[rows], tile[t % buffers])
    return out


def test_a_report_gives_three_times_the_split_and_the_same_outputs():
    x = randn(512, 512)
    r = nki_sim.report(pipeline, x)
    np.testing.assert_allclose(r.outputs, np.exp(x), rtol=1e-6)
    assert r.ideal_ns <= r.serial_ns and r.ideal_ns < r.scheduled_ns
    core = r.cores[0]
    assert core.dma_bytes == {"hbm->sbuf": x.nbytes, "sbuf->hbm": x.nbytes} and core.descriptors == {2048: 1024}
    assert core.busy_ns["scalar"] == pytest.approx(4 * 512 / 1.2) and r.usage.sbuf == 2048
    assert "modelled" in str(r) and r.to_dict()["modelled"] is True and json.dumps(r.to_dict())


def test_the_schedule_waits_for_data_for_buffers_and_for_the_engine():
    events = nki_sim.report(pipeline, randn(512, 512)).events
    load, act, store = events[0], events[1], events[2]
    assert load.end == pytest.approx(load.cost.ns + M.dma_latency_ns)
    assert act.start == load.end and store.start >= act.end
    assert events[4].start >= act.end  # one Scalar Engine, in order
    loads = [e for e in events if e.cost.direction == "hbm->sbuf"]
    assert all(b.start >= a.start + a.cost.ns for a, b in pairwise(loads))
    single = nki_sim.report(pipeline, randn(512, 512), buffers=1)
    reuse = single.events
    assert reuse[3].start >= reuse[2].end  # the second load waits until the first tile was stored
    assert single.scheduled_ns > nki_sim.report(pipeline, randn(512, 512)).scheduled_ns


def test_depends_on_orders_otherwise_free_instructions():
    def kernel(wait):
        slow, quick = nl.ndarray((8, 4000), "float32"), nl.ndarray((8, 4), "float32")
        a = nisa.memset(slow, 0, engine=nisa.engine.gpsimd)
        b = nisa.memset(quick, 0)
        if wait:
            b.depends_on(a)

    free, ordered = (nki_sim.report(kernel, w).events for w in (False, True))
    assert free[1].start == 0 and ordered[1].start == ordered[0].end


def test_the_tensor_engines_time_splits_into_useful_transposed_and_padding():
    def kernel():
        x = sb(64, 64, **BF)
        nisa.nc_matmul(ps(64, 64), x, x)
        nisa.nc_transpose(ps(64, 64, **BF), x)

    core = nki_sim.report(kernel).cores[0]
    assert core.busy_ns["tensor"] == pytest.approx(128 / 2.4) and core.pe_ns["transpose"] == pytest.approx(64 / 2.4)
    assert core.pe_ns["useful"] == pytest.approx(64 / 4 / 2.4) and core.pe_ns["padding"] == pytest.approx(48 / 2.4)


def test_loops_cost_what_they_ran_and_two_cores_count_apart():
    def kernel(n):
        tile, reg = sb(8, 1200), nisa.register_alloc()
        nisa.register_load(reg, nl.load(n))
        nl.fori_loop(0, reg, lambda i: nisa.activation(tile, nl.copy, tile) and None)
        if nl.program_id(0):
            nisa.activation(tile, nl.copy, tile)

    r = nki_sim.report(nki_sim.jit(kernel)[2], np.array([[5]], np.int32))
    assert [c.busy_ns["scalar"] for c in r.cores] == pytest.approx([5000, 6000])
    assert r.cores[0].instructions["activation"] == 5


def test_a_barrier_holds_the_faster_core():
    def kernel():
        shared, tile = hbm(2, 4), sb(1, 4)
        if nl.program_id(0):
            nisa.memset(sb(8, 9000), 0)
            nisa.memset(tile, 1)
        nisa.memset(nl.ndarray((1, 4), "float32"), 0, engine=nisa.engine.gpsimd)
        nisa.dma_copy(shared[nl.program_id(0) : nl.program_id(0) + 1], tile)
        nisa.core_barrier(shared, (0, 1))
        nisa.dma_copy(sb(1, 4), shared[1 - nl.program_id(0) : 2 - nl.program_id(0)])
        return shared

    events = nki_sim.report(nki_sim.jit(kernel)[2]).events
    barriers = [e for e in events if e.instr.op == "core_barrier"]
    assert barriers[0].start >= 9000 / 0.96 and barriers[1].start >= barriers[0].start
    last_write = max(e.end for e in events if e.cost.direction == "sbuf->hbm")
    reads = [e.start for e in events if e.cost.direction == "hbm->sbuf"]
    assert len(reads) == 2 and min(reads) >= last_write


def test_the_trace_and_the_chart_are_written_whole(tmp_path):
    r = nki_sim.report(pipeline, randn(512, 64).astype(ml_dtypes.bfloat16))
    spans = [e for e in json.loads(r.save_trace(tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(r.events) and all("test_cost.py" in s["args"]["line"] for s in spans)
    assert max(s["args"]["seen_us"] for s in spans) == pytest.approx(r.scheduled_ns / 1e3)
    for tid in {s["tid"] for s in spans}:
        track = sorted((s["ts"], s["ts"] + s["dur"]) for s in spans if s["tid"] == tid)
        assert all(later >= end - 1e-9 for (_, end), (later, _) in pairwise(track))  # nothing overlaps on one track
    assert r.save_chart(tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.png", "t.json"]


def test_a_chart_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    report = nki_sim.report(pipeline, randn(512, 64))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'nki-sim\[plot\]'"):
        report.save_chart(tmp_path / "c.png")
    assert not list(tmp_path.iterdir())


def test_the_curve_of_descriptors_is_the_guides_four_ranges():
    share = {size: size / 23 / descriptor_ns(size, M) for size in (64, 256, 512, 1024, 2048, 4096, 8192)}
    assert list(share.values()) == sorted(share.values())
    assert share[64] < 0.1 and share[256] < 0.25  # "a small fraction of peak"
    assert 0.25 < share[512] < share[1024] < 0.75  # "still below peak"
    assert share[2048] > 0.75 and share[4096] > 0.93 and share[8192] > 0.98  # "approaches", "saturates"


def looped(passes, loops=1):
    def kernel():
        tile, other = sb(8, 1200), sb(8, 96)
        for _ in range(loops):
            nl.fori_loop(0, passes, lambda i: nisa.activation(tile, nl.copy, tile) and None)
        nisa.memset(other, 1.0, engine=nisa.engine.gpsimd)

    return kernel


def test_a_device_loop_costs_its_synchronisation_once_and_engines_drain_at_its_end():
    r = nki_sim.report(looped(5))
    ends = [e for e in r.events if e.instr.op == "loop"]
    last = max(e.end for e in r.events if e.instr.op == "activation")
    assert len(ends) == 1 and ends[0].start >= last and ends[0].cost.ns == M.loop_ns == 35_000
    assert r.events[-1].instr.engine == "gpsimd" and r.events[-1].start >= ends[0].end  # though nothing else holds it
    assert r.scheduled_ns >= 35_000 + 5 * 1000
    free = nki_sim.report(looped(5), model=replace(M, loop_ns=0, loop_drains=False))
    assert free.scheduled_ns < 35_000 and free.events[-1].start < last
    assert nki_sim.report(looped(5, loops=3)).cores[0].busy_ns["sync"] >= 3 * 35_000


def late_memset(model):
    """A memset that program order puts behind a copy whose operand is not there yet, and a matmul that needs it."""

    def kernel():
        slow, x, out = sb(128, 4000), sb(128, 128, **BF), sb(128, 64)
        nisa.activation(slow, nl.exp, slow)
        nisa.tensor_copy(nl.ndarray((128, 4000), "float32"), slow)  # waits for the Scalar Engine
        nisa.memset(x, 1.0, engine=nisa.engine.vector)  # waits for nothing
        product = nl.ndarray((128, 64), "float32", buffer=nl.psum)
        nisa.nc_matmul(product, x, x[:, :64])
        nisa.tensor_copy(out, product)

    r = nki_sim.report(kernel, model=model)
    return r, next(e for e in r.events if e.instr.op == "nc_matmul")


def test_an_engine_starts_what_can_start_where_the_compiler_would_reorder():
    strict, waiting = late_memset(replace(M, reorder=1))
    free, early = late_memset(M)
    assert early.start < waiting.start and free.scheduled_ns <= strict.scheduled_ns
    order = [e.start for e in strict.events if e.instr.engine == "vector"]
    assert order == sorted(order)


def test_a_write_waits_for_every_reader_that_may_start_after_a_later_one():
    def kernel(x):
        tile, slow = nl.load(x), nl.ndarray((8, 9000), "float32")
        nisa.memset(slow, 0.0)  # on Vector
        first, second = nl.ndarray((8, 64), "float32"), nl.ndarray((8, 64), "float32")
        nisa.tensor_tensor(first, tile, slow[:, :64], nl.add)
        nisa.tensor_copy(second, tile)  # may overtake the reader before it
        nisa.memset(tile, 0.0, engine=nisa.engine.gpsimd)

    r = nki_sim.report(kernel, randn(8, 64))
    readers = [
        e.end
        for e in r.events
        if any(v.name == "" and v.shape == (8, 64) for v in e.instr.reads) and e.instr.engine == "vector"
    ]
    assert r.events[-1].start >= max(readers)


def weights(same, gap):
    def kernel():
        x, y, z = sb(128, 128, **BF), sb(128, 128, **BF), sb(128, 512, **BF)
        nisa.nc_matmul(ps(128, 512), x, z)
        if gap:
            nisa.tensor_copy(z, z)  # the next matmul waits for it, and nothing runs meanwhile that would hide the load
        nisa.nc_matmul(ps(128, 512), x if same else y, z)

    matmuls = [e for e in nki_sim.report(kernel).events if e.instr.op == "nc_matmul"]
    return matmuls[1].start - matmuls[0].end


def test_a_stationary_tile_is_loaded_behind_the_matmul_before_it():
    assert weights(same=False, gap=False) == pytest.approx(0)

    def kernel():
        x, y, z = sb(128, 128, **BF), sb(128, 128, **BF), sb(128, 8, **BF)
        for stationary in (x, y, x):
            nisa.nc_matmul(nl.ndarray((128, 8), "float32", buffer=nl.psum), stationary, z)

    starts = [
        e.start for e in nki_sim.report(kernel, model=replace(M, weight_cycles=200)).events if e.instr.op == "nc_matmul"
    ]
    assert starts[1] - starts[0] == pytest.approx(200 / 2.4) and starts[2] - starts[1] == pytest.approx(200 / 2.4)


def test_a_core_alone_on_its_chip_streams_faster_than_one_of_eight():
    r = nki_sim.report(pipeline, randn(512, 4096))
    assert 1.02 < r.scheduled_ns / r.lone_ns < 400 / 368 and r.to_dict()["lone_ns"] == r.lone_ns
    assert "on a loaded chip" in str(r) and "on a core alone" in str(r)


def test_a_transpose_at_a_run_time_address_costs_an_issue_for_sixteen_rows():
    def kernel():
        table = nl.ndarray((256, 128), "bfloat16", buffer=nl.hbm)
        nisa.dma_copy(table.reshape(128, 256), sb(128, 256, **BF))
        for i in range(4):
            at = table.ap([[128, 16], [1, 128]], scalar_offset=nisa.register_alloc(16 * i), indirect_dim=0)
            nisa.dma_transpose(nl.ndarray((128, 16), "bfloat16"), at)

    r = nki_sim.report(kernel)
    assert r.cores[0].busy_ns["sync"] >= 4 * M.hwdge_ns
