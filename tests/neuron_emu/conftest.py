"""One emulated device for the tests of a process, and rules as they are by default in each.

A process that has the device is not one in which other packages can be tested: these tests run when they are all that
was asked for, as `nox -s "tests(neuron-emu)"` does, and say so otherwise.
"""

from collections.abc import Iterator
from pathlib import Path

import neuron_emu
import pytest
from neuron_emu import rules


def pytest_collection_finish(session: pytest.Session) -> None:
    """Enable before the first backward of the process, which the folder above runs at this moment too."""
    if all(Path(__file__).parent in item.path.parents for item in session.items):
        neuron_emu.enable(cores=4)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    if not neuron_emu.is_enabled():
        pytest.skip("the emulated device wants a process of its own: run tests/neuron_emu by itself")
    for rule in rules.RULES:
        neuron_emu.set_rule(rule.name, rule.default)
    neuron_emu.reset_counts()
    yield
