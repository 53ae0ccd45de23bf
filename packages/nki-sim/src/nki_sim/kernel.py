"""Kernels as users call them: @jit, k[1](...), k[2](...), simulate(k)(...), trace(k, specs), and arguments of numpy or torch."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nki_sim.dtypes import NUMPY, DType, as_dtype
from nki_sim.errors import Where, kernel_line, refuse
from nki_sim.machine import ORDERS, Machine
from nki_sim.memory import Usage, plan
from nki_sim.program import CoreProgram, Instr, Tracer, _active, digest, tracing
from nki_sim.tensor import MemoryRegion, NkiTensor

if TYPE_CHECKING:
    from nki_sim.schedule import Recorder

__all__ = ["Kernel", "Program", "Run", "Spec", "jit", "run", "simulate", "trace"]

TARGETS = {"": "trn2", "trn2": "trn2", "gen3": "trn2"}


@dataclass(frozen=True)
class Spec:
    """The shape and dtype of an argument, without values."""

    shape: tuple[int, ...]
    dtype: Any


class Kernel:
    """A kernel and its grid: `k[2]` runs on both cores of a logical NeuronCore (LNC2). Calling it simulates."""

    def __init__(self, function: Callable[..., Any], cores: int | None = None) -> None:
        self.function, self.cores = function, cores
        functools.update_wrapper(self, function)

    def __getitem__(self, grid: int | tuple[int]) -> "Kernel":
        cores = grid[0] if isinstance(grid, tuple) and len(grid) == 1 else grid
        if cores not in (1, 2):
            raise ValueError(f"grid {grid!r}: a launch grid is 1 or 2 (the physical cores of a logical NeuronCore)")
        return Kernel(self.function, cores)  # type: ignore[arg-type]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _active:  # called from a kernel: part of it
            return self.function(*args, **kwargs)
        return run(self, *args, **kwargs).outputs

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)


def jit(fn: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Decorate a kernel: @jit or @jit(...)."""
    return jit if fn is None else fn if isinstance(fn, Kernel) else Kernel(fn)


def simulate(kernel: Any, *, backend: str = "sim", order: str = "core0") -> Callable[..., Any]:
    """A callable that runs the kernel on the CPU. Arrays of numpy or torch in, the same kind out; arrays that the kernel
    writes are updated in place.

    backend="nki" asks for AWS's own simulator, which must then be installed. `order` is for two cores: "core0", "core1",
    "alternate", or "all", which runs every order and refuses results that differ.
    """
    if backend == "nki":
        return _aws_simulator()(getattr(kernel, "function", kernel) if isinstance(kernel, Kernel) else kernel)
    if backend != "sim":
        raise ValueError(f"backend {backend!r}: 'sim' (this package) or 'nki' (AWS's simulator)")
    return lambda *args, **kwargs: _run(kernel, args, kwargs, order).outputs


def run(kernel: Any, *args: Any, **kwargs: Any) -> "Run":
    """Simulate and keep everything: outputs, the program."""
    return _run(kernel, args, kwargs, "core0")


def _run(kernel: Any, args: tuple, kwargs: dict[str, Any], order: str) -> "Run":
    return _trace(kernel, args, kwargs).run_in(order, args, kwargs)


def trace(kernel: Any, specs: Sequence[Any] | dict[str, Any] = (), **compile_time: Any) -> "Program":
    """Specialise a kernel: `specs` are its arguments, arrays given as Spec (or as anything with shape and dtype, whose values
    are not looked at); what is no array is a compile-time argument."""
    if isinstance(specs, dict):
        return _trace(kernel, (), {**specs, **compile_time})
    return _trace(kernel, tuple(specs), compile_time)


@dataclass
class Run:
    """What a simulation gave."""

    outputs: Any
    program: "Program"


