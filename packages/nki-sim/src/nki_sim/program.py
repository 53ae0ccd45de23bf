"""The program a kernel becomes: instructions and dynamic loops in blocks, one for each core; and the tracer that records it.

Direct runs and runs from a trace go through the same program. It holds no input value, so its hash depends on shapes,
dtypes and compile-time arguments alone.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from nki_sim.errors import Where, kernel_line, refuse
from nki_sim.limits import REGISTERS
from nki_sim.live_registers import most_live
from nki_sim.ops import Op
from nki_sim.tensor import MemoryRegion, NkiTensor, Storage, VirtualRegister, whole


@dataclass(eq=False, slots=True)
class Instr:
    """One instruction. `compute` maps the arrays of `reads` to those of `writes`; a `special` one drives the machine."""

    op: str
    engine: str
    args: dict[str, Any]
    reads: tuple[NkiTensor, ...]
    writes: tuple[NkiTensor, ...]
    where: Where | None
    compute: Any
    special: bool = False
    loops: tuple["Block", ...] = ()
    number: int = 0
    after: list["Instr"] = field(default_factory=list)

    def depends_on(self, *producers: "Instr") -> "Instr":
        """Run after these as well; a dependency may not lead into or out of a dynamic loop."""
        for producer in producers:
            inside = self.loops[: len(producer.loops)] == producer.loops
            if not inside:
                refuse("depends-on", f"{self.op} depends on {producer.op}, which is in a dynamic loop it is not in")
        self.after.extend(producers)
        return self


@dataclass(eq=False)
class Block:
    """Instructions and loops in program order, the storages allocated here, and which to free after each position."""

    items: "list[Instr | Loop]" = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    frees: dict[int, list[Storage]] = field(default_factory=dict)

    def blocks(self) -> "Iterator[Block]":
        """This block and those of its loops."""
        yield self
        for item in self.items:
            if isinstance(item, Loop):
                yield from item.body.blocks()


@dataclass(eq=False)
class Loop:
    """A loop on the device. `counter` goes from lower to upper by step; with a `condition` it holds that instead, becomes
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
    result: Any

    def instructions(self) -> Iterator[Instr]:
        """Every instruction once, loops included."""
        for block in self.block.blocks():
            yield from (item for item in block.items if isinstance(item, Instr))

    def lines(self) -> Iterator[str]:
        """The program as text, one line an instruction: what is hashed, and what to read when two programs differ."""
        yield from _lines(self.block, "")
        yield f"return {_text(self.result)}"


