"""The contract: a total is printed beside the error of its class, and a class that cannot be bounded says so."""

import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from nki_sim.bands import BANDS, Band
from sim_harness import hbm, ps, sb


def stream(x, width):
    out = hbm(*x.shape)
    for at in range(0, x.shape[1], width):
        nisa.dma_copy(out[:, at : at + width], nl.load(x[:, at : at + width]))
    return out


def multiply():
    x = sb(128, 512, dtype="bfloat16")
    for _ in range(20):
        nisa.nc_matmul(ps(128, 512), x[:, :128], x)


@pytest.mark.parametrize(("width", "kind"), [(512, "stream"), (64, "small")])
def test_a_class_is_told_by_what_bounds_a_kernel(width, kind):
    report = nki_sim.report(stream, np.zeros((128, 2048), np.float32), width)
    assert report.kind == kind and f"{kind}: " in str(report) and report.to_dict()["error"]["class"] == kind
    assert nki_sim.report(multiply).kind == "matmul"


def test_what_is_not_bounded_or_not_measured_is_said():
    assert str(Band(0.1, 0.5, 7)).startswith("not bounded") and not str(Band(0.1, 0.2, 7)).startswith("not bounded")
    looped = nki_sim.report(lambda: nl.fori_loop(0, 2, lambda i: nisa.memset(sb(8, 4), 0) and None))
    assert "Device loops are in no published timing" in looped.error
    assert set(BANDS) == {"matmul", "stream", "small"}
