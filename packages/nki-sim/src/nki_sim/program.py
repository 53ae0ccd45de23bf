"""The program a kernel becomes: instructions and dynamic loops in blocks, one for each core; and the tracer that records it.

Direct runs and runs from a trace go through the same program. It holds no input value, so its hash depends on shapes,
dtypes and compile-time arguments alone.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from nki_sim.errors import Where, kernel_line, refuse
from nki_sim.limits import REGISTERS
from nki_sim.ops import Op
from nki_sim.tensor import MemoryRegion, NkiTensor, Storage, VirtualRegister, whole

__all__ = ["Block", "CoreProgram", "Instr", "Loop", "Tracer", "tracer"]

Operand = NkiTensor | VirtualRegister | float | None


@dataclass(eq=False, slots=True)
class Instr:
    """One instruction. `compute` maps the arrays of `reads` to those of `writes`; `special` instructions drive the machine
    themselves. `after` holds what depends_on added."""

    op: str
    engine: str
    args: dict[str, Any]
    reads: tuple[NkiTensor, ...]
    writes: tuple[NkiTensor, ...]
    where: Where | None
    compute: Callable[..., Any]
    special: bool = False
    depth: int = 0
    number: int = 0
    after: list["Instr"] = field(default_factory=list)

    def depends_on(self, *producers: "Instr") -> "Instr":
        """Run after these as well; a dependency may not cross a dynamic loop's edge."""
        for producer in producers:
            if producer.depth > self.depth:
                refuse(
                    "depends-on",
                    f"{self.op} depends on {producer.op} inside a dynamic loop it is not in; order them through a tensor",
                )
        self.after.extend(producers)
        return self


@dataclass(eq=False)
class Block:
    """Instructions and loops in program order, the storages allocated here, and which to free after each position."""

    items: "list[Instr | Loop]" = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    frees: dict[int, list[Storage]] = field(default_factory=dict)


@dataclass(eq=False)
class Loop:
    """A loop on the device. `counter` counts from lower to upper by step; without bounds it is a condition, replaced by
    `result` after each pass, and the loop ends when it is zero."""

    counter: VirtualRegister
    body: Block
    where: Where | None
    lower: int | VirtualRegister = 0
    upper: int | VirtualRegister = 0
    step: int = 1
    condition: VirtualRegister | None = None
    result: VirtualRegister | None = None


@dataclass(eq=False)
class CoreProgram:
    """What one core runs, and what the kernel returned there."""

    core: int
    block: Block
    inputs: list[Storage]
    result: Any = None

    def lines(self) -> Iterator[str]:
        """The program as text, one line an instruction: what is hashed, and what to read when two programs differ."""
        names: dict[int, str] = {}
        yield from _lines(self.block, names, "")

    def instructions(self) -> Iterator[Instr]:
        """Every instruction once, loops included."""
        yield from _instructions(self.block)