@dataclass
class Program:
    """A specialised kernel: instructions of each core, memory use, and `hash`, the identity of the compiled program."""

    kernel: Kernel
    cores: list[CoreProgram]
    usage: Usage
    signature: str
    hash: str

    @property
    def instructions(self) -> list[Instr]:
        """Core 0's instructions, each once, loops included."""
        return list(self.cores[0].instructions())

    def text(self, core: int = 0) -> str:
        """The program as text, one line an instruction."""
        return "\n".join(self.cores[core].lines())

    def run(self, *args: Any, order: str = "core0", **kwargs: Any) -> Run:
        """Run the recorded program on arrays of the shapes and dtypes it was specialised for."""
        return self.run_in(order, args, kwargs)

    @property
    def written(self) -> frozenset[tuple[int | str, int]]:
        """Keys of the storages some instruction writes."""
        return frozenset(v.storage.key for c in self.cores for i in c.instructions() for v in i.writes)

    def run_in(self, order: str, args: tuple, kwargs: dict[str, Any], observe: "Recorder | None" = None) -> Run:
        """run with an order and an observer."""
        found = _signature(self.kernel, args, kwargs)
        if found != self.signature:
            raise ValueError(f"this program was specialised for {self.signature}; got {found}. Trace again")
        if order == "all":
            return self._every_order(args, kwargs)
        arrays: list[Any] = []
        _walk(_bind(self.kernel, args, kwargs), lambda a: arrays.append(a) or a)
        written = self.written
        data = [_bytes(a, s.key in written) for a, s in zip(arrays, self.cores[0].inputs, strict=True)]
        machine = Machine(self.cores, data, observe)
        machine.run(order)
        torch_like = any(_is_torch(a) for a in arrays)
        for array, storage, raw in zip(arrays, self.cores[0].inputs, data, strict=True):
            if storage.key in written:
                _update(array, raw)
        return Run(_outputs(self.cores[0].result, machine, torch_like), self)

    def _every_order(self, args: tuple, kwargs: dict[str, Any]) -> Run:
        import copy

        runs = [self.run_in(order, *copy.deepcopy((args, kwargs))) for order in ORDERS[1:]]
        last = self.run_in(ORDERS[0], args, kwargs)
        for order, other in zip(ORDERS[1:], runs, strict=True):
            a, b = _flatten(last.outputs), _flatten(other.outputs)
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                if x.tobytes() != y.tobytes():
                    refuse(
                        "interleaving",
                        f"output {i} differs between orders {ORDERS[0]} and {order} of the two cores: they race; separate their accesses with core_barrier",
                        None,
                    )
        return last


def _trace(kernel: Any, args: tuple, kwargs: dict[str, Any]) -> Program:
    kernel = jit(kernel)
    wanted = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "")
    if wanted not in TARGETS:
        raise NotImplementedError(f"target: NEURON_PLATFORM_TARGET_OVERRIDE={wanted}; this simulator models trn2 only")
    target = TARGETS[wanted]
    count = kernel.cores or 1
    cores = []
    for core in range(count):
        with tracing(Tracer(core, count, target)) as tracer:
            bound = _bind(kernel, args, kwargs)

            def declare(array: Any) -> NkiTensor:
                shape = tuple(int(n) for n in array.shape)
                if not shape or min(shape) < 1:
                    raise ValueError(f"argument of shape {shape}: tensors have at least one element and one dimension")
                view = tracer.allocate(shape, as_dtype(array.dtype), MemoryRegion.shared_hbm, "input")  # noqa: B023
                tracer.inputs.append(view.storage)  # noqa: B023
                return view

            bound = _walk(bound, declare)
            cores.append(tracer.finish(kernel.function(*bound.args, **bound.kwargs)))
    _same_on_both(cores)
    _check_result(cores[0].result, cores[0].inputs, kernel)
    usage = plan(cores)
    return Program(kernel, cores, usage, _signature(kernel, args, kwargs), digest(cores, target))


def _same_on_both(cores: list[CoreProgram]) -> None:
    """Both cores run one program: the same instructions and loops, though each on its own addresses."""
    if len(cores) == 1:
        return
    for a, b in zip(*(list(c.instructions()) for c in cores), strict=False):
        if a.op != b.op:
            return  # static differences by program_id are allowed; what must agree is checked where the cores meet
    shared = [{s.key: (s.shape, s.dtype) for s in c.block.storages if s.key[0] == "shared"} for c in cores]
    for key in shared[0].keys() & shared[1].keys():
        if shared[0][key] != shared[1][key]:
            refuse(
                "divergence",
                f"shared_hbm tensor {key[1]} is {shared[0][key]} on core 0 and {shared[1][key]} on core 1; both must allocate the same tensors in the same order",
                None,
            )


def _check_result(result: Any, inputs: list[Any], kernel: Kernel) -> None:
    code = kernel.function.__code__ if hasattr(kernel.function, "__code__") else None
    where = Where(code.co_filename, code.co_firstlineno, code.co_name) if code else kernel_line()
    for view in _flatten(result):
        if isinstance(view, NkiTensor) and view.buffer is not MemoryRegion.shared_hbm:
            refuse(
                "output",
                f"the kernel returns {view.storage}; outputs must be allocated with buffer=nl.shared_hbm",
                where,
            )


# -- arguments --------------------------------------------------------------------------------------------------------
def _bind(kernel: Kernel, args: tuple, kwargs: dict[str, Any]) -> inspect.BoundArguments:
    return inspect.signature(kernel.function).bind(*args, **kwargs)


