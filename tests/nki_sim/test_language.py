"""The contract: device loops are recorded once and run as often as the device's own numbers say; Python sees none of these."""

import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from sim_harness import hbm, randn, refused, sb


def add_rows(style):
    """out[0] = sum of the first n rows of x, n read on the device."""

    def kernel(x, n):
        total, count, reg = nl.zeros((1, x.shape[1]), "float32"), nl.load(n), nisa.register_alloc()
        nisa.register_load(reg, count)

        def body(i):
            row = nl.ndarray((1, x.shape[1]), "float32")
            nisa.dma_copy(row, x.ap([[x.shape[1], 1], [1, x.shape[1]]], scalar_offset=i, indirect_dim=0))
            nisa.tensor_tensor(total, total, row, nl.add)

        if style == "fori_loop":
            nl.fori_loop(0, reg, body)
        elif style == "dynamic_range":
            for i in nl.dynamic_range(reg):
                body(i)
        else:
            one, at = nl.full((1, 1), 1, "int32"), nl.zeros((1, 1), "int32")

            def again(r):
                body(at)
                nisa.tensor_tensor(at, at, one, nl.add)
                nisa.tensor_tensor(count, count, one, nl.subtract)
                nisa.register_load(r, count)
                return r

            nl.while_loop(reg, again)
        out = hbm(1, x.shape[1])
        nisa.dma_copy(out, total)
        return out

    return kernel


@pytest.mark.parametrize("style", ["fori_loop", "while_loop", "dynamic_range"])
def test_loops_run_as_often_as_the_device_says_from_one_program(style):
    x = np.round(randn(9, 5) * 8)
    program = nki_sim.trace(add_rows(style), (nki_sim.Spec((9, 5), "float32"), nki_sim.Spec((1, 1), "int32")))
    for n in (1, 4, 9) if style != "while_loop" else (0, 1, 4, 9):  # a while loop may skip its body
        count = np.array([[n]], np.int32)
        want = x[:n].sum(axis=0, keepdims=True)
        np.testing.assert_array_equal(program.run(x, count).outputs, want)
        np.testing.assert_array_equal(nki_sim.simulate(add_rows(style))(x, count), want)
    with pytest.raises(nki_sim.NkiError, match="out-of-bounds"):
        program.run(x, np.array([[10]], np.int32))


def test_step_bounds_and_moves_between_registers():
    def kernel():
        low, high, seen = nisa.register_alloc(2), nisa.register_alloc(), nl.zeros((1, 12), "int32")
        nisa.register_move(high, 11)
        other = nisa.register_alloc()
        nisa.register_move(other, low)
        nl.fori_loop(other, high, lambda i: nisa.register_store(seen[0:1, nl.ds(i, 1)], i) and None, step=4)
        out = hbm(1, 12, dtype="int32")
        nisa.dma_copy(out, seen)
        return out

    assert nki_sim.simulate(kernel)()[0].tolist() == [0, 0, 2, 0, 0, 0, 6, 0, 0, 0, 10, 0]


def test_a_tensor_of_the_body_is_new_in_each_pass():
    def body():
        first = nl.ndarray((1, 4), "float32")
        nl.fori_loop(0, 2, lambda i: nisa.tensor_copy(first, nl.ndarray((1, 4), "float32")) and None)

    refused("uninitialized", body)


def escape():
    kept = []
    nl.fori_loop(0, 1, lambda i: kept.append(sb(1, 4)))
    nisa.tensor_copy(sb(1, 4), kept[0])


def across():
    inside = []
    nl.fori_loop(0, 1, lambda i: inside.append(nisa.memset(nl.ndarray((1, 4), "float32"), 0)))
    nisa.memset(nl.ndarray((1, 4), "float32"), 0).depends_on(inside[0])


def breaks():
    for _ in nl.dynamic_range(3):
        break


def many_registers():
    live = [nisa.register_alloc(i) for i in range(65)]
    for register in live:
        nisa.register_store(nl.ndarray((1, 1), "int32"), register)


REFUSALS = [
    ("registers", many_registers),
    ("loop", lambda: nl.fori_loop(0, sb(1, 1, dtype="int32"), lambda i: None)),
    ("loop", lambda: nl.while_loop(1, lambda r: r)),
    ("operand", lambda: nisa.register_load(3, sb(1, 1, dtype="int32"))),
    ("operand", lambda: nisa.register_store(sb(1, 1), 3)),
    ("scope", escape),
    ("depends-on", across),
    ("loop", breaks),
    ("loop", lambda: nl.fori_loop(0, 2, lambda i: None, step=0)),
    ("loop", lambda: nl.fori_loop(0, 2, lambda i: i)),
    ("loop", lambda: nl.while_loop(nisa.register_alloc(1), lambda r: None)),
    ("uninitialized", lambda: nl.fori_loop(0, nisa.register_alloc(), lambda i: None)),
    ("shape", lambda: nisa.register_load(nisa.register_alloc(), sb(1, 2, dtype="int32"))),
    ("dtype", lambda: nisa.register_load(nisa.register_alloc(), sb(1, 1))),
    ("shape", lambda: nisa.register_store(sb(1, 2), nisa.register_alloc(1))),
    ("operand", lambda: nisa.register_move(nisa.register_alloc(), 1.5)),
]


@pytest.mark.parametrize(("rule", "body"), REFUSALS)
def test_loops_and_registers_refuse_what_the_device_cannot_do(rule, body):
    refused(rule, body)


