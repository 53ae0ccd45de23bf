"""Runs a program: memory with a record of what was written, one core or two in a chosen order, and the watch for races.

Cores are generators that stop where they meet (core_barrier, sendrecv), so an order is deterministic and needs no threads:
"core0" and "core1" run that core to its next meeting first, "alternate" switches after every access to shared memory.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from nki_sim.dtypes import NUMPY, cast
from nki_sim.errors import NkiError, Where, doing, need, refuse
from nki_sim.limits import LOOP_TRIPS, start_partitions
from nki_sim.program import Block, CoreProgram, Instr, Loop
from nki_sim.tensor import MemoryRegion, NkiTensor, Storage, VirtualRegister

COMPUTE = ("tensor", "vector", "scalar", "gpsimd")
ORDERS = ("core0", "core1", "alternate")
MEETINGS = ("core_barrier", "sendrecv")
_LOOP_LIMIT = (
    10_000_000  # passes of a while_loop before it counts as endless, where more than LOOP_TRIPS are only recorded
)
Array = np.ndarray


_SAME = "control flow that differs between the cores is undefined: give both lists of equal length, with harmless empty items"


class Rows(NamedTuple):
    """Element addresses [rows, elements] of a gather or scatter, which rows are inside, and the addresses of those."""

    address: Array
    valid: Array
    inside: Array


class Cell:
    """The bytes of one storage in one run, and which of them hold something (`written` is None once all do)."""

    def __init__(self, storage: Storage, data: Array | None) -> None:
        self.storage, self.unit = storage, storage.unit
        units = storage.nbytes // self.unit
        # 0xFF: NaN, or an index far outside
        self.data = np.full(storage.nbytes, 0xFF, np.uint8) if data is None else data
        self.written = np.zeros(units, bool) if data is None else None
        self.base: Any = np.zeros(units, bool) if storage.buffer is MemoryRegion.psum else None  # where matmuls wrote
        self.clobbered: tuple[Storage, Where | None] | None = None

    def array(self, view: NkiTensor, offset: int) -> Array:
        """The values of a view."""
        dtype = NUMPY[view.dtype]
        strides = [s * dtype.itemsize for s in view.strides]
        return np.ndarray(view.shape, dtype, self.data, offset * dtype.itemsize, strides)

    def over(self, marks: Array, view: NkiTensor, offset: int) -> Array:
        """The part of per-unit `marks` that a view covers."""
        many = view.dtype.itemsize // self.unit
        shape, strides = view.shape, view.strides
        if many > 1:
            shape, strides = (*shape, many), (*(s * many for s in strides), 1)
        return np.ndarray(shape, marks.dtype, marks, offset * many, strides)

    def line(self, view: NkiTensor, marks: Array | None = None) -> Array:
        """All elements of the storage in a row, in the view's dtype; or the units of `marks` of each."""
        many = view.dtype.itemsize // self.unit
        return self.data.view(NUMPY[view.dtype]) if marks is None else marks.reshape(-1, many)

    def forget(self, first: int, last: int, partitions: slice, by: Storage, where: Where | None) -> None:
        """Another tensor overwrote bytes [first, last) of these partitions."""
        if self.written is None:
            self.written = np.ones(self.storage.nbytes // self.unit, bool)
        for marks in (self.written, self.base):
            if marks is not None:
                rows = marks.reshape(-1, self.storage.pitch // self.unit)
                rows[partitions, first // self.unit : -(-last // self.unit)] = False
        self.data.reshape(-1, self.storage.pitch)[partitions, first:last] = 0xFF
        self.clobbered = (by, where)


class Machine:
    """Executes the programs of one or two cores. `observe` sees each instruction after it ran."""

    def __init__(self, cores: list[CoreProgram], inputs: list[Array], observe: Any = None) -> None:
        self.cores, self.observe, self.core = cores, observe, 0
        self.instr = Instr("", "", {}, (), (), None, None)  # being executed
        self.cells: dict[tuple[int | str, int], Cell] = {}
        self.registers: list[dict[int, int]] = [{} for _ in cores]
        self.accumulators: dict[tuple[int, str], Array] = {}  # reduce registers by core and engine
        self.located: dict[int, int] = {}  # id(view) -> element offset of the current instruction's run-time addresses
        self.inputs = {storage.key: data for storage, data in zip(cores[0].inputs, inputs, strict=True)}
        self.shadows: dict[tuple[int | str, int], tuple[Array, list[Any]]] = {}
        written = {v.storage.key for c in cores for i in c.instructions() for v in i.writes}
        self.trips: list[deque[tuple[Where | None, int]]] = [
            deque() for _ in cores
        ]  # loops the other core has not run yet
        self.met = 0  # how often the cores have met
        self.in_step = len(cores) > 1  # until a loop's passes differ
        self.contended = {k for k in written if k[0] == "shared"} if len(cores) > 1 else set()

    # -- memory -------------------------------------------------------------------------------------------------------
    def cell(self, storage: Storage) -> Cell:
        """A storage's contents; made at its first use."""
        if storage.key not in self.cells:
            data = self.inputs.get(storage.key)
            if data is None and storage.constant is not None:
                data = np.ascontiguousarray(storage.constant).reshape(-1).view(np.uint8).copy()
            self.cells[storage.key] = Cell(storage, data)
        return self.cells[storage.key]

    def locate(self, view: NkiTensor, skip: bool = False) -> int | None:
        """The element where a view begins now; None when that is outside and skipping is allowed."""
        index = view.indirect_index
        if index is None:
            return view.offset
        value = self.value(index.source)
        offset = view.offset + value * index.scale
        if view.holds(offset) and index.within(value):
            self.located[id(view)] = offset
            if index.dim == 0 and view.buffer.on_chip and self.instr.engine in COMPUTE:
                self._need_start(view, offset)
            return offset
        if not skip:
            of = "" if index.most is None else f" of 0..{index.most}"
            found = f"run-time index {value}{of} puts {view} at elements {offset}..{offset + view.extent()} of {view.storage}"
            refuse("out-of-bounds", f"{found}; clamp it, or oob_mode.skip where DMA allows")
        return None

    def _need_start(self, view: NkiTensor, offset: int) -> None:
        """Run-time indices of partitions obey the rule that fixed ones do."""
        base, n = view.storage.address[0] if view.storage.address else 0, view.shape[0]
        start = base + offset * view.dtype.itemsize // view.storage.pitch
        found = "{} of {} partitions starts at partition {} by its run-time index; it may at {}"
        need(start in start_partitions(n), "start-partition", found, view, n, start, start_partitions(n))

    def value(self, source: Any) -> int:
        """An integer the device knows: a register or a one-element tensor."""
        if isinstance(source, NkiTensor):
            return int(self.read(source).reshape(-1)[0])
        if not isinstance(source, VirtualRegister):
            return int(source)
        if source.number not in self.registers[self.core]:
            refuse("uninitialized", f"nothing was moved or loaded into {source} before")
        return self.registers[self.core].get(source.number, 0)

    def read(self, view: NkiTensor) -> Array:
        """The values of a view; refused where nothing was written."""
        offset = self.locate(view)
        if offset is None:  # recorded, not raised: undefined values
            return np.full(view.shape, np.nan, np.float32)
        cell = self.cell(view.storage)
        if cell.written is not None:
            self._need_written(cell, view, cell.over(cell.written, view, offset))
        self._watch(view, offset, offset + view.extent(), False)
        return cell.array(view, offset)

    def _need_written(self, cell: Cell, view: NkiTensor, part: Array) -> None:
        if part.all():
            return
        amount, at = holes(part, view), f"reads {view} of {view.storage}"
        writer = self._written_later(view)
        if writer:
            found = f"core {self.core} {at}, which core {1 - self.core} writes ({writer.op} at {writer.where})"
            refuse("race", f"{found}, with no core_barrier between: in this order it is not there yet")
            return
        if cell.clobbered:
            by, where = cell.clobbered
            refuse("overlap", f"{at}: {amount} overwritten through {by} at {where}. Give them separate addresses")
        else:
            refuse("uninitialized", f"{at}: {amount} never written. Write it first, with nisa.memset or a DMA")

    def _written_later(self, view: NkiTensor) -> Instr | None:
        """The other core's write of a shared tensor that the cores do not meet before: it is still to come."""
        if view.storage.key not in self.contended:
            return None
        met = 0
        for instr in self.cores[1 - self.core].instructions():
            met += instr.op in MEETINGS
            if met == self.met and any(_overlap(v, view) for v in instr.writes):
                return instr
        return None

    def write(self, view: NkiTensor, values: Array, matmul: bool = False) -> None:
        """Store values, converted to the view's dtype."""
        offset = self.locate(view)
        if offset is not None:
            cell = self.cell(view.storage)
            values = cast(np.asarray(values), NUMPY[view.dtype])
            cell.array(view, offset)[...] = values.reshape(view.shape) if values.ndim else values
            self.wrote(cell, view, offset, matmul)

    def wrote(self, cell: Cell, view: NkiTensor, offset: int, matmul: bool = False, chosen: Any = None) -> None:
        """Remember what was written: all of a view, or its `chosen` elements."""
        storage = view.storage
        if cell.base is not None:
            cell.over(cell.base, view, offset)[...] = matmul
        if cell.written is not None:
            part = cell.over(cell.written, view, offset)
            if chosen is None and part.size == cell.written.size:
                cell.written = None
            else:
                ones = (1,) * (part.ndim - view.ndim)
                np.copyto(part, True, where=True if chosen is None else chosen.reshape(*view.shape, *ones))
        if storage.aliases:
            self._clobber(storage, view, offset)
        self._watch(view, offset, offset + view.extent(), True)

    def _clobber(self, storage: Storage, view: NkiTensor, offset: int) -> None:
        size = view.dtype.itemsize
        row, column = divmod(offset * size, storage.pitch)
        part, first = storage.address[0] + row, storage.address[1] + column
        last = first + (view.extent(1) + 1) * size
        for other in storage.aliases:
            o_part, o_byte = other.address
            low, high = max(first - o_byte, 0), min(last - o_byte, other.pitch)
            top, end = max(part - o_part, 0), min(part + view.shape[0] - o_part, other.shape[0])
            if other.key in self.cells and low < high and top < end:
                self.cells[other.key].forget(low, high, slice(top, end), storage, self.instr.where)

    # -- gather and scatter -------------------------------------------------------------------------------------------
    def rows(self, view: NkiTensor, index: Array, skip: bool) -> Rows:
        """Where the rows of an indirect view are."""
        start = view.offset + index.astype(np.int64) * view.indirect_index.scale
        inner = np.zeros(1, np.int64)
        for stride, n in zip(view.strides[1:], view.shape[1:], strict=True):
            inner = (inner[:, None] + np.arange(n) * stride).reshape(-1)
        valid = (start >= 0) & (start + inner.max() < view.storage.nbytes // view.dtype.itemsize)
        valid &= view.indirect_index.within(index)
        if not skip and not valid.all():
            bad = int(np.argmin(valid))
            found = f"index {index[bad]} of row {bad} leaves {view.storage}, as do {np.sum(~valid)} of {len(valid)}"
            refuse("out-of-bounds", f"{found}; clamp the indices or use oob_mode.skip")
        address = start[:, None] + inner
        return Rows(address, valid, address[valid])

    def gather(self, view: NkiTensor, rows: Rows) -> Array:
        """Values [rows, elements]; zeros in the rows that are outside."""
        cell = self.cell(view.storage)
        if cell.written is not None:
            self._need_written(cell, view, cell.line(view, cell.written)[rows.inside])
        self._watch(view, 0, view.storage.nbytes, False, rows.inside)
        values = np.zeros(rows.address.shape, NUMPY[view.dtype])
        values[rows.valid] = cell.line(view)[rows.inside]
        return values

    def scatter(self, view: NkiTensor, rows: Rows, values: Array) -> None:
        """Store the rows that are inside."""
        cell = self.cell(view.storage)
        cell.line(view)[rows.inside] = cast(values.reshape(rows.address.shape)[rows.valid], NUMPY[view.dtype])
        if cell.written is not None:
            cell.line(view, cell.written)[rows.inside] = True
        self._watch(view, 0, view.storage.nbytes, True, rows.inside)

    # -- races --------------------------------------------------------------------------------------------------------
    def _watch(self, view: NkiTensor, first: int, last: int, write: bool, inside: Array | None = None) -> None:
        """Note an access to shared memory, to elements first..last or the chosen ones. Bits of a mark: 1, 2 read by core 0,
        1; 4, 8 written by core 0, 1, since the cores last met."""
        if view.storage.key not in self.contended:
            return
        cell = self.cell(view.storage)
        new: tuple[Array, list[Any]] = (np.zeros(cell.storage.nbytes // cell.unit, np.uint8), [])
        marks, log = self.shadows.setdefault(view.storage.key, new)
        line = cell.over(marks, view, first) if inside is None else cell.line(view, marks)
        part = line if inside is None else line[inside]
        me, other, size = self.core, 1 - self.core, view.dtype.itemsize
        if (part & ((4 << other) | (1 << other if write else 0))).any():
            for core, wrote, seen, low, high in log:
                if core == other and (wrote or write) and low <= last * size and first * size <= high:
                    does = f"core {me} {'writes' if write else 'reads'} what core {other}"
                    found = f"{does} {'writes' if wrote else 'reads'} ({seen.op} at {seen.where})"
                    refuse("race", f"{found} in {view.storage}, with no core_barrier between")
                    break
        part |= np.uint8((4 if write else 1) << me)
        if inside is not None:
            line[inside] = part
        log.append((me, write, self.instr, first * size, last * size))

    # -- running ------------------------------------------------------------------------------------------------------
    def run(self, order: str = "core0") -> None:
        """Run every core to its end."""
        if order not in ORDERS:
            raise ValueError(f"order {order!r} is not one of {', '.join(ORDERS)}, all")
        alternate = order == "alternate"
        running = {c.core: self._block(c.core, c.block, alternate) for c in self.cores}
        waiting: dict[int, Instr] = {}
        first = turn = 1 if order == "core1" and len(self.cores) > 1 else 0
        doing.append(("", None))
        try:
            while running:
                ready = [c for c in running if c not in waiting]
                if ready:
                    self.core = turn = turn if turn in ready else ready[0]
                    event = next(running[turn], None)
                    if event is None:
                        del running[turn]
                    elif event.op in MEETINGS:
                        waiting[turn] = event
                    turn = 1 - turn if alternate else turn
                else:
                    self._meet(waiting)
                    waiting, turn = {}, first
            for core, left in enumerate(self.trips):
                if left and self.in_step:
                    where, n = left[0]
                    found = f"core {core} runs the loop at {where} {n} times, core {1 - core} does not run it"
                    refuse("lnc-trips", f"{found}; {_SAME}", where)
        finally:
            doing.pop()

    def _meet(self, waiting: dict[int, Instr]) -> None:
        pairs = sorted(waiting.items())
        for self.core, i in pairs:
            self._at(i)
            if len(pairs) < len(self.cores) or len({(i.op, i.args.get("pipe_id")) for _, i in pairs}) > 1:
                found = ", ".join(f"core {core} at {i.op} ({i.where})" for core, i in pairs)
                refuse("deadlock", f"the cores do not meet: {found}; both must run the same program")
                return
            peer = i.args.get("recv_from_rank", self.core)
            if waiting[peer].args.get("send_to_rank", self.core) != self.core:
                refuse("deadlock", f"core {self.core} receives from core {peer}, which sends elsewhere")
        sent = {}
        if pairs[0][1].op == "sendrecv":
            for self.core, i in pairs:
                sent[self.core] = self.read(i.args["src"]).copy()
        self.met += 1
        for marks, log in self.shadows.values():
            marks.fill(0)
            log.clear()
        for self.core, i in pairs:
            if sent:
                self.write(i.args["dst"], sent[i.args["recv_from_rank"]])
            self._ran(i)

    def _block(self, core: int, block: Block, alternate: bool) -> Iterator[Instr]:
        for at, item in enumerate(block.items):
            if isinstance(item, Loop):
                yield from self._loop(core, item, alternate)
            elif item.op in MEETINGS:
                yield item
            else:
                self._step(item)
                self._ran(item)
                if alternate and any(v.storage.key[0] == "shared" for v in (*item.reads, *item.writes)):
                    yield item
            for storage in block.frees.get(at, ()):
                self.cells.pop(storage.key, None)
                if self.observe:
                    self.observe.freed(storage)

    def _loop(self, core: int, loop: Loop, alternate: bool) -> Iterator[Instr]:
        yield from self._passes(core, loop, alternate)
        self.core = core
        if self.observe:
            self.observe.looped(core, loop)

    def _passes(self, core: int, loop: Loop, alternate: bool) -> Iterator[Instr]:
        registers, counter = self.registers[core], loop.counter.number
        here = Instr("loop", "sync", {}, (), (), loop.where, None)

        def value(source: Any) -> int:
            self.core = core
            self._at(here)
            return self.value(source)

        if loop.condition is None:
            passes = range(value(loop.lower), value(loop.upper), loop.step)
            self._trips(core, loop, len(passes))
            for i in passes:
                registers[counter] = i
                yield from self._block(core, loop.body, alternate)
            return
        registers[counter] = value(loop.condition)
        for done in range(_LOOP_LIMIT):
            if registers[counter] == 0:
                self._trips(core, loop, done)
                return
            if done == LOOP_TRIPS:
                _few_enough(loop, done + 1)
            yield from self._block(core, loop.body, alternate)
            registers[counter] = value(loop.result)
        raise NkiError("endless-loop", f"a while_loop ran {_LOOP_LIMIT} times, its condition never zero", loop.where)

    def _trips(self, core: int, loop: Loop, n: int) -> None:
        """A loop's passes: at least one, not too many, and on both cores of a pair as many."""
        if n == 0 and (loop.condition is None or len(self.cores) > 1):
            found = f"a device loop runs no pass: {loop.lower} to {loop.upper}" if loop.condition is None else "no pass"
            refuse(
                "zero-trip",
                f"{found}. Make it run once, on work that changes nothing (out-of-range indices)",
                loop.where,
            )
        if loop.condition is None and n > LOOP_TRIPS:
            _few_enough(loop, n)
        if not self.in_step:
            return
        self.trips[core].append((loop.where, n))
        if self.trips[1 - core]:
            (where, mine), (other, theirs) = self.trips[core].popleft(), self.trips[1 - core].popleft()
            self.in_step = where == other and mine == theirs
            if not self.in_step:
                found = (
                    f"core {core} runs the loop at {where} {mine} times, core {1 - core} that at {other} {theirs} times"
                )
                refuse("lnc-trips", f"{found}; {_SAME}", where)

    def _at(self, instr: Instr) -> None:
        self.instr = instr
        doing[-1] = (instr.op, instr.where)

    def _step(self, instr: Instr) -> None:
        self._at(instr)
        with np.errstate(all="ignore"):
            if instr.special:
                instr.compute(self)
                return
            results = instr.compute(*[self.read(v) for v in instr.reads])
            for view, values in zip(instr.writes, results if len(instr.writes) > 1 else (results,), strict=True):
                self.write(view, values)

    def _ran(self, instr: Instr) -> None:
        if self.observe:
            self.observe(self.core, instr, self.located)
            self.located.clear()


def _few_enough(loop: Loop, n: int) -> None:
    found = f"a device loop runs {n} passes or more; more than {LOOP_TRIPS} are not known to work"
    refuse("trip-count", f"{found}. Do more in a pass, or run several loops", loop.where)


def _overlap(a: NkiTensor, b: NkiTensor) -> bool:
    """Whether two views of a storage may share elements: where one moves at run time, they may."""
    if a.storage.key != b.storage.key:
        return False
    if a.is_indirect() or b.is_indirect():
        return True
    (first, last), (low, high) = (
        (v.offset * v.dtype.itemsize, (v.offset + v.extent() + 1) * v.dtype.itemsize) for v in (a, b)
    )
    return first < high and low < last


def holes(part: Array, view: NkiTensor) -> str:
    """How much of a view is missing, in words."""
    at = tuple(map(int, np.unravel_index(np.argmin(part), part.shape)[: view.ndim]))
    return f"{part.size - np.count_nonzero(part)} of {part.size} elements, the first at {at},"