class Tracer:
    """Records one core's program while the kernel's Python runs."""

    def __init__(self, core: int, cores: int) -> None:
        self.core, self.cores = core, cores
        self.blocks = [Block()]
        self.loops: list[Loop] = []  # those being recorded, outermost first
        self.clock = 0  # counts instructions, begins and ends of loops
        self.register_uses: list[tuple[int, int]] = []  # (clock, register)
        self.loop_spans: list[tuple[int, int]] = []  # the clock at each loop's begin and end
        self.counts: dict[int | str, int] = {"shared": 0, core: 0}
        self.registers = self.instructions = 0
        self.inputs: list[Storage] = []
        self.broken: Where | None = None  # a dynamic_range that was left early
        self.home: dict[tuple[int | str, int], Block] = {}  # storage key -> the block that allocated it
        self.matmul_base: set[tuple[int | str, int]] = set()  # PSUM tensors some matmul wrote

    def allocate(
        self, shape: Any, dtype: Any, buffer: MemoryRegion, name: str, address: Any = None, constant: Any = None
    ) -> NkiTensor:
        shared = buffer is MemoryRegion.shared_hbm
        scope: int | str = "shared" if shared else self.core
        key = (scope, self.counts[scope])
        storage = Storage(key, shape, dtype, buffer, name, kernel_line(), address, constant, unit=dtype.itemsize)
        self.counts[scope] += 1
        self.home[key] = block = self.blocks[0 if shared else -1]
        block.storages.append(storage)
        return whole(storage)

    def register(self, kind: Any = VirtualRegister) -> Any:
        """A new register, or scalar, of the program."""
        self.registers += 1
        return kind(self.registers)

    def assign(self, register: VirtualRegister) -> None:
        """A register is written here: refused where a loop around this place depends on it."""
        for loop in self.loops:
            if register is loop.counter and loop.condition is None:
                refuse("loop-counter", f"{register} is the loop's own counter and frozen; copy it to another register")
            if register is loop.lower or register is loop.upper:
                found = f"{register} bounds the loop at {loop.where}, whose body this is"
                refuse("loop-bound-rewritten", f"{found}: use another register here, one for each nesting level")

    def _uses(self, *values: object) -> None:
        self.register_uses += [(self.clock, v.number) for v in values if isinstance(v, VirtualRegister)]

    def emit(self, instr: Instr) -> Instr:
        instr.loops, instr.number = tuple(self.blocks[1:]), self.instructions
        self.instructions += 1
        self.clock += 1
        self._uses(*instr.args.values())
        for view in (*instr.reads, *instr.writes):
            self._touch(view)
        self.blocks[-1].items.append(instr)
        return instr

    def _touch(self, view: NkiTensor) -> None:
        storage = view.storage
        block = self.home.get(storage.key)
        if block not in self.blocks:
            refuse("scope", f"{storage} was allocated in a dynamic loop that has ended; allocate it before the loop")
        at = len(block.items) if block else 0  # inside a loop: the loop's own position in the allocating block
        storage.first = at if storage.first is None else storage.first
        storage.last = at
        storage.unit = min(storage.unit, view.dtype.itemsize)
        if view.indirect_index is not None:
            self._uses(view.indirect_index.source)
            if isinstance(view.indirect_index.source, NkiTensor):
                self._touch(view.indirect_index.source)

    @contextmanager
    def loop(self, counter: type[VirtualRegister] = VirtualRegister, **bounds: Any) -> Iterator[Loop]:
        """Record what happens inside once, as a loop's body; its counter is a register, or of another kind."""
        if self.loops:
            refuse(
                "nested-dynamic-loop", f"this device loop is in the one at {self.loops[-1].where}; no page shows one"
            )
        loop = Loop(self.register(counter), Block(), kernel_line(), **bounds)
        bounding = (loop.counter, loop.lower, loop.upper, loop.condition)
        self.clock += 1
        self._uses(*bounding)
        begin = self.clock
        self.blocks.append(loop.body)
        self.loops.append(loop)
        try:
            yield loop
        finally:
            self.blocks.pop()
            self.loops.pop()
        self.clock += 1
        self._uses(*bounding, loop.result)
        self.loop_spans.append((begin, self.clock))
        self.blocks[-1].items.append(loop)

    def finish(self, result: Any) -> CoreProgram:
        if self.broken:
            refuse("loop", "a dynamic_range body is traced once and runs on the device: it cannot break", self.broken)
        live, where = most_live(self.register_uses, self.loop_spans)
        if live > REGISTERS:
            found = f"{live} registers hold values at once (r{where} is the first too many); an engine has {REGISTERS}"
            refuse("registers", f"{found}. Keep values in SBUF, and load them where they are used")
        for block in self.blocks[0].blocks():
            for storage in block.storages:
                if storage.last is not None and storage.buffer is not MemoryRegion.shared_hbm:
                    block.frees.setdefault(storage.last, []).append(storage)
        return CoreProgram(self.core, self.blocks[0], self.inputs, result)


active: list[Tracer] = []


def tracer() -> Tracer:
    """The running trace; instructions outside a kernel are refused."""
    if not active:
        raise RuntimeError("no kernel is running: use k[1](...), simulate(k)(...) or trace(k, specs)")
    return active[-1]


@contextmanager
def tracing(new: Tracer) -> Iterator[Tracer]:
    """Make `new` the running trace."""
    active.append(new)
    try:
        yield new
    finally:
        active.pop()


def _lines(block: Block, indent: str) -> Iterator[str]:
    for s in block.storages:
        extra = f" at {s.address}" if s.address else ""
        extra += f" = {hashlib.sha256(s.constant.tobytes()).hexdigest()}" if s.constant is not None else ""
        yield f"{indent}%{s.key[0]}.{s.key[1]} = {s.buffer.value} {s.shape} {s.dtype}{extra}"
    for item in block.items:
        if isinstance(item, Instr):
            args = ", ".join(f"{k}={_text(v)}" for k, v in item.args.items() if v is not None)
            yield f"{indent}{item.engine} {item.op}({args})" + "".join(f" after {p.number}" for p in item.after)
            continue
        bounds = f"for {item.counter} in {item.lower}, {item.upper}, {item.step}"
        loop = f"while {item.condition} -> {item.result} as {item.counter}"
        yield indent + (loop if item.condition is not None else bounds)
        yield from _lines(item.body, indent + "  ")


def _text(value: Any) -> str:
    if isinstance(value, NkiTensor):
        i, key = value.indirect_index, value.storage.key
        extra = f" + {i.kind} {_text(i.source)} * {i.scale}" if i else ""
        return f"%{key[0]}.{key[1]}[{value.offset}: {value.get_pattern()} {value.dtype}{extra}]"
    if isinstance(value, (Enum, Op)):  # an Op is a tuple of functions, whose addresses differ in every process
        return str(value.name)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_text(v)}" for k, v in value.items()) + "}"
    if value is None or isinstance(value, (int, float, str, VirtualRegister, np.generic)):
        return repr(value)
    raise TypeError(f"a program's identity needs numbers, names and tensors as arguments; got {value!r}")
