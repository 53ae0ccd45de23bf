"""Contract: an error that a device may have reported late says so."""

from titan_recipes.launch.rank import explain_late_error


def test_a_late_device_error_is_explained_with_the_variable_that_makes_it_early(monkeypatch):
    monkeypatch.delenv("NEURON_LAUNCH_BLOCKING", raising=False)
    assert "NEURON_LAUNCH_BLOCKING=1" in explain_late_error(RuntimeError("out of memory"), "neuron")
    assert explain_late_error(RuntimeError("out of memory"), "cpu") == ""
    assert explain_late_error(KeyError("x"), "neuron") == ""
    monkeypatch.setenv("NEURON_LAUNCH_BLOCKING", "1")
    assert explain_late_error(RuntimeError("out of memory"), "neuron") == ""
