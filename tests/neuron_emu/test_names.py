"""AWS's names exist while emulation is enabled, and never before; autoload asks an environment variable."""

import json
from pathlib import Path

from emu_ranks import run, start

LOOK = """
import importlib.metadata, importlib.util, json, torch
def version():
    try:
        return importlib.metadata.version("torch-neuronx")
    except importlib.metadata.PackageNotFoundError:
        return None
print(json.dumps([importlib.util.find_spec("torch_neuronx") is not None, version(), hasattr(torch, "neuron")]))
"""


def test_nothing_is_there_until_the_variable_asks() -> None:
    ((_, out, _),) = start(LOOK, preamble="import neuron_emu\n")
    assert json.loads(out) == [False, None, False]
    ((code, out, error),) = start(LOOK, preamble="", environment={"NEURON_EMU": "cores=2,instance=trn2.3xlarge"})
    assert code == 0, error
    assert json.loads(out) == [True, "2.14.3+emulated", True]
    assert "emulated on CPU (2 cores of a trn2.3xlarge)" in error


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    ((code, _, error),) = start("", environment={"NEURON_EMU_CACHE": str(tmp_path), "CXX": "no-such-compiler"})
    assert code and "finds no compiler 'no-such-compiler'" in error


def test_compile_takes_static_shapes_and_no_sort_and_counts_graphs() -> None:
    (out,) = run(
        """
@torch.compile(backend="neuron", dynamic=False)
def f(x):
    return (x * 2).relu().sum()
x = torch.ones(4, device="neuron", requires_grad=True)
f(x).backward()
print(x.grad.tolist(), sum(c.amount for c in neuron_emu.counts("graph")))
@torch.compile(backend="neuron", dynamic=False)
def g(x):
    return x.sort().values
try:
    g(x)
except Exception as error:
    print("sort does not compile for neuron" in str(error))
@torch.compile(backend="neuron", dynamic=True)
def h(x):
    return x * 2
try:
    h(torch.ones(5, device="neuron"))
except Exception as error:
    print("takes static shapes alone" in str(error))
"""
    )
    assert out.splitlines() == ["[2.0, 2.0, 2.0, 2.0] 2", "True", "True"]


def test_results_that_do_not_fit_are_an_error_at_the_next_wait() -> None:
    code = """
import neuron_emu, torch
neuron_emu.enable(cores=4, core_bytes=3000)
x = torch.ones(300, device="neuron")
y = [x + i for i in range(3)]
print("ran on")
try:
    torch.neuron.synchronize()
except torch.OutOfMemoryError as error:
    print(str(error)[:33])
try:
    torch.empty(10**6, device="neuron")
except torch.OutOfMemoryError as error:
    print("at once")
s = torch.neuron.memory_stats()
peak = torch.accelerator.max_memory_allocated()
print(s["reserved_bytes.all.peak"], s["num_ooms"] > 1, peak == s["allocated_bytes"]["peak"])
"""
    ((status, out, error),) = start(code, preamble="")
    assert status == 0, error
    assert out.splitlines() == ["ran on", "neuron (emulated) out of memory. ", "at once", "0 True True"]


def test_a_kernel_gives_a_bare_result_and_refuses_an_int_grid() -> None:
    (out,) = run(
        """
from torch_neuronx import nki_op, wrap_nki
def kernel(x):
    raise AssertionError("the reference answers")
neuron_emu.set_reference(kernel, lambda x: (x * 2,))
x = torch.ones(3, device="neuron")
print(wrap_nki(kernel)[(2,)](x).tolist(), len(neuron_emu.counts("wrap-again")))
wrap_nki(kernel)
print(len(neuron_emu.counts("wrap-again")))
try:
    wrap_nki(kernel)[2](x)
except RuntimeError as error:
    print("a grid is a tuple" in str(error))
try:
    nki_op("emu::bare")(lambda x: x)
except RuntimeError as error:
    print("annotations; missing" in str(error))
"""
    )
    assert out.splitlines() == ["[2.0, 2.0, 2.0] 0", "1", "True", "True"]
