"""When instructions run: in order on each engine, after what they depend on, with DMA latency and shared DMA bandwidth.

Dependencies are found on the addresses the tensors occupy, so a tensor that reuses another's bytes waits for its last
reader. Tensors without an address get one as they first appear, walking round the memory, which reuses what was freed longest
ago; a tensor of a dynamic loop keeps its address, as the loop's code does.
"""

from dataclasses import dataclass, field

from nki_sim.cost import Cost, Model, cost
from nki_sim.limits import PSUM_BANK_BYTES
from nki_sim.memory import CAPACITY
from nki_sim.program import Instr
from nki_sim.tensor import MemoryRegion, NkiTensor, Storage

__all__ = ["Event", "Recorder", "schedule"]

PAGE = 2048  # bytes of a partition whose accesses are kept together
Box = tuple[int, int, int, int]  # partitions or rows [0, 1), bytes [2, 3)


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
    def queue(self) -> tuple[int, str]:
        """What issues it in order: an engine, or a DMA ring of its direction."""
        return self.core, self.instr.engine if self.instr.engine != "dma" else f"dma {self.cost.direction}"


class _Space:
    """Addresses for tensors that were given none, in one memory of one core."""

    def __init__(self, region: MemoryRegion) -> None:
        self.region, self.capacity, self.at = region, CAPACITY[region], 0
        self.used: dict[tuple[int | str, int], tuple[int, int]] = {}

    def place(self, storage: Storage) -> int:
        size = storage.pitch
        for lap in range(2):
            start = self.at if lap == 0 else 0
            while start + size <= self.capacity:
                if (
                    self.region is MemoryRegion.psum
                    and size <= PSUM_BANK_BYTES
                    and start % PSUM_BANK_BYTES + size > PSUM_BANK_BYTES
                ):
                    start += PSUM_BANK_BYTES - start % PSUM_BANK_BYTES
                    continue
                hit = max((b for a, b in self.used.values() if a < start + size and start < b), default=None)
                if hit is None:
                    break
                start = hit
            if start + size <= self.capacity:
                self.at = start + size
                break
        else:
            start = 0  # fragmented: the sum fits (memory.plan checked), the order does not; share and wait
        self.used[storage.key] = (start, start + size)
        return start


