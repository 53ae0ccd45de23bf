"""The contract: NKI 0.7's scalars are computed on the device, in 32 bits that wrap, from Python's own signs."""

import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from sim_harness import hbm, randn, refused, sb


def computed(formula):
    def kernel(x, y):
        out, tile = hbm(1, 1, dtype="int32"), nl.ndarray((1, 1), "int32")
        nisa.scalar_store(tile, formula(nisa.scalar_load(nl.load(x)), nisa.scalar_load(nl.load(y))))
        nisa.dma_copy(out, tile)
        return out

    return lambda x, y: int(nki_sim.simulate(kernel)(np.array([[x]], np.int32), np.array([[y]], np.int32))[0, 0])


FORMULAS = [
    lambda i, j: i * 4 + 1,
    lambda i, j: 7 - i,
    lambda i, j: i - j * j + 2 * i,
    lambda i, j: -(+i) - 3,
]


@pytest.mark.parametrize("formula", FORMULAS)
def test_arithmetic_is_pythons_on_values_that_only_the_device_knows(formula):
    for x, y in ((5, 9), (-3, 0)):
        assert computed(formula)(x, y) == formula(x, y)


def test_arithmetic_wraps_at_32_bits():
    assert computed(lambda i, j: i * j)(100_000, 100_000) == 1_410_065_408
    assert computed(lambda i, j: i + j)(2**31 - 1, 1) == -(2**31)


def test_a_scalar_bounds_a_loop_and_moves_a_view_and_a_counter_is_one():
    def kernel(x, n):
        out, total = hbm(1, 6), nl.zeros((1, 6), "float32")
        count = nisa.scalar_load(nl.load(n))

        def body(i):
            row = nl.ndarray((1, 6), "float32")
            nisa.dma_copy(row, x.ap([[6, 1], [1, 6]], scalar_offset=i * 2 + 1, indirect_dim=0))
            nisa.tensor_tensor(total, total, row, nl.add)

        nl.fori_loop(0, count - 1, body)
        nisa.dma_copy(out, total)
        return out

    x = np.round(randn(9, 6) * 8)
    for n in (2, 5):
        got = nki_sim.simulate(kernel)(x, np.array([[n]], np.int32))
        np.testing.assert_array_equal(got[0], x[1 : 2 * n - 1 : 2].sum(axis=0))


REFUSALS = [
    ("dtype", lambda: nisa.scalar_load(sb(1, 1, dtype="uint32"))),
    ("shape", lambda: nisa.scalar_load(sb(1, 2, dtype="int32"))),
    ("operand", lambda: nisa.scalar_store(sb(1, 1, dtype="int32"), nisa.register_alloc(1))),
    ("operand", lambda: nisa.scalar_load(sb(1, 1, dtype="int32")) + 1.5),
    ("operand", lambda: nisa.scalar_load(sb(1, 1, dtype="int32")) + nisa.register_alloc(1)),
    ("operand", lambda: nisa.scalar_load(sb(1, 1, dtype="int32")) * 2**31),
]


@pytest.mark.parametrize(("rule", "body"), REFUSALS)
def test_what_scalars_cannot_do_is_refused(rule, body):
    refused(rule, body)


def test_the_instructions_behind_the_signs_are_no_names_of_nki_isa():
    assert not hasattr(nisa, "arithmetic") and not hasattr(nisa, "load")
