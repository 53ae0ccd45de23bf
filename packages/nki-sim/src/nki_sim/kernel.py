"""Kernels as users call them: @jit, k[1](...), k[2](...), simulate(k)(...), and trace(k, specs) for the program alone."""

import copy
import functools
import hashlib
import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nki_sim import errors
from nki_sim.arguments import describe, flatten, is_torch, store_back, to_bytes, to_torch, walk
from nki_sim.dtypes import as_dtype
from nki_sim.errors import Where, need, refuse
from nki_sim.machine import ORDERS, Machine, holes
from nki_sim.memory import Usage, plan
from nki_sim.program import CoreProgram, Instr, Tracer, active, tracing
from nki_sim.tensor import MemoryRegion, NkiTensor

TARGETS = ("trn2", "gen3")


class Spec(NamedTuple):
    """The shape and dtype of an argument, without values."""

    shape: tuple[int, ...]
    dtype: Any


class Kernel:
    """A kernel and its grid: k[2] runs on both cores of a logical NeuronCore (LNC2). Calling it simulates."""

    def __init__(self, function: Callable[..., Any], cores: int = 1) -> None:
        self.function, self.cores, self.__name__ = function, cores, getattr(function, "__name__", "kernel")
        functools.update_wrapper(self, function)

    def __getitem__(self, grid: Any) -> "Kernel":
        cores = grid[0] if isinstance(grid, tuple) and len(grid) == 1 else grid
        if cores not in (1, 2):
            raise ValueError(f"grid {grid!r}: a launch grid is 1 or 2, the physical cores of a logical NeuronCore")
        return Kernel(self.function, int(cores))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if active:  # called from a kernel: part of it
            return self.function(*args, **kwargs)
        return run(self, *args, **kwargs).outputs

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """Arguments by name; refused where NKI's front ends would."""
        signature = inspect.signature(self.function)
        only = [n for n, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY]
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.__name__}{signature}: {error} [{self.where}]") from None
        lists = [n for n, v in bound.arguments.items() if isinstance(v, list)]
        if (only or lists) and not errors.compat:
            found = f"NKI takes no keyword-only parameters {only} nor lists {lists} (use tuples)"
            refuse("signature", found, self.where)
        return bound

    @property
    def where(self) -> Where | None:
        """The kernel's first line."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return Where(code.co_filename, code.co_firstlineno, code.co_name) if code else None


class Run(NamedTuple):
    """What a simulation gave."""

    outputs: Any
    program: "Program"


@dataclass
class Program:
    """A specialised kernel: the instructions of each core, and what they need of SBUF and PSUM."""

    kernel: Kernel
    cores: list[CoreProgram]
    usage: Usage
    signature: str

    @functools.cached_property
    def hash(self) -> str:
        """The identity of the compiled program: equal for equal instructions, constants and tensors on every core."""
        text = "\n".join(line for core in self.cores for line in core.lines())
        return hashlib.sha256(f"{TARGETS[0]}\n{text}".encode()).hexdigest()

    @property
    def instructions(self) -> list[Instr]:
        """Core 0's instructions, each once, loops included."""
        return list(self.cores[0].instructions())

    @property
    def written(self) -> frozenset[tuple[int | str, int]]:
        """Keys of the storages that some instruction writes."""
        return frozenset(v.storage.key for c in self.cores for i in c.instructions() for v in i.writes)

    def text(self, core: int = 0) -> str:
        """The program, one line an instruction."""
        return "\n".join(self.cores[core].lines())

    def run(self, *args: Any, order: str = "core0", **kwargs: Any) -> Run:
        """Run the recorded program on arrays of the shapes and dtypes it was specialised for."""
        return self.execute(args, kwargs, order)

    def execute(self, args: tuple, kwargs: dict[str, Any], order: str = "core0", observe: Any = None) -> Run:
        """run, with an observer of every instruction (a schedule.Recorder)."""
        bound = self.kernel.bind(args, kwargs)
        found = describe(bound)
        if found != self.signature:
            raise ValueError(f"this program was specialised for {self.signature}; got {found}. Trace again")
        if order == "all":
            return self._every_order(args, kwargs)
        arrays: list[Any] = []
        walk(bound, arrays.append)
        written = self.written
        inputs = self.cores[0].inputs
        data = [to_bytes(a, s.key in written) for a, s in zip(arrays, inputs, strict=True)]
        machine = Machine(self.cores, data, observe)
        machine.run(order)
        for array, storage, raw in zip(arrays, inputs, data, strict=True):
            if storage.key in written:
                store_back(array, raw)
        return Run(_outputs(self.cores[0].result, machine, any(map(is_torch, arrays))), self)

    def _every_order(self, args: tuple, kwargs: dict[str, Any]) -> Run:
        results: list[list[np.ndarray]] = []
        for order in reversed(ORDERS):  # the last one, core0, on the caller's own arrays
            given = (args, kwargs) if order == ORDERS[0] else copy.deepcopy((args, kwargs))
            run = self.execute(*given, order)
            results.append([])
            walk([flatten(run.outputs), self.kernel.bind(*given)], lambda a: results[-1].append(to_bytes(a, True)))
        for other, order in zip(results[:-1], reversed(ORDERS), strict=False):
            same = [bool((x == y).all()) for x, y in zip(results[-1], other, strict=True)]
            if not all(same):
                found = f"array {same.index(False)} depends on which core is faster ({ORDERS[0]} against {order})"
                refuse("interleaving", f"{found}; separate the cores' accesses with core_barrier", self.kernel.where)
        return run


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a kernel: @jit or @jit(...).

    Args:
        fn: the kernel.
        options: what AWS's nki.jit takes besides; `platform_target` is refused, as it is there.

    Returns:
        A Kernel, or a decorator where there is no `fn` yet.
    """
    if "platform_target" in options:
        fix = "set NEURON_PLATFORM_TARGET_OVERRIDE instead"
        refuse("platform-target", f"nki.jit takes no platform_target ({options['platform_target']!r}); {fix}")
    return jit if fn is None else fn if isinstance(fn, Kernel) else Kernel(fn)


def simulate(kernel: Any, *, backend: str = "sim", order: str = "core0") -> Callable[..., Any]:
    """A callable that runs the kernel on the CPU: numpy or torch in, the same out; arrays the kernel writes are updated.

    backend="nki" asks for AWS's own simulator, which must then be installed. With two cores, `order` is "core0", "core1",
    "alternate", or "all", which runs every order and refuses results that differ.
    """
    if backend == "nki":
        return _aws_simulate()(kernel.function if isinstance(kernel, Kernel) else kernel)
    if backend != "sim":
        raise ValueError(f"backend {backend!r}: 'sim' (this package) or 'nki' (AWS's simulator)")
    return lambda *args, **kwargs: specialise(kernel, args, kwargs).execute(args, kwargs, order).outputs


def run(kernel: Any, *args: Any, **kwargs: Any) -> Run:
    """Simulate; outputs and the program that ran."""
    return specialise(kernel, args, kwargs).execute(args, kwargs)


def trace(kernel: Any, specs: Sequence[Any] | dict[str, Any] = (), **compile_time: Any) -> Program:
    """Specialise a kernel: `specs` are its arguments in order or by name, arrays as Spec (or anything with shape and dtype;
    values are not looked at), and whatever is no array is a compile-time argument."""
    if isinstance(specs, dict):
        return specialise(kernel, (), {**specs, **compile_time})
    return specialise(kernel, tuple(specs), compile_time)


def specialise(kernel: Any, args: tuple, kwargs: dict[str, Any]) -> Program:
    """Trace a kernel once for each core."""
    kernel = jit(kernel)
    wanted = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE") or TARGETS[0]
    if wanted not in TARGETS:
        raise NotImplementedError(f"target: NEURON_PLATFORM_TARGET_OVERRIDE={wanted}; this simulator models trn2 only")
    bound = kernel.bind(args, kwargs)
    cores = [_trace_core(kernel, bound, core) for core in range(kernel.cores)]
    _share(cores)
    for view in flatten(cores[0].result):
        if isinstance(view, NkiTensor) and view.buffer is not MemoryRegion.shared_hbm:
            refuse("output", f"the kernel returns {view.storage}; outputs are nl.shared_hbm", kernel.where)
    _need_output(kernel, cores[0])
    return Program(kernel, cores, plan(cores), describe(bound))


def _trace_core(kernel: Kernel, bound: inspect.BoundArguments, core: int) -> CoreProgram:
    with tracing(Tracer(core, kernel.cores)) as tracer:

        def declare(array: Any) -> NkiTensor:
            shape = tuple(int(n) for n in array.shape)
            need(shape and min(shape) > 0, "shape", "an argument of shape {}; each dimension is at least 1", shape)
            view = tracer.allocate(shape, as_dtype(array.dtype), MemoryRegion.shared_hbm, "argument")
            tracer.inputs.append(view.storage)
            return view

        given = walk(bound, declare)
        return tracer.finish(kernel.function(*given.args, **given.kwargs))


def _need_output(kernel: Kernel, core: CoreProgram) -> None:
    """A kernel that returns nothing works on its arguments; one that fills a shared tensor of its own forgot to return it."""
    written = {v.storage.key: v.storage for i in core.instructions() for v in i.writes}
    shared = [s for key, s in written.items() if s.buffer is MemoryRegion.shared_hbm]
    own = [s for s in shared if s not in core.inputs]
    if not flatten(core.result) and own and len(own) == len(shared):
        refuse("no-output", f"the kernel writes {own[0]} and returns nothing; `return` the tensor", kernel.where)


def _share(cores: list[CoreProgram]) -> None:
    """Shared HBM tensors are one tensor on both cores."""
    first, *others = [{s.key: s for s in c.block.storages if s.key[0] == "shared"} for c in cores]
    for key, a in first.items():
        for b in (other[key] for other in others if key in other):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                refuse("divergence", f"core 0 allocates {a} where core 1 allocates {b}; they must agree")
            a.unit = b.unit = min(a.unit, b.unit)


def _outputs(result: Any, machine: Machine, torch: bool) -> Any:
    if isinstance(result, dict):
        return {k: _outputs(v, machine, torch) for k, v in result.items()}
    if isinstance(result, (list, tuple)):
        return type(result)(_outputs(v, machine, torch) for v in result)
    if not isinstance(result, NkiTensor):
        return result
    cell, storage = machine.cell(result.storage), result.storage
    if cell.written is not None:
        part = cell.over(cell.written, result, result.offset)
        if not part.all():
            refuse("unwritten-output", f"{holes(part, result)} of output {storage} were never written", storage.where)
    array = np.ascontiguousarray(cell.array(result, result.offset))
    return to_torch(array.reshape(-1).view(np.uint8), result.dtype, result.shape) if torch else array.copy()


def _aws_simulate() -> Callable[..., Any]:
    try:
        importlib.import_module("nki.isa")
        theirs = importlib.import_module("nki").simulate
    except (ImportError, AttributeError):
        raise ModuleNotFoundError("backend='nki' needs AWS's nki package; the one on PyPI is a placeholder") from None
    if theirs is simulate:
        raise ModuleNotFoundError("backend='nki': `nki` is this simulator here; AWS's is not installed")
    return theirs