class Recorder:
    """Observes a machine: events with their dependencies, in the order they ran."""

    def __init__(self, model: Model, written: frozenset[tuple[int | str, int]]) -> None:
        self.model, self.written = model, written
        self.events: list[Event] = []
        self.spaces: dict[tuple[int, MemoryRegion], _Space] = {}
        self.addresses: dict[tuple[int | str, int], int] = {}
        self.pages: dict[object, list[tuple[Box, int, bool]]] = {}
        self.costs: dict[int, Cost] = {}
        self.registers: dict[tuple[int, int], int] = {}  # (core, register) -> the event that set it
        self.numbers: dict[int, int] = {}  # id(instr) -> its latest event

    def __call__(self, core: int, instr: Instr, located: dict[int, int]) -> None:
        if id(instr) not in self.costs:
            self.costs[id(instr)] = cost(instr, self.model)
        number = len(self.events)
        event = Event(core, instr, self.costs[id(instr)])
        self.events.append(event)
        event.after.update(self.numbers[id(p)] for p in instr.after if id(p) in self.numbers)
        self.numbers[id(instr)] = number
        for view in instr.reads:
            self._access(event, number, view, located, False)
        for view in instr.writes:
            self._access(event, number, view, located, True)
        if instr.op in ("register_load", "register_move"):
            self.registers[core, instr.args["dst"].number] = number
        if instr.op in ("core_barrier", "sendrecv"):
            other = self.events[-2] if number and core == 1 else None
            if other is not None:
                event.after.add(number - 1)
            for view in instr.reads:
                self._access(event, number, view, located, True)

    def freed(self, storage: Storage) -> None:
        """The machine dropped a tensor: its bytes may be reused."""
        if storage.buffer.on_chip and storage.address is None:
            space = self.spaces.get((int(storage.key[0]), storage.buffer))
            if space:
                space.used.pop(storage.key, None)

    def _access(self, event: Event, number: int, view: NkiTensor, located: dict[int, int], write: bool) -> None:
        storage, size = view.storage, view.dtype.itemsize
        if view.indirect_index is not None:
            source = view.indirect_index.source
            if isinstance(source, NkiTensor):
                self._access(event, number, source, located, False)
            elif (event.core, source.number) in self.registers:
                event.after.add(self.registers[event.core, source.number])
        vector = view.indirect_index is not None and view.indirect_index.kind == "vector"
        offset = located.get(id(view), view.offset) * size
        pitch = storage.pitch
        row, column = divmod(offset, pitch)
        rows, last = 1, size
        for stride, n in zip((s * size for s in view.strides), view.shape, strict=True):
            if stride >= pitch and stride % pitch == 0:
                rows += (n - 1) * (stride // pitch)
            else:
                last += (n - 1) * stride
        if vector or column + last > pitch:  # rows chosen at run time, or wrapping round: all of them
            box = (
                (0, storage.nbytes // pitch, 0, pitch)
                if vector
                else (row, row + rows + (column + last) // pitch, 0, pitch)
            )
        else:
            box = (row, row + rows, column, column + last)
        if storage.buffer.on_chip:
            part, byte = storage.address or (0, self._address(event.core, storage))
            box = (box[0] + part, box[1] + part, box[2] + byte, box[3] + byte)
            keys: list[object] = [
                (event.core, storage.buffer, page) for page in range(box[2] // PAGE, (box[3] - 1) // PAGE + 1)
            ]
        elif storage.key in self.written:
            keys = [storage.key]
        else:
            return
        for key in keys:
            self._depend(event, number, key, box, write)

    def _address(self, core: int, storage: Storage) -> int:
        if storage.key not in self.addresses:
            space = self.spaces.setdefault((core, storage.buffer), _Space(storage.buffer))
            self.addresses[storage.key] = space.place(storage)
        return self.addresses[storage.key]

    def _depend(self, event: Event, number: int, key: object, box: Box, write: bool) -> None:
        records = self.pages.setdefault(key, [])
        kept = []
        a, b, c, d = box
        for record in records:
            (e, f, g, h), other, wrote = record
            if e < b and a < f and g < d and c < h:
                if (write or wrote) and other != number:
                    event.after.add(other)
                if write and a <= e and f <= b and c <= g and h <= d:
                    continue  # everything later waits for this write instead
            kept.append(record)
        kept.append((box, number, write))
        self.pages[key] = kept


def schedule(events: list[Event], model: Model) -> float:
    """Set each event's start and end; the last end, in ns."""
    queues: dict[tuple[int, str], list[int]] = {}
    for number, event in enumerate(events):
        queues.setdefault(event.queue, []).append(number)
    heads = dict.fromkeys(queues, 0)
    free = dict.fromkeys(queues, 0.0)
    bandwidth: dict[int, float] = {}
    done: list[float | None] = [None] * len(events)
    while heads:
        best: tuple[float, tuple[int, str]] | None = None
        for queue, at in heads.items():
            event = events[queues[queue][at]]
            ready = free[queue]
            for before in event.after:
                end = done[before]
                if end is None:
                    break
                ready = max(ready, end)
            else:
                if event.instr.engine == "dma":
                    ready = max(ready, bandwidth.get(event.core, 0.0))
                if best is None or ready < best[0]:
                    best = (ready, queue)
        assert best is not None, "dependencies point backwards, so some head is always ready"
        start, queue = best
        number = queues[queue][heads[queue]]
        event = events[number]
        issue = event.cost.issue
        if issue is not None and issue[1]:  # the engine that generates the descriptors
            engine = (event.core, issue[0])
            start = max(start, free.get(engine, 0.0))
            free[engine] = start + issue[1]
            start += issue[1]
        event.start = start
        event.end = start + event.cost.ns
        free[queue] = event.end
        if event.instr.engine == "dma":
            bandwidth[event.core] = event.end
            event.end += model.dma_latency_ns
        done[number] = event.end
        heads[queue] += 1
        if heads[queue] == len(queues[queue]):
            del heads[queue]
    return max((e.end for e in events), default=0.0)
