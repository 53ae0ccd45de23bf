"""nki_op and wrap_nki, as torch_neuronx has them, over nki-sim or a kernel's reference.

What is asked of their arguments is what AWS's documentation and the pre-release sources ask: annotated functions that
call
the kernel, and are their own fake implementation; a grid that is a tuple; tensors, and constants that can be hashed.
A kernel with one result gives a bare tensor, not a tuple of one.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from neuron_emu.build import extension

__all__ = ["nki_op", "set_reference", "wrap_nki"]

_references: dict[str, Callable[..., Any]] = {}
_programs: dict[Any, Any] = {}
_wrapped: set[int] = set()


def set_reference(kernel: Any, function: Callable[..., Any] | None) -> None:
    """Let `function` answer for a kernel, on CPU tensors: its results are right by definition, and quick. None takes
    it back.
    """
    name = _name(kernel)
    if function is None:
        _references.pop(name, None)
    else:
        _references[name] = function


def nki_op(name: str, fn: Callable[..., Any] | None = None, mutates_args: str | Iterable[str] = ()) -> Any:
    """Register an annotated function that calls a kernel as the operator `name` ("namespace::name")."""

    def decorate(function: Callable[..., Any]) -> Any:
        if not inspect.isfunction(function):
            _refuse(
                name, f"nki_op({name!r}) takes the function that calls the kernel, found {type(function).__name__}."
            )
        signature = inspect.signature(function)
        bare = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
        if bare or signature.return_annotation is signature.empty:
            _refuse(
                name,
                f"nki_op({name!r}): every argument and the result have annotations; missing: {bare or 'the result'}.",
            )
        op = torch.library.custom_op(name, function, mutates_args=tuple(mutates_args))
        op.register_fake(function)
        return op

    return decorate if fn is None else decorate(fn)


def wrap_nki(kernel: Any, **options: Any) -> "_Caller":
    """A kernel as something that can be called and traced. Each call registers the kernel again: keep what it
    returns.
    """
    if id(kernel) in _wrapped:
        extension().note("wrap-again", _name(kernel))
    _wrapped.add(id(kernel))
    return _Caller(kernel, ())


class _Caller:
    def __init__(self, kernel: Any, grid: tuple[int, ...]) -> None:
        self.kernel, self.grid = kernel, grid

    def __getitem__(self, grid: Any) -> "_Caller":
        if not isinstance(grid, tuple | list):
            _refuse(
                _name(self.kernel),
                f"wrap_nki(...)[{grid!r}]: a grid is a tuple, such as [({grid!r},)]; found {type(grid).__name__}.",
            )
            grid = (grid,)
        return _Caller(self.kernel, tuple(map(int, grid)))

    def __call__(self, *args: Any, **constants: Any) -> Any:
        name = _name(self.kernel)
        for what, value in constants.items():
            if isinstance(value, torch.Tensor):
                continue
            try:
                hash(value)
            except TypeError:
                _refuse(name, f"{name}: the constant {what} of type {type(value).__name__} cannot be hashed.")
        tensors = [value for value in (*args, *constants.values()) if isinstance(value, torch.Tensor)]
        wrong = [t for t in tensors if not t.is_contiguous()]
        if wrong:
            _refuse(
                name,
                f"{name}: kernels take contiguous tensors, found shape {tuple(wrong[0].shape)} with "
                f"strides {wrong[0].stride()}.",
            )
        results = self._run(name, args, constants, tensors)
        return results[0] if isinstance(results, tuple | list) and len(results) == 1 else results

    def _run(self, name: str, args: tuple[Any, ...], constants: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor

        device = tensors[0].device if tensors else torch.device("neuron")
        fake = any(isinstance(t, FakeTensor) or t.device.type == "meta" for t in tensors)
        if name in _references and not fake:
            on_cpu = [_on_cpu(a) for a in args]
            return _to(_references[name](*on_cpu, **{k: _on_cpu(v) for k, v in constants.items()}), device)
        program = self._program(name, args, constants)
        if fake:
            return tuple(
                tensors[0].new_empty(view.shape, dtype=getattr(torch, str(view.dtype)))
                for view in program.cores[0].result
            )
        import nki_sim

        # What a kernel leaves for backward may have rows that nobody writes or reads.
        with nki_sim.checks(record=("unwritten-output",)):
            return _to(program.run(*(_on_cpu(a) for a in args), **constants).outputs, device)

    def _program(self, name: str, args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        try:
            import nki_sim
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                f"the kernel {name} runs on nki-sim, which is not installed; pip install nki-sim, or "
                f"give its reference with "
                "neuron_emu.set_reference(kernel, function)"
            ) from None
        specs = tuple(
            nki_sim.Spec(tuple(map(int, a.shape)), str(a.dtype).removeprefix("torch."))
            if isinstance(a, torch.Tensor)
            else a
            for a in args
        )
        cores = self.grid[0] if self.grid else 1
        key = (self.kernel, cores, *((s.shape, str(s.dtype)) for s in specs), *sorted(constants.items()))
        if key not in _programs:
            extension().note("graph", f"kernel {name}")
            _programs[key] = nki_sim.trace(self.kernel[cores], specs, **constants)
        return _programs[key]


def _name(kernel: Any) -> str:
    return str(
        getattr(kernel, "__name__", None) or getattr(getattr(kernel, "func", None), "__name__", type(kernel).__name__)
    )


def _refuse(what: str, message: str) -> None:
    extension().meet("nki-contract", what, message)


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type != "neuron":
        return value
    return extension().cpu_view(value)


def _to(results: Any, device: torch.device) -> Any:
    if isinstance(results, torch.Tensor):
        return results.to(device)
    return tuple(_to(result, device) for result in results)
