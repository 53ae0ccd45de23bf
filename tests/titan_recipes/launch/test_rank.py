"""Contract: an error that a device may have reported late says so; a signal ends an export."""

import signal

import pytest
from titan_recipes.launch.rank import explain_late_error, until_signal


def test_a_late_device_error_is_explained_with_the_variable_that_makes_it_early(monkeypatch):
    monkeypatch.delenv("NEURON_LAUNCH_BLOCKING", raising=False)
    assert "NEURON_LAUNCH_BLOCKING=1" in explain_late_error(RuntimeError("out of memory"), "neuron")
    assert explain_late_error(RuntimeError("out of memory"), "cpu") == ""
    assert explain_late_error(KeyError("x"), "neuron") == ""
    monkeypatch.setenv("NEURON_LAUNCH_BLOCKING", "1")
    assert explain_late_error(RuntimeError("out of memory"), "neuron") == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_export_at_once_and_handlers_are_as_before(number):
    before, reached = signal.getsignal(number), []

    def export():
        reached.append("begun")
        signal.raise_signal(number)
        reached.append("ended")

    assert until_signal(export) == number
    assert reached == ["begun"] and signal.getsignal(number) is before
    assert until_signal(lambda: None) is None
