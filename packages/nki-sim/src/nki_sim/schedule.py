"""When instructions run: nearly in order on each engine, after what they depend on, with DMA latency and shared DMA bandwidth.

Dependencies are found on the addresses that tensors occupy, so one that reuses another's bytes waits for its last reader.
Tensors without an address get one as they first appear, walking round the memory, which reuses what was freed longest ago;
a tensor of a dynamic loop keeps its address, as the loop's code does.
"""

import heapq
from dataclasses import dataclass, field

from nki_sim.cost import Cost, Model, cost
from nki_sim.limits import PSUM_BANK_BYTES
from nki_sim.machine import MEETINGS
from nki_sim.memory import CAPACITY
from nki_sim.program import Instr, Loop
from nki_sim.tensor import MemoryRegion, NkiTensor, Storage, VirtualRegister

PAGE = 2048  # bytes of a partition whose accesses are kept together
Key = tuple[int | str, int]
Queue = tuple[int, str]
Box = tuple[int, int, int, int]  # partitions or rows from, to; bytes from, to


@dataclass(slots=True)
class Event:
    """One executed instruction."""

    core: int
    instr: Instr
    cost: Cost
    after: set[int] = field(default_factory=set)
    weights: set[int] = field(default_factory=set)  # those of `after` that a matmul's stationary tile waits for
    stationary: object = None  # which tile that is
    start: float = 0.0
    end: float = 0.0

    @property
    def queue(self) -> Queue:
        """What issues it in order: an engine, or the DMA ring of its direction."""
        return self.core, self.instr.engine if self.instr.engine != "dma" else f"dma {self.cost.direction}"


