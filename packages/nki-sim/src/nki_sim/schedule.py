"""When instructions run: in order on each engine, after what they depend on, with DMA latency and shared DMA bandwidth.

Dependencies are found on the addresses that tensors occupy, so one that reuses another's bytes waits for its last reader.
Tensors without an address get one as they first appear, walking round the memory, which reuses what was freed longest ago;
a tensor of a dynamic loop keeps its address, as the loop's code does.
"""

from dataclasses import dataclass, field

from nki_sim.cost import Cost, Model, cost
from nki_sim.limits import PSUM_BANK_BYTES
from nki_sim.machine import MEETINGS
from nki_sim.memory import CAPACITY
from nki_sim.program import Instr
from nki_sim.tensor import MemoryRegion, NkiTensor, Storage

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
        self.records: dict[object, list[tuple[Box, int, bool]]] = {}
        self.addresses: dict[Key, int] = {}
        self.live: dict[tuple[int, MemoryRegion], dict[Key, tuple[int, int]]] = {}
        self.cursor: dict[tuple[int, MemoryRegion], int] = {}
        self.met = 0  # the event in which the cores last met: what one did before that, the other waits for

    def __call__(self, core: int, instr: Instr, located: dict[int, int]) -> None:
        if id(instr) not in self.costs:
            self.costs[id(instr)] = cost(instr, self.model)
        number = len(self.events)
        event = Event(core, instr, self.costs[id(instr)])
        event.after.update(self.numbers[id(p)] for p in instr.after if id(p) in self.numbers)
        meeting = instr.op in MEETINGS
        if meeting and core == 1:
            event.after.add(number - 1)  # the other core's half, which ran just before
        self.events.append(event)
        self.numbers[id(instr)] = number
        for view in instr.reads:
            self._access(event, number, view, located, meeting)
        for view in instr.writes:
            self._access(event, number, view, located, True)
        if meeting and core == 1:  # the first half waits for what this one waits for
            self.events[number - 1].after.update(event.after - {number - 1}, self.last.get(event.queue, ()))
            self.met = number
        self.last[event.queue] = {number}
        if instr.op in ("register_load", "register_move"):
            self.registers[core, instr.args["dst"].number] = number

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
            elif (event.core, source.number) in self.registers:
                event.after.add(self.registers[event.core, source.number])
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
        kept = [(box, number, write)]
        for record in self.records.get(key, ()):
            (e, f, g, h), other, wrote = record
            there = self.events[other]
            if e < b and a < f and g < d and c < h and (there.core == event.core or other <= self.met):
                if (write or wrote) and other != number:
                    event.after.add(other)
                same_queue = not wrote and there.queue == event.queue
                if (write or same_queue) and a <= e and f <= b and c <= g and h <= d:
                    continue  # what comes later waits for this access instead
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
    """Set each event's start and end; the last end, in ns. Of the instructions at the head of their queues, the one that can
    start first does."""
    queues: dict[Queue, list[int]] = {}
    for number in reversed(range(len(events))):
        queues.setdefault(events[number].queue, []).append(number)
    free: dict[Queue, float] = {}  # when an engine, a ring or (core, "dma"), the shared bandwidth, is free
    done: dict[int, float] = {}
    while queues:
        ready: list[tuple[float, float, Queue]] = []
        for queue, numbers in queues.items():
            event = events[numbers[-1]]
            if all(n in done for n in event.after):
                waits = [free.get(queue, 0.0), *(done[n] for n in event.after)]
                shared = free.get((event.core, event.instr.engine), 0.0)
                ready.append((max(*waits, shared), max(waits), queue))  # DMA takes what has waited longest
        start, _, queue = min(ready)  # never empty: dependencies point backwards
        number = queues[queue].pop()
        event = events[number]
        if event.cost.issue and event.cost.issue[1]:  # who generates the descriptors does so while others move
            engine, ns = (event.core, event.cost.issue[0]), event.cost.issue[1]
            free[engine] = max(free.get(engine, 0.0), *(done[n] for n in event.after), 0.0) + ns
            start = max(start, free[engine])
        event.start, event.end = start, start + event.cost.ns
        free[queue] = free[event.core, event.instr.engine] = event.end
        event.end += model.dma_latency_ns if event.instr.engine == "dma" else 0.0
        done[number] = event.end
        if not queues[queue]:
            del queues[queue]
    return max(done.values(), default=0.0)
