"""The contract: one function decides what runs; what was asked for and is missing is an error, never something else.
Importing nki_moe looks for no kernel language, and its limits are known without torch.
"""

import subprocess
import sys

import nki_moe
import pytest
import torch
from nki_moe.backend import VARIABLE, choose


def test_unset_torch_runs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert choose("cpu") == "torch"


def test_a_neuron_tensor_asks_for_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(
        ModuleNotFoundError, match=r"torch_neuronx and nki\.isa cannot be imported.*NKI_MOE_BACKEND=torch"
    ):
        choose("neuron")
    monkeypatch.setenv(VARIABLE, "torch")
    assert choose("neuron") == "torch"


@pytest.mark.parametrize(("name", "package"), [("nki", "torch_neuronx"), ("sim", "nki_sim")])
def test_a_forced_backend_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    monkeypatch.setenv(VARIABLE, name)
    monkeypatch.setitem(sys.modules, package, None)
    w = torch.zeros(1, 256, 256)
    with pytest.raises(ModuleNotFoundError, match=f"{VARIABLE}={name} asks .* {package}"):
        nki_moe.grouped_mlp(torch.zeros(1, 256), torch.tensor([1]), w, w, w)


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cuda")
    with pytest.raises(ValueError, match="'cuda' is not a backend; choose one of torch, sim, nki"):
        choose("cpu")


def test_importing_and_checking_load_neither_torch_nor_a_kernel_language() -> None:
    code = (
        "import sys, nki_moe; nki_moe.check(4096, 128, 768, 2048);"
        "loaded = {'torch', 'nki', 'nki_sim', 'torch_neuronx'} & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