def _is_array(value: Any) -> bool:
    return (
        hasattr(value, "shape")
        and hasattr(value, "dtype")
        and not isinstance(value, (NkiTensor, np.generic))
        and not isinstance(value, type)
    )


def _is_torch(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach")


def _walk(value: Any, replace: Callable[[Any], Any]) -> Any:
    """`value` with every array in it replaced, containers and configuration objects rebuilt around them."""
    if _is_array(value):
        return replace(value)
    if isinstance(value, inspect.BoundArguments):
        new = inspect.BoundArguments(value.signature, type(value.arguments)())
        new.arguments.update({k: _walk(v, replace) for k, v in value.arguments.items()})
        return new
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_walk(v, replace) for v in value)
    if isinstance(value, dict):
        return {k: _walk(v, replace) for k, v in value.items()}
    inner = getattr(value, "__dict__", None)
    if isinstance(inner, dict) and not callable(value) and any(_is_array(v) for v in inner.values()):
        new = object.__new__(type(value))
        new.__dict__.update({k: _walk(v, replace) for k, v in inner.items()})
        return new
    return value


def _signature(kernel: Kernel, args: tuple, kwargs: dict[str, Any]) -> str:
    def describe(array: Any) -> Any:
        return f"{tuple(array.shape)}:{as_dtype(array.dtype)}"

    return str(dict(_walk(_bind(kernel, args, kwargs), describe).arguments))


def _flatten(result: Any) -> list[Any]:
    if result is None:
        return []
    if isinstance(result, dict):
        return [x for v in result.values() for x in _flatten(v)]
    if isinstance(result, (list, tuple)):
        return [x for v in result for x in _flatten(v)]
    return [result]


def _bytes(array: Any, copy: bool) -> np.ndarray:
    """An argument's bytes; a copy when the kernel writes it."""
    if _is_torch(array):
        array = array.detach().cpu().contiguous()
        if str(array.dtype).removeprefix("torch.") not in np.sctypeDict:
            array = array.view(getattr(sys.modules["torch"], f"uint{8 * array.itemsize}"))
        array = array.numpy()
    if not isinstance(array, np.ndarray):
        raise TypeError(f"an argument must be a numpy array or a torch tensor to be run; got {array!r}")
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return raw.copy() if copy else raw


def _update(array: Any, raw: np.ndarray) -> None:
    if _is_torch(array):
        array.copy_(_torch(raw, DType(str(array.dtype).removeprefix("torch.")), tuple(array.shape)))
    elif array.flags.writeable:
        array[...] = raw.view(array.dtype).reshape(array.shape)
    else:
        raise ValueError("the kernel writes to an argument that is read-only; pass a writable array")


def _torch(raw: np.ndarray, dtype: DType, shape: tuple[int, ...]) -> Any:
    torch = sys.modules["torch"]
    if not hasattr(torch, dtype):
        raise TypeError(f"output dtype {dtype} does not exist in torch; convert it in the kernel or pass numpy arrays")
    return torch.from_numpy(raw.copy()).view(getattr(torch, dtype)).reshape(shape)


def _outputs(result: Any, machine: Machine, torch_like: bool) -> Any:
    def convert(view: Any) -> Any:
        if not isinstance(view, NkiTensor):
            return view
        cell = machine.cell(view.storage)
        if cell.written is not None:
            part = cell.over(cell.written, view, view.offset)
            if not part.all():
                first = tuple(int(i) for i in np.argwhere(~part)[0][: view.ndim])
                refuse(
                    "unwritten-output",
                    f"{int(part.size - np.count_nonzero(part))} of {part.size} elements of output {view.storage} were never written, first at {first}",
                    view.storage.where,
                )
        array = np.ascontiguousarray(cell.array(view, view.offset))
        return _torch(array.reshape(-1).view(np.uint8), view.dtype, view.shape) if torch_like else array.copy()

    if isinstance(result, dict):
        return {k: _outputs(v, machine, torch_like) for k, v in result.items()}
    if isinstance(result, (list, tuple)):
        return type(result)(_outputs(v, machine, torch_like) for v in result)
    return convert(result)


def _aws_simulator() -> Callable[..., Any]:
    try:
        import nki.isa  # noqa: F401
        from nki import simulate as theirs
    except ImportError:
        raise ModuleNotFoundError(
            "backend='nki' needs AWS's nki package (the neuronx wheels); PyPI's nki is a placeholder"
        ) from None
    if theirs is simulate:
        raise ModuleNotFoundError(
            "backend='nki': `nki` is this simulator's alias here (nki_sim.install), AWS's package is not installed"
        )
    return theirs  # type: ignore[no-any-return]
