"""A stand-in for `torch_neuronx` over nki-sim, strict about what AWS documents of nki_op and wrap_nki: every argument
annotated; the function, never the raw kernel, is registered, and is its own fake implementation; what is no tensor is a
hashable constant.
"""

import inspect
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import nki_sim
import pytest
import torch
from nki_sim.kernel import Kernel
from torch._subclasses.fake_tensor import FakeTensor

LAUNCHES: list[tuple[str, int]] = []
WRAPPED: list[str] = []
PROGRAMS: dict[Any, Any] = {}
RECORDED = ["unwritten-output"]  # rules that a kernel may break


def nki_op(name: str, mutates_args: Any) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        assert not isinstance(function, Kernel), "register the function that calls the kernel, not the kernel"
        signature = inspect.signature(function)
        bare = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
        assert not bare and signature.return_annotation is not signature.empty, (
            f"{name}: not annotated: {bare or 'result'}"
        )
        op = torch.library.custom_op(name, function, mutates_args=mutates_args)
        op.register_fake(function)
        return op

    return decorate


class wrap_nki:  # as torch_neuronx spells it
    def __init__(self, kernel: Any) -> None:
        assert isinstance(kernel, Kernel), "wrap_nki takes an @nki.jit kernel"
        self.kernel, self.grid = kernel, (1,)
        WRAPPED.append(kernel.__name__)

    def __getitem__(self, grid: tuple[int]) -> "wrap_nki":
        assert isinstance(grid, tuple) and len(grid) == 1, f"a grid is a tuple of one number; got {grid!r}"
        self.grid = grid
        return self

    def __call__(self, *args: Any, **constants: Any) -> Any:
        return launch(self.kernel, self.grid[0], args, constants)


class wrap_nki_without_grid:
    """The coming form: NEURON_LOGICAL_NC_CONFIG says how many cores."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __call__(self, *args: Any, **constants: Any) -> Any:
        return launch(self.kernel, int(os.environ["NEURON_LOGICAL_NC_CONFIG"]), args, constants)


def launch(kernel: Any, cores: int, args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    assert all(isinstance(a, torch.Tensor) and a.is_contiguous() for a in args), "arguments are contiguous tensors"
    for constant in constants.values():
        assert not isinstance(constant, torch.Tensor)
        hash(constant)
    specs = tuple(nki_sim.Spec(tuple(map(int, a.shape)), str(a.dtype).removeprefix("torch.")) for a in args)
    key = (kernel.__name__, cores, *((s.shape, str(s.dtype)) for s in specs), *sorted(constants.items()))
    if key not in PROGRAMS:  # as NKI does: by the specification of the arguments
        PROGRAMS[key] = nki_sim.trace(kernel[cores], specs, **constants)
    program = PROGRAMS[key]
    if any(isinstance(a, FakeTensor) for a in args):
        views = program.cores[0].result
        made = [args[0].new_empty(v.shape, dtype=getattr(torch, str(v.dtype))) for v in _several(views)]
    else:
        LAUNCHES.append((kernel.__name__, cores))
        with nki_sim.checks(record=RECORDED):
            made = _several(program.run(*args, **constants).outputs)
    return made[0] if len(made) == 1 else tuple(made)  # one result comes bare


def _several(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple | list) else [results]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `torch_neuronx` and `nki` importable, and the neuron branch the one that runs, on CPU tensors."""
    module = types.ModuleType("torch_neuronx")
    module.__spec__ = types.SimpleNamespace(name="torch_neuronx")  # type: ignore[assignment]
    module.nki_op, module.wrap_nki = nki_op, wrap_nki  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_neuronx", module)
    nki_sim.install()
    monkeypatch.setenv("NKI_MOE_BACKEND", "nki")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