class Tracer:
    """Records one core's program while the kernel's Python runs."""

    def __init__(self, core: int, cores: int, target: str) -> None:
        self.core, self.cores, self.target = core, cores, target
        self.blocks = [Block()]
        self.counts = {"shared": 0, core: 0}
        self.registers = self.instructions = 0
        self.inputs: list[Storage] = []
        self.home: dict[tuple[int | str, int], Block] = {}  # storage key -> the block that allocated it
        self.matmul_base: set[tuple[int | str, int]] = set()

    @property
    def depth(self) -> int:
        return len(self.blocks) - 1

    def allocate(
        self,
        shape: Any,
        dtype: Any,
        buffer: MemoryRegion,
        name: str = "",
        address: Any = None,
        constant: np.ndarray | None = None,
    ) -> NkiTensor:
        scope: int | str = "shared" if buffer is MemoryRegion.shared_hbm else self.core
        storage = Storage(
            (scope, self.counts[scope]),
            shape,
            dtype,
            buffer,
            name,
            kernel_line(),
            address,
            constant,
            unit=dtype.itemsize,
        )
        self.counts[scope] += 1
        block = self.blocks[0 if buffer is MemoryRegion.shared_hbm else -1]
        self.home[storage.key] = block
        block.storages.append(storage)
        return whole(storage)

    def register(self) -> VirtualRegister:
        self.registers += 1
        return VirtualRegister(self.registers)

    def emit(self, instr: Instr) -> Instr:
        instr.depth, instr.number = self.depth, self.instructions
        self.instructions += 1
        for view in (*instr.reads, *instr.writes):
            self._touch(view)
        self.blocks[-1].items.append(instr)
        return instr

    def _touch(self, view: NkiTensor) -> None:
        storage = view.storage
        block = self.home.get(storage.key)
        if block not in self.blocks:
            refuse(
                "scope",
                f"{storage} was allocated inside a dynamic loop and is used outside; allocate it before the loop",
            )
        at = len(block.items)  # type: ignore[union-attr]  # inside a loop: the loop's own position in the allocating block
        storage.first = at if storage.first is None else storage.first
        storage.last = at
        storage.unit = min(storage.unit, view.dtype.itemsize)
        if view.indirect_index is not None and isinstance(view.indirect_index.source, NkiTensor):
            self._touch(view.indirect_index.source)

    @contextmanager
    def loop(self, **bounds: Any) -> Iterator[Loop]:
        """Record what happens inside once, as a loop's body."""
        loop = Loop(self.register(), Block(), kernel_line(), **bounds)
        if self.depth >= REGISTERS:
            refuse(
                "registers",
                f"dynamic loops nested {self.depth + 1} deep need more than the {REGISTERS} registers of an engine",
            )
        self.blocks.append(loop.body)
        try:
            yield loop
        finally:
            self.blocks.pop()
        self.blocks[-1].items.append(loop)

    def finish(self, result: Any) -> CoreProgram:
        for block in _blocks(self.blocks[0]):
            for storage in block.storages:
                if storage.last is not None and storage.buffer is not MemoryRegion.shared_hbm:
                    block.frees.setdefault(storage.last, []).append(storage)
        return CoreProgram(self.core, self.blocks[0], self.inputs, result)


_active: list[Tracer] = []


def tracer() -> Tracer:
    """The running trace; instructions outside a kernel are refused."""
    if not _active:
        raise RuntimeError(
            "no kernel is being traced: call @nki.jit kernels with k[1](...), simulate(k)(...) or trace(k, specs)"
        )
    return _active[-1]


@contextmanager
def tracing(new: Tracer) -> Iterator[Tracer]:
    """Make `new` the running trace."""
    _active.append(new)
    try:
        yield new
    finally:
        _active.pop()


def digest(cores: list[CoreProgram], target: str) -> str:
    """The identity of the compiled program."""
    text = hashlib.sha256(target.encode())
    for core in cores:
        for line in core.lines():
            text.update(line.encode() + b"\n")
        text.update(repr(_canonical(core.result, {})).encode())
    return text.hexdigest()


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for item in block.items:
        if isinstance(item, Loop):
            yield from _blocks(item.body)


def _instructions(block: Block) -> Iterator[Instr]:
    for item in block.items:
        if isinstance(item, Loop):
            yield from _instructions(item.body)
        else:
            yield item


def _lines(block: Block, names: dict[int, str], indent: str) -> Iterator[str]:
    for storage in block.storages:
        names[id(storage)] = name = f"%{storage.key[0]}.{storage.key[1]}"
        extra = f" at {storage.address}" if storage.address else ""
        if storage.constant is not None:
            extra += " = " + hashlib.sha256(storage.constant.tobytes()).hexdigest()
        yield f"{indent}{name} = {storage.buffer.value} {storage.shape} {storage.dtype}{extra}"
    for item in block.items:
        if isinstance(item, Instr):
            args = ", ".join(f"{k}={_canonical(v, names)}" for k, v in item.args.items() if v is not None)
            after = "".join(f" after {p.number}" for p in item.after)
            yield f"{indent}{item.engine} {item.op}({args}){after}"
            continue
        bounds = (
            f"while {item.condition} -> {item.result}"
            if item.condition
            else f"for {item.counter} in {item.lower}, {item.upper}, {item.step}"
        )
        yield f"{indent}{bounds}:"
        yield from _lines(item.body, names, indent + "  ")


def _canonical(value: Any, names: dict[int, str]) -> str:
    if isinstance(value, NkiTensor):
        index = value.indirect_index
        extra = f" +{index.kind}:{_canonical(index.source, names)}*{index.scale}@{index.dim}" if index else ""
        key = value.storage.key
        return f"%{key[0]}.{key[1]}[{value.offset}; {value.get_pattern()} {value.dtype}{extra}]"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_canonical(v, names) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_canonical(v, names)}" for k, v in value.items()) + "}"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Op):
        return value.name
    return repr(value)