class Recorder:
    """Observes a machine: events with their dependencies, in the order they ran."""

    def __init__(self, model: Model, written: frozenset[Key]) -> None:
        self.model, self.written = model, written
        self.events: list[Event] = []
        self.costs: dict[int, Cost] = {}
        self.numbers: dict[int, int] = {}  # id(instr) -> its latest event
        self.last: dict[Queue, set[int]] = {}  # the latest event of each queue
        self.registers: dict[tuple[int, int], int] = {}  # core and register -> the event that set it
        self.fence: dict[
            int, int
        ] = {}  # core -> the event of the loop that ended last, which all that follows waits for
        self.records: dict[object, list[tuple[Box, list[int], bool]]] = {}
        self.addresses: dict[Key, int] = {}
        self.live: dict[tuple[int, MemoryRegion], dict[Key, tuple[int, int]]] = {}
        self.cursor: dict[tuple[int, MemoryRegion], int] = {}
        self.met = 0  # the event in which the cores last met: what one did before that, the other waits for

    def __call__(self, core: int, instr: Instr, located: dict[int, int]) -> None:
        if id(instr) not in self.costs:
            self.costs[id(instr)] = cost(instr, self.model)
        number = len(self.events)
        event = Event(core, instr, self.costs[id(instr)])
        if core in self.fence:
            event.after.add(self.fence[core])
        event.after.update(self.numbers[id(p)] for p in instr.after if id(p) in self.numbers)
        meeting = instr.op in MEETINGS
        if meeting and core == 1:
            event.after.add(number - 1)  # the other core's half, which ran just before
        self.events.append(event)
        self.numbers[id(instr)] = number
        for value in instr.args.values():
            if isinstance(value, VirtualRegister):
                self._wait_for_register(event, value)
        if event.cost.weights_ns and instr.reads:
            tile = instr.reads[0]
            event.stationary = (tile.storage.key, located.get(id(tile), tile.offset), tile.shape, tile.strides)
        for i, view in enumerate(instr.reads):
            self._access(event, number, view, located, meeting)
            if i == 0 and event.stationary:
                event.weights = set(event.after)
        for view in instr.writes:
            self._access(event, number, view, located, True)
        if meeting and core == 1:  # the first half waits for what this one waits for
            self.events[number - 1].after.update(event.after - {number - 1}, self.last.get(event.queue, ()))
            self.met = number
        self.last[event.queue] = {number}
        if isinstance(instr.args.get("dst"), VirtualRegister):
            self.registers[core, instr.args["dst"].number] = number

    def looped(self, core: int, loop: Loop) -> None:
        """A device loop ended: the engines synchronise, and what follows waits for what was before."""
        sync = Instr("loop", "sync", {}, (), (), loop.where, None)
        event = Event(core, sync, Cost(self.model.loop_ns))
        number = len(self.events)
        since = self.fence.get(core, -1)
        if self.model.loop_drains:
            event.after.update(n for n in range(since + 1, number) if self.events[n].core == core)
        self.events.append(event)
        self.last[event.queue] = {number}
        if self.model.loop_drains:
            self.fence[core] = number

    def _wait_for_register(self, event: Event, register: VirtualRegister) -> None:
        if (event.core, register.number) in self.registers:
            event.after.add(self.registers[event.core, register.number])

    def freed(self, storage: Storage) -> None:
        """The machine dropped a tensor: its bytes may be reused."""
        if storage.buffer.on_chip:
            self.live.get((int(storage.key[0]), storage.buffer), {}).pop(storage.key, None)

    def _access(self, event: Event, number: int, view: NkiTensor, located: dict[int, int], write: bool) -> None:
        storage, size, pitch = view.storage, view.dtype.itemsize, view.storage.pitch
        if view.indirect_index is not None:
            source = view.indirect_index.source
            if isinstance(source, NkiTensor):
                self._access(event, number, source, located, False)
            else:
                self._wait_for_register(event, source)
        row, first = divmod(located.get(id(view), view.offset) * size, pitch)
        rows, last = 1, first + size
        for stride, n in zip(view.strides, view.shape, strict=True):
            whole, rest = divmod(stride * size, pitch)
            rows, last = (rows + (n - 1) * whole, last) if not rest else (rows, last + (n - 1) * stride * size)
        if view.by_row:  # chosen at run time: any
            row, rows, first, last = 0, storage.nbytes // pitch, 0, pitch
        elif last > pitch:  # wraps round
            rows, first, last = rows + last // pitch, 0, pitch
        if storage.buffer.on_chip:
            part, byte = storage.address or (0, self._address(event.core, storage))
            row, first, last = row + part, first + byte, last + byte
            pages = range(first // PAGE, (last - 1) // PAGE + 1)
            keys: list[object] = [(event.core, storage.buffer, page) for page in pages]
        else:
            keys = [storage.key] if storage.key in self.written else []
        for key in keys:
            self._depend(event, number, key, (row, row + rows, first, last), write)

    def _depend(self, event: Event, number: int, key: object, box: Box, write: bool) -> None:
        a, b, c, d = box
        mine = [number]
        kept = [(box, mine, write)]
        for record in self.records.get(key, ()):
            (e, f, g, h), others, wrote = record
            there = self.events[others[-1]]
            if e < b and a < f and g < d and c < h and (there.core == event.core or others[-1] <= self.met):
                if (write or wrote) and others[-1] != number:
                    event.after.update(n for n in others if n != number)
                same_queue = not wrote and there.queue == event.queue
                if (write or same_queue) and a <= e and f <= b and c <= g and h <= d:
                    if not write:  # what comes later waits for these readers too, which may start after this one
                        mine[:0] = others[-self.model.reorder :]
                    continue
            kept.append(record)
        self.records[key] = kept

    def _address(self, core: int, storage: Storage) -> int:
        if storage.key in self.addresses:
            return self.addresses[storage.key]
        region, size = (core, storage.buffer), storage.pitch
        live, cursor = self.live.setdefault(region, {}), self.cursor.get(region, 0)

        def aligned(start: int) -> int:  # a tensor that fits a PSUM bank stays in one
            room = PSUM_BANK_BYTES - start % PSUM_BANK_BYTES
            return start + room if storage.buffer is MemoryRegion.psum and room < size <= PSUM_BANK_BYTES else start

        def free(start: int) -> bool:
            alone = all(b <= start or start + size <= a for a, b in live.values())
            return alone and start + size <= CAPACITY[storage.buffer]

        spots = [aligned(s) for s in sorted({0, cursor, *(b for _, b in live.values())})]
        onward = [s for s in spots if s >= cursor] + spots
        start = next(filter(free, onward), 0)  # 0 when fragmented: memory.plan found that the sum fits; share and wait
        self.cursor[region], self.addresses[storage.key] = start + size, start
        live[storage.key] = (start, start + size)
        return start


def schedule(events: list[Event], model: Model) -> float:
    """Set each event's start and end.

    Each queue takes, of its next `model.reorder` events, the first in program order that can start, or the one that can soonest; of
    the queues, the one that can start first goes on.

    Returns:
        The last end, in ns.
    """
    plan = _Plan(events, model)
    while plan.queues:
        plan.step()
    return max((e.end for e in events), default=0.0)


class _Queue:
    """Events that one engine or DMA ring starts one after another; `ready` and `waiting` hold those of its window that could."""

    __slots__ = ("at", "free", "name", "numbers", "ready", "started", "waiting")

    def __init__(self, name: Queue) -> None:
        self.name, self.at, self.free = name, 0, 0.0
        self.numbers: list[int] = []
        self.ready: list[int] = []  # may start when the queue is free, by program order
        self.waiting: list[tuple[float, int]] = []  # may start later
        self.started: set[int] = set()  # positions past `at` that have gone ahead


class _Plan:
    """The state of a schedule: what has started, and what that lets start."""

    def __init__(self, events: list[Event], model: Model) -> None:
        self.events, self.model = events, model
        self.blockers = [len(e.after) for e in events]
        self.blocks: list[list[int]] = [[] for _ in events]
        self.earliest = [0.0] * len(events)
        self.shared: dict[Queue, float] = {}  # when (core, engine) is free: DMA rings share one bandwidth
        self.previous: dict[Queue, Event] = {}  # the latest matmul of a core
        self.queues: dict[Queue, _Queue] = {}
        self.place = [0] * len(events)  # position of an event in its queue
        for number, event in enumerate(events):
            for n in event.after:
                self.blocks[n].append(number)
            queue = self.queues.setdefault(event.queue, _Queue(event.queue))
            self.place[number] = len(queue.numbers)
            queue.numbers.append(number)
        for queue in self.queues.values():
            for number in queue.numbers[: model.reorder]:
                self._offer(queue, number)

    def _offer(self, queue: _Queue, number: int) -> None:
        """An event of the window whose producers have all started joins those that may start."""
        if not self.blockers[number]:
            if self.earliest[number] <= queue.free:
                heapq.heappush(queue.ready, number)
            else:
                heapq.heappush(queue.waiting, (self.earliest[number], number))

    def step(self) -> None:
        """Start the event that can start first."""
        best: tuple[float, float, Queue] | None = None
        for queue in self.queues.values():
            while queue.waiting and queue.waiting[0][0] <= queue.free:
                heapq.heappush(queue.ready, heapq.heappop(queue.waiting)[1])
            if queue.ready:
                ready = self.earliest[queue.ready[0]]
            elif queue.waiting:
                ready = queue.waiting[0][0]
            else:
                continue
            core, engine = queue.name[0], self.events[queue.numbers[0]].instr.engine
            start = max(ready, queue.free, self.shared.get((core, engine), 0.0))
            candidate = (start, max(ready, queue.free), queue.name)  # DMA takes what has waited longest
            best = candidate if best is None or candidate < best else best
        assert best is not None, "dependencies point backwards, so some event can always start"
        queue = self.queues[best[2]]
        number = heapq.heappop(queue.ready) if queue.ready else heapq.heappop(queue.waiting)[1]
        self._start(queue, number, best[0])

    def _start(self, queue: _Queue, number: int, start: float) -> None:
        event = self.events[number]
        core, cost = event.core, event.cost
        if cost.issue and cost.issue[1]:  # who generates the descriptors does so while others move
            engine = (core, cost.issue[0])
            self.shared[engine] = max(self.shared.get(engine, 0.0), self.earliest[number]) + cost.issue[1]
            start = max(start, self.shared[engine])
        if cost.weights_ns:
            start = max(start, self._weights(event))
            self.previous[queue.name] = event
        event.start, event.end = start, start + cost.ns
        queue.free = self.shared[core, event.instr.engine] = event.end
        event.end += self.model.dma_latency_ns if event.instr.engine == "dma" else 0.0
        for n in self.blocks[number]:
            self.earliest[n] = max(self.earliest[n], event.end)
            self.blockers[n] -= 1
            other = self.queues[self.events[n].queue]
            if not self.blockers[n] and self.place[n] < other.at + self.model.reorder:
                self._offer(other, n)
        self._advance(queue, self.place[number])

    def _weights(self, event: Event) -> float:
        """When a matmul's stationary tile is loaded: from when it is there, and behind the matmul before."""
        before = self.previous.get(event.queue)
        if before and before.stationary == event.stationary:
            return 0.0
        there = max((self.events[n].end for n in event.weights), default=0.0)
        return max(there, before.start if before else 0.0) + event.cost.weights_ns

    def _advance(self, queue: _Queue, position: int) -> None:
        """The window moves on as its oldest event has started."""
        queue.started.add(position)
        while queue.at in queue.started:
            queue.started.remove(queue.at)
            entering = queue.at + self.model.reorder
            queue.at += 1
            if entering < len(queue.numbers):
                self._offer(queue, queue.numbers[entering])
        if queue.at == len(queue.numbers):
            del self.queues[queue.name]
