"""Contract: install(compat="0.3") lets kernels written for NKI 0.3 run unchanged; without it their habits stay refused."""

import dataclasses
import importlib
from collections.abc import Iterator

import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from sim_harness import refused, run, sb


@pytest.fixture
def compat() -> Iterator[None]:
    nki_sim.install(compat="0.3")
    yield
    nki_sim.uninstall()


def test_modules_of_0_3_are_found_by_import_and_as_attributes(compat: None) -> None:
    nki = importlib.import_module("nki")
    assert nki.dtype.bfloat16 == "bfloat16" and nki.isa.constants.oob_mode is nisa.oob_mode
    assert importlib.import_module("neuronxcc.nki.typing").mutable_tensor is not None
    nki_sim.uninstall()
    assert "constants" not in vars(nisa)


def test_a_tensor_that_is_there_is_true_in_0_3(compat: None) -> None:
    x = np.ones((4, 4), np.float32)
    assert run(lambda d, a: nisa.tensor_copy(d, a) if a else None, x, dst=((4, 4), "float32")).sum() == 16


def test_branching_on_a_tensor_is_refused_otherwise() -> None:
    assert "device-value" in refused("", lambda: 1 if sb(4, 4) else 0, error=TypeError)


def test_a_scan_that_only_accumulates_is_the_sequential_float32_sum() -> None:
    x = np.random.default_rng(0).standard_normal((128, 300)).astype(np.float32)
    got = run(lambda d, a, one: nisa.tensor_tensor_scan(d, one, a, 0.5, nl.multiply, nl.add), x, np.ones_like(x), dst=(x.shape, "float32"))  # fmt: skip
    state, want = np.full(128, 0.5, np.float32), np.empty_like(x)
    for i in range(x.shape[1]):
        state = want[:, i] = state + x[:, i]
    assert np.array_equal(got, want)


def test_numbers_stand_for_enumerations_only_in_0_3() -> None:
    x = np.ones((4, 4), np.float32)
    copy = lambda d, a: nisa.tensor_copy(d, a, engine=nisa.engine.vector.value)  # noqa: E731
    with pytest.raises(TypeError, match=r"engine is a member of nisa\.engine"):
        run(copy, x, dst=((4, 4), "float32"))
    nki_sim.install(compat="0.3")
    try:
        assert run(copy, x, dst=((4, 4), "float32")).sum() == 16
    finally:
        nki_sim.uninstall()


def test_a_configuration_object_may_lack_fields_in_0_3(compat: None) -> None:
    @dataclasses.dataclass
    class Sizes(nl.NKIObject):
        rows: int
        rest: int

    assert (Sizes(rows=3).rows, Sizes(rows=3).rest) == (3, None)
