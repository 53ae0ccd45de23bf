"""Runs a program: memory with a record of what was written, one core or two in a chosen order, and the watch for races.

Cores are generators that stop where they meet (core_barrier, sendrecv), so an order is deterministic and needs no threads:
"core0" and "core1" run that core to its next meeting first, "alternate" switches after every access to shared memory.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from nki_sim.dtypes import NUMPY, cast
from nki_sim.errors import NkiError, Where, refuse
from nki_sim.program import Block, CoreProgram, Instr, Loop
from nki_sim.tensor import MemoryRegion, NkiTensor, Storage, VirtualRegister

if TYPE_CHECKING:
    from nki_sim.schedule import Recorder

__all__ = ["ORDERS", "Cell", "Machine"]

ORDERS = ("core0", "core1", "alternate")
_LOOP_LIMIT = 10_000_000  # passes of one dynamic loop before it counts as endless
Array = np.ndarray


class Cell:
    """The bytes of one storage in one run, and which of them hold something (`written` is None once all do)."""

    def __init__(self, storage: Storage, data: Array | None = None) -> None:
        self.storage = storage
        self.unit = storage.unit
        self.data = (
            np.full(storage.nbytes, 0xFF, np.uint8) if data is None else data
        )  # 0xFF...: NaN, or an index far outside
        self.written: Array | None = None if data is not None else np.zeros(storage.nbytes // self.unit, bool)
        self.missing = 0 if data is not None else storage.nbytes // self.unit
        self.base = np.zeros(storage.nbytes // self.unit, bool) if storage.buffer is MemoryRegion.psum else None
        self.clobbered: tuple[Storage, Where | None] | None = None

    def array(self, view: NkiTensor, offset: int) -> Array:
        dtype = NUMPY[view.dtype]
        return np.ndarray(view.shape, dtype, self.data, offset * dtype.itemsize, view.byte_strides)  # type: ignore[call-overload,no-any-return]

    def over(self, marks: Array, view: NkiTensor, offset: int) -> Array:
        """The part of per-unit `marks` that a view covers."""
        size, unit = view.dtype.itemsize, self.unit
        strides = tuple(s * (size // unit) for s in view.strides)
        shape = view.shape
        if size != unit:
            shape, strides = (*shape, size // unit), (*strides, 1)
        return np.ndarray(shape, marks.dtype, marks, offset * size // unit, strides)  # type: ignore[call-overload,no-any-return]

    def mark(self, view: NkiTensor, offset: int, matmul: bool = False) -> None:
        if self.base is not None:
            self.over(self.base, view, offset)[...] = matmul
        if self.written is None:
            return
        if view.size * view.dtype.itemsize == self.storage.nbytes:
            self.written, self.missing = None, 0
            return
        part = self.over(self.written, view, offset)
        self.missing -= part.size - int(np.count_nonzero(part))
        part[...] = True
        if self.missing == 0:
            self.written = None

    def forget(self, first: int, last: int, partitions: slice, by: Storage, where: Where | None) -> None:
        """Another tensor overwrote these bytes of these partitions."""
        if self.written is None:
            self.written = np.ones(self.storage.nbytes // self.unit, bool)
        rows = self.written.reshape(-1, self.storage.pitch // self.unit)
        rows[partitions, first // self.unit : -(-last // self.unit)] = False
        self.data.reshape(-1, self.storage.pitch)[partitions, first:last] = 0xFF
        self.missing = self.written.size - int(np.count_nonzero(self.written))
        self.clobbered = (by, where)


class Machine:
    """Executes the programs of one or two cores. `observe` (a schedule.Recorder) sees each instruction after it ran."""

    def __init__(
        self, cores: list[CoreProgram], inputs: list[Array], observe: "Recorder | None" = None
    ) -> None:
        self.cores = cores
        self.cells: dict[tuple[int | str, int], Cell] = {}
        self.observe = observe
        self.registers: list[dict[int, int]] = [{} for _ in cores]
        self.accumulators: dict[tuple[int, str], Array] = {}  # reduce registers per (core, engine)
        self.located: dict[
            int, int
        ] = {}  # id(view) -> element offset, for run-time addresses of the current instruction
        self.core = 0
        self.inputs = {storage.key: data for storage, data in zip(cores[0].inputs, inputs, strict=True)}
        self.shadows: dict[tuple[int | str, int], tuple[Array, list[tuple[int, bool, Instr, int, int]]]] = {}
        self.contended = {
            v.storage.key for c in cores for i in c.instructions() for v in i.writes if v.storage.key[0] == "shared"
        }
        if len(cores) == 1:
            self.contended = set()

    # -- memory -------------------------------------------------------------------------------------------------------
    def cell(self, storage: Storage) -> Cell:
        found = self.cells.get(storage.key)
        if found is None:
            data = self.inputs.get(storage.key)
            if data is None and storage.constant is not None:
                data = np.ascontiguousarray(storage.constant).reshape(-1).view(np.uint8).copy()
            found = self.cells[storage.key] = Cell(storage, data)
        return found

    def locate(self, view: NkiTensor, instr: Instr, skip: bool = False) -> int | None:
        """The element where a view begins now; None when that is outside and skipping is allowed."""
        index = view.indirect_index
        if index is None:
            return view.offset
        value = self.value(index.source, instr)
        offset = view.offset + value * index.scale
        last = offset + sum(s * (n - 1) for s, n in zip(view.strides, view.shape, strict=True))
        limit = view.storage.nbytes // view.dtype.itemsize
        if offset < 0 or last >= limit:
            if not skip:
                refuse(
                    "out-of-bounds",
                    f"{instr.op}: run-time index {value} puts {view!r} at elements {offset}..{last} of {limit} in {view.storage}; clamp the index, or use oob_mode.skip where DMA allows it",
                    instr.where,
                )
            return None
        self.located[id(view)] = offset
        return offset

    def value(self, source: VirtualRegister | NkiTensor | int, instr: Instr) -> int:
        """An integer the device knows: a register or a one-element tensor."""
        if isinstance(source, VirtualRegister):
            if source.number not in self.registers[self.core]:
                refuse(
                    "uninitialized", f"{instr.op} reads a register that nothing was moved or loaded into", instr.where
                )
            return self.registers[self.core].get(source.number, 0)
        return int(self.read(source, instr).reshape(-1)[0]) if isinstance(source, NkiTensor) else source

    def read(self, view: NkiTensor, instr: Instr) -> Array:
        """The values of a view; refused where nothing was written."""
        offset = self.locate(view, instr)
        if offset is None:  # recorded, not raised: undefined values
            return np.full(view.shape, np.nan, np.float32)
        cell = self.cell(view.storage)
        if cell.written is not None and not (part := cell.over(cell.written, view, offset)).all():
            self.complain(cell, view, part, instr)
        if view.storage.key in self.contended:
            self.watch(view, offset, instr, False)
        return cell.array(view, offset)

    def complain(self, cell: Cell, view: NkiTensor, part: Array, instr: Instr) -> None:
        first = tuple(int(i) for i in np.argwhere(~part)[0][: view.ndim])
        amount = f"{int(part.size - np.count_nonzero(part))} of {part.size} elements, first at {first}"
        if cell.clobbered:
            by, where = cell.clobbered
            refuse(
                "overlap",
                f"{instr.op} reads {view.storage}, whose address {by} shares: {amount} were overwritten at {where}. Give them separate addresses, or finish with one before writing the other",
                instr.where,
            )
        else:
            refuse(
                "uninitialized",
                f"{instr.op} reads {view!r} of {view.storage} where nothing was written: {amount}. Write it first (nisa.memset, or a DMA that covers it)",
                instr.where,
            )

    def write(self, view: NkiTensor, values: Array, instr: Instr, matmul: bool = False) -> None:
        """Store values, converted to the view's dtype."""
        offset = self.locate(view, instr)
        if offset is None:
            return
        cell = self.cell(view.storage)
        target = cell.array(view, offset)
        values = cast(np.asarray(values), target.dtype)
        target[...] = values if values.shape == view.shape or values.ndim == 0 else values.reshape(view.shape)
        self.wrote(cell, view, offset, instr, matmul)

    def wrote(self, cell: Cell, view: NkiTensor, offset: int, instr: Instr, matmul: bool = False) -> None:
        cell.mark(view, offset, matmul)
        storage = view.storage
        if storage.aliases:
            self._clobber(storage, view, offset, instr)
        if storage.key in self.contended:
            self.watch(view, offset, instr, True)

    def _clobber(self, storage: Storage, view: NkiTensor, offset: int, instr: Instr) -> None:
        size, pitch = view.dtype.itemsize, storage.pitch
        part, byte = storage.address or (0, 0)
        first = byte + offset * size % pitch
        last = first + (sum(s * (n - 1) for s, n in zip(view.strides[1:], view.shape[1:], strict=True)) + 1) * size
        start = part + offset * size // pitch
        for other in storage.aliases:
            cell = self.cells.get(other.key)
            if cell is None:
                continue
            o_part, o_byte = other.address or (0, 0)
            lo, hi = max(first, o_byte) - o_byte, min(last, o_byte + other.pitch) - o_byte
            p0, p1 = max(start - o_part, 0), min(start + view.shape[0] - o_part, other.shape[0])
            if lo < hi and p0 < p1:
                cell.forget(lo, hi, slice(p0, p1), storage, instr.where)

    # -- gather and scatter -------------------------------------------------------------------------------------------
    def rows(self, view: NkiTensor, index: Array, instr: Instr, skip: bool) -> tuple[Array, Array]:
        """Element addresses of an indirect view, one row for each index, and which rows are inside the storage."""
        assert view.indirect_index is not None
        start = view.offset + index.astype(np.int64) * view.indirect_index.scale
        inner = np.zeros((1,), np.int64)
        for stride, n in zip(view.strides[1:], view.shape[1:], strict=True):
            inner = (inner[:, None] + np.arange(n) * stride).reshape(-1)
        limit = view.storage.nbytes // view.dtype.itemsize
        valid = (start + inner.min() >= 0) & (start + inner.max() < limit)
        if not skip and not valid.all():
            bad = int(np.argmax(~valid))
            refuse(
                "out-of-bounds",
                f"{instr.op}: index {int(index[bad])} of row {bad} leaves {view.storage} ({int((~valid).sum())} of {len(valid)} rows do); clamp the indices or use oob_mode.skip",
                instr.where,
            )
        return start[:, None] + inner[None, :], valid

    def flat(self, view: NkiTensor, marks: Array | None = None) -> Array:
        """All elements of a view's storage (or of per-unit marks over it) as a line of the view's dtype."""
        cell = self.cell(view.storage)
        if marks is None:
            return cell.data.view(NUMPY[view.dtype])
        return marks.reshape(-1, view.dtype.itemsize // cell.unit)

    def gather(self, view: NkiTensor, address: Array, valid: Array, instr: Instr) -> Array:
        cell = self.cell(view.storage)
        inside = address[valid]
        if cell.written is not None and not (part := self.flat(view, cell.written)[inside]).all():
            self.complain(cell, view, part, instr)
        self.watch_rows(view, inside, instr, False)
        values = np.zeros(address.shape, NUMPY[view.dtype])
        values[valid] = self.flat(view)[inside]
        return values

    def scatter(self, view: NkiTensor, address: Array, valid: Array, values: Array, instr: Instr) -> None:
        cell = self.cell(view.storage)
        inside = address[valid]
        self.flat(view)[inside] = cast(values[valid], NUMPY[view.dtype])
        if cell.written is not None:
            self.flat(view, cell.written)[inside] = True
            cell.missing = cell.written.size - int(np.count_nonzero(cell.written))
        self.watch_rows(view, inside, instr, True)

    # -- races --------------------------------------------------------------------------------------------------------
    def watch(self, view: NkiTensor, offset: int, instr: Instr, write: bool) -> None:
        cell = self.cell(view.storage)
        marks, log = self.shadows.setdefault(
            cell.storage.key, (np.zeros(cell.storage.nbytes // cell.unit, np.uint8), [])
        )
        last = offset + sum(s * (n - 1) for s, n in zip(view.strides, view.shape, strict=True))
        self._watch(cell.over(marks, view, offset), log, view, offset, last, instr, write)

    def watch_rows(self, view: NkiTensor, inside: Array, instr: Instr, write: bool) -> None:
        if view.storage.key not in self.contended or not inside.size:
            return
        cell = self.cell(view.storage)
        marks, log = self.shadows.setdefault(
            cell.storage.key, (np.zeros(cell.storage.nbytes // cell.unit, np.uint8), [])
        )
        line = self.flat(view, marks)
        part = line[inside]
        self._watch(part, log, view, int(inside.min()), int(inside.max()), instr, write)
        line[inside] = part

    def _watch(
        self, part: Array, log: list[Any], view: NkiTensor, first: int, last: int, instr: Instr, write: bool
    ) -> None:
        """Bits of a mark: 1, 2 read by core 0, 1; 4, 8 written by core 0, 1, since the cores last met."""
        me, other = self.core, 1 - self.core
        against = (4 << other) | ((1 << other) if write else 0)
        if (part & against).any():
            size = view.dtype.itemsize
            for core, wrote, seen, lo, hi in log:
                if core == other and (wrote or write) and lo <= last * size and first * size <= hi:
                    refuse(
                        "race",
                        f"core {me} {'writes' if write else 'reads'} and core {other} {'writes' if wrote else 'reads'} the same elements of {view.storage} with no core_barrier between: {instr.op} here, {seen.op} at {seen.where}",
                        instr.where,
                    )
                    break
        part |= np.uint8((4 if write else 1) << me)
        log.append((me, write, instr, first * view.dtype.itemsize, last * view.dtype.itemsize))

    # -- running ------------------------------------------------------------------------------------------------------
    def run(self, order: str = "core0") -> None:
        """Run every core to its end."""
        if order not in ORDERS:
            raise ValueError(f"order {order!r} is not one of {', '.join(ORDERS)}")
        eager = order == "alternate"
        running = {c.core: self._block(c.core, c.block, eager) for c in self.cores}
        waiting: dict[int, Instr] = {}
        turn = 1 if order == "core1" and len(self.cores) > 1 else 0
        first = turn
        with np.errstate(all="ignore"):
            while running:
                ready = [c for c in running if c not in waiting]
                if not ready:
                    self._meet(waiting, set(running))
                    waiting, turn = {}, first
                    continue
                self.core = core = turn if turn in ready else ready[0]
                event = next(running[core], "end")
                if event == "end":
                    del running[core]
                elif isinstance(event, Instr):
                    waiting[core] = event
                turn = 1 - core if eager else core

    def _meet(self, waiting: dict[int, Instr], running: set[int]) -> None:
        instrs = [waiting[c] for c in sorted(waiting)]
        ops = [(i.op, i.args.get("pipe_id")) for i in instrs]
        if len(instrs) < len(self.cores) or len(set(ops)) != 1:
            refuse(
                "deadlock",
                f"the cores wait for each other at different points: {', '.join(f'core {c} at {waiting[c].op} ({waiting[c].where})' for c in sorted(waiting))}; both must run the same program",
                instrs[0].where,
            )
            return
        if instrs[0].op == "sendrecv":
            sent = []
            for core, i in zip(sorted(waiting), instrs, strict=True):
                self.core = core
                sent.append(self.read(i.args["src"], i).copy())
            for core, i in zip(sorted(waiting), instrs, strict=True):
                self.core = core
                peer = i.args["recv_from_rank"]
                if waiting[peer].args["send_to_rank"] != core:
                    refuse(
                        "deadlock",
                        f"core {core} receives from {peer}, which sends to {waiting[peer].args['send_to_rank']}",
                        i.where,
                    )
                self.write(i.args["dst"], sent[peer], i)
        for marks, log in self.shadows.values():
            marks.fill(0)
            log.clear()
        for core, i in zip(sorted(waiting), instrs, strict=True):
            self._done(core, i)

    def _block(self, core: int, block: Block, eager: bool) -> Iterator[Instr | str]:
        for at, item in enumerate(block.items):
            if isinstance(item, Loop):
                yield from self._loop(core, item, eager)
            elif item.op in ("core_barrier", "sendrecv"):
                yield item
            else:
                self.step(item)
                if self.observe:
                    self._done(core, item)
                if eager and any(v.storage.key[0] == "shared" for v in (*item.reads, *item.writes)):
                    yield "shared"
            for storage in block.frees.get(at, ()):
                self.cells.pop(storage.key, None)
                if self.observe:
                    self.observe.freed(storage)

    def _loop(self, core: int, loop: Loop, eager: bool) -> Iterator[Instr | str]:
        registers = self.registers[core]
        here = Instr("loop", "sync", {}, (), (), loop.where, lambda: None)

        def bound(value: int | VirtualRegister) -> int:
            self.core = core
            return self.value(value, here)

        passes = 0
        if loop.condition is not None:
            assert loop.result is not None
            registers[loop.counter.number] = bound(loop.condition)
            while registers[loop.counter.number] != 0:
                yield from self._block(core, loop.body, eager)
                registers[loop.counter.number] = bound(loop.result)
                passes += 1
                if passes > _LOOP_LIMIT:
                    raise NkiError(
                        "endless-loop",
                        f"a while_loop ran {passes} times without its condition becoming zero",
                        loop.where,
                    )
            return
        for i in range(bound(loop.lower), bound(loop.upper), loop.step):
            registers[loop.counter.number] = i
            yield from self._block(core, loop.body, eager)

    def step(self, instr: Instr) -> None:
        """Execute one instruction."""
        if instr.special:
            instr.compute(self, instr)
            return
        results = instr.compute(*[self.read(v, instr) for v in instr.reads])
        if len(instr.writes) == 1:
            self.write(instr.writes[0], results, instr)
        else:
            for view, values in zip(instr.writes, results, strict=True):
                self.write(view, values, instr)

    def _done(self, core: int, instr: Instr) -> None:
        if self.observe:
            self.observe(core, instr, self.located)
            self.located.clear()
