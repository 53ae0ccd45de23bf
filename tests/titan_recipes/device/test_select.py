"""Contract: the device is chosen once and never falls back in silence; the sole outside touch of TorchTitan
is listed.
"""

import subprocess
import sys
import types

import pytest
import torch
from titan_recipes.device.select import choose_device
from titan_recipes.errors import UserError
from titan_recipes.versions import check_versions


def test_asking_for_neuron_where_there_is_none_stops_and_says_what_to_install():
    with pytest.raises(UserError, match=r"(?s)neuron.*torch-neuronx 2\.14\.3"):
        choose_device("neuron")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_asking_for_cuda_where_there_is_none_stops():
    with pytest.raises(UserError, match="--device cpu"):
        choose_device("cuda")


def test_an_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="auto, neuron, cuda, cpu"):
        choose_device("tpu")


def test_auto_prefers_a_neuron_device_that_answers_and_ignores_the_placeholder(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_neuronx", types.ModuleType("torch_neuronx"))
    sys.modules["torch_neuronx"].__spec__ = types.SimpleNamespace()
    assert choose_device("auto") != "neuron"  # PyPI's placeholder imports, but registers no device
    monkeypatch.setattr(torch, "neuron", types.SimpleNamespace(is_available=lambda: True), raising=False)
    assert choose_device("auto") == "neuron"
    assert choose_device("cpu") == "cpu"


SCRIPT = """
from titan_recipes.device.select import set_device
print(*set_device("cpu"), sep="\\n")
import torchtitan.distributed.utils as u, torchtitan.components.metrics as m, torch
assert u.device_type == m.device_type == "cpu", (u.device_type, m.device_type)
assert m.DeviceMemoryMonitor("cpu").get_peak_stats().max_reserved_gib > 0.05  # this process's memory
set_device("cpu")  # again is harmless
"""


def test_set_device_reaches_titan_modules_and_lists_what_it_set():
    out = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines() == [
        "torchtitan.tools.utils.device_type = 'cpu'",
        "torchtitan.tools.utils.device_module = titan_recipes.device.cpu.CpuModule",
    ]


def test_an_untested_minor_stops_unless_allowed(monkeypatch):
    monkeypatch.setitem(__import__("titan_recipes.versions", fromlist=["x"]).TESTED_MINORS, "torchtitan", "0.2")
    with pytest.raises(UserError, match=r"(?s)torchtitan 0\.3.*--allow-untested"):
        check_versions()
    assert len(check_versions(allow_untested=True)) == 1


def test_a_minor_is_compared_as_a_number_not_as_a_prefix(monkeypatch):
    import titan_recipes.versions as versions

    monkeypatch.setattr(
        versions,
        "version",
        lambda package: {"torch": "2.140.0"}.get(package, versions.TESTED_MINORS[package] + ".0"),
    )
    with pytest.raises(UserError, match=r"torch 2\.140\.0"):
        check_versions()