def rewritten(nested):
    bound = nisa.register_alloc(2)

    def body(i):
        if nested:
            nl.fori_loop(0, 1, lambda _: nisa.register_move(bound, 1) and None)
        else:
            nisa.register_load(bound, sb(1, 1, dtype="int32"))

    with nki_sim.checks(record=["nested-dynamic-loop"]):
        nl.fori_loop(0, bound, body)


LOOPS = [
    ("loop-bound-rewritten", lambda: rewritten(nested=False)),
    ("loop-bound-rewritten", lambda: rewritten(nested=True)),
    ("loop-counter", lambda: nl.fori_loop(0, 2, lambda i: nisa.register_move(i, 0) and None)),
    ("loop-counter", lambda: nl.fori_loop(0, 2, lambda i: nisa.register_load(i, sb(1, 1, dtype="int32")) and None)),
    ("zero-trip", lambda: nl.fori_loop(3, 3, lambda i: None)),
    ("trip-count", lambda: nl.fori_loop(0, 2049, lambda i: None)),
    ("trip-count", lambda: nl.while_loop(nisa.register_alloc(1), lambda r: r)),
]


@pytest.mark.parametrize(("rule", "body"), LOOPS)
def test_loops_that_devices_were_not_seen_to_run_are_refused_unless_allowed_by_name(rule, body):
    refused(rule, body)
    if "while_loop" not in str(body.__code__.co_names):
        with nki_sim.checks(record=[rule]) as findings:
            nki_sim.simulate(lambda: body() and None)()
        assert [f.rule for f in findings] == [rule]


def test_the_most_passes_that_were_seen_to_run_are_allowed():
    nki_sim.simulate(lambda: nl.fori_loop(0, 2048, lambda i: None))()


def test_a_loop_in_a_loop_is_noted_and_refused_on_request():
    def body():
        nl.fori_loop(0, 2, lambda i: nl.fori_loop(0, 2, lambda j: nisa.memset(sb(1, 4), 0) and None))

    with pytest.warns(nki_sim.errors.Unproven, match="nested-dynamic-loop"):
        nki_sim.simulate(lambda: body() and None)()
    with nki_sim.checks() as findings:
        nki_sim.simulate(lambda: body() and None)()
    assert [f.rule for f in findings] == ["nested-dynamic-loop"]
    with nki_sim.checks(refuse=["nested-dynamic-loop"]):
        refused("nested-dynamic-loop", body)


@pytest.mark.parametrize("live", [64, 65])
def test_registers_count_while_they_hold_a_value_that_is_still_read(live):
    def kernel():
        for _ in range(3):  # one after the other: each is dead when the next begins
            for _ in range(40):
                nisa.register_store(nl.ndarray((1, 1), "int32"), nisa.register_alloc(1))
        kept = [nisa.register_alloc(i) for i in range(live - 1)]

        def body(i):  # the counter lives, and so does all that the next pass reads
            for register in kept:
                nisa.register_store(nl.ndarray((1, 1), "int32"), register)

        nl.fori_loop(0, 2, body)

    if live <= 64:
        nki_sim.simulate(kernel)()
    else:
        with pytest.raises(nki_sim.NkiError, match="registers: 65 registers hold values at once"):
            nki_sim.simulate(kernel)()


PYTHON = [
    lambda: nisa.register_alloc(1) == 1,
    lambda: nisa.register_alloc(1) != 1,
    lambda: nisa.register_alloc(1) / 2,
    lambda: sb(1, 1) == 0,
    lambda: sb(1, 1) != 0,
    lambda: sb(1, 1) in (0, 1),
    lambda: sb(1, 1) < 1,
    lambda: sb(1, 1) + 1,
    lambda: float(sb(1, 1)),
    lambda: np.asarray(sb(1, 1)),
    lambda: bool(nisa.register_alloc(1)),
    lambda: range(nisa.register_alloc(1)),
    lambda: nisa.register_alloc(1) + 1,
    lambda: nisa.scalar_load(sb(1, 1, dtype="int32")) == 1,
    lambda: nisa.scalar_load(sb(1, 1, dtype="int32")) // 2,
    lambda: nisa.register_alloc(1) < 2,
    lambda: bool(sb(1, 1)),
    lambda: list(sb(1, 1)),
]


@pytest.mark.parametrize("body", PYTHON)
def test_python_cannot_branch_on_or_compute_with_device_values(body):
    assert "device-value" in refused("", body, error=TypeError)


def test_an_argument_that_is_left_out_may_be_told_by_comparing_with_none():
    """NKI takes no `is`."""

    def kernel(x, bias=None):
        assert x != None and (bias == None) is (bias is None)  # noqa: E711
        return x

    x = randn(2, 4)
    assert (nki_sim.simulate(kernel)(x) == x).all() and (nki_sim.simulate(kernel)(x, x) == x).all()


def test_a_loop_that_never_ends_is_reported(monkeypatch):
    monkeypatch.setattr("nki_sim.machine._LOOP_LIMIT", 5)
    with nki_sim.checks(record=["trip-count"]):
        assert "5 times" in refused("endless-loop", lambda: nl.while_loop(nisa.register_alloc(1), lambda r: r))


def test_printing_happens_when_the_program_runs(capsys):
    def kernel(x):
        nl.device_print("row", nl.load(x))

    program = nki_sim.trace(kernel, (nki_sim.Spec((1, 2), "float32"),))
    assert capsys.readouterr().out == ""
    program.run(np.array([[1.5, 2.5]], np.float32))
    assert capsys.readouterr().out == "row [[1.5 2.5]]\n"
