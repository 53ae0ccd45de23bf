"""The expert kernels break four rules of nki-sim until they are rewritten; these tests record them by name."""

from collections.abc import Iterator

import nki_sim
import pytest
from nki_moe.simulated import UNCURED


@pytest.fixture(autouse=True)
def uncured() -> Iterator[None]:
    with nki_sim.checks(record=UNCURED):
        yield
