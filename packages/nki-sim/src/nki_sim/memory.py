"""Where on-chip tensors live: capacity and high-water marks from lifetimes, and which explicit addresses overlap.

A tensor without an address occupies its bytes in every partition from its first use to its last; inside a dynamic loop it
lives for a pass, and one allocated outside lives through the loop. How the compiler packs is its own affair: the sum of
what is live at once is what any packing needs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nki_sim.errors import refuse
from nki_sim.limits import PARTITIONS, PSUM_BANK_BYTES, PSUM_BANKS, SBUF_BYTES, SBUF_RESERVED
from nki_sim.program import Block, CoreProgram, Loop
from nki_sim.tensor import MemoryRegion, Storage

__all__ = ["Usage", "plan"]

CAPACITY = {MemoryRegion.sbuf: SBUF_BYTES - SBUF_RESERVED, MemoryRegion.psum: PSUM_BANKS * PSUM_BANK_BYTES}


@dataclass(frozen=True)
class Usage:
    """High-water marks in bytes per partition, of the core that needs most."""

    sbuf: int
    psum: int


def plan(cores: list[CoreProgram]) -> Usage:
    """Check capacity, note overlapping explicit addresses, and say how much is used."""
    marks = {}
    for region, capacity in CAPACITY.items():
        marks[region] = 0
        for core in cores:
            placed = [s for s in _storages(core.block) if s.buffer is region and s.address is not None]
            _overlaps(placed)
            top = max((s.address[1] + s.pitch for s in placed if s.address), default=0)
            live, peak = _peak(core.block, region)
            used = max(peak, top)
            marks[region] = max(marks[region], used)
            if used > capacity:
                biggest = sorted(live, key=lambda s: -s.pitch)[:4]
                refuse(
                    "capacity",
                    f"{region.value} needs {used} bytes per partition and has {capacity}"
                    + (f" ({SBUF_RESERVED} of {SBUF_BYTES} are reserved)" if region is MemoryRegion.sbuf else "")
                    + "; live at the peak: "
                    + "; ".join(f"{s.pitch} B {s}" for s in biggest)
                    + ". Use smaller tiles, or shorten how long they are needed",
                    biggest[0].where if biggest else None,
                )
    return Usage(marks[MemoryRegion.sbuf], marks[MemoryRegion.psum])


def check_address(storage: Storage) -> None:
    """An explicit address must lie inside its memory."""
    assert storage.address is not None
    part, byte = storage.address
    capacity = SBUF_BYTES if storage.buffer is MemoryRegion.sbuf else CAPACITY[MemoryRegion.psum]
    if not (0 <= part and part + storage.shape[0] <= PARTITIONS and 0 <= byte and byte + storage.pitch <= capacity):
        refuse(
            "address",
            f"{storage} at (partition {part}, byte {byte}) with {storage.pitch} bytes per partition leaves {storage.buffer.value} ({PARTITIONS} x {capacity})",
        )


def _storages(block: Block) -> Iterator[Storage]:
    yield from block.storages
    for item in block.items:
        if isinstance(item, Loop):
            yield from _storages(item.body)


def _peak(block: Block, region: MemoryRegion) -> tuple[list[Storage], int]:
    """What is live at the worst moment, and its bytes per partition."""
    mine = [s for s in block.storages if s.buffer is region and s.first is not None and s.address is None]
    starts: dict[int, list[Storage]] = {}
    for s in mine:
        starts.setdefault(s.first or 0, []).append(s)
    live: dict[int, Storage] = {}
    total = best = 0
    worst: list[Storage] = []
    points = sorted(starts.keys() | {i for i, item in enumerate(block.items) if isinstance(item, Loop)})
    for at in points:
        for key in [k for k, s in live.items() if (s.last or 0) < at]:
            total -= live.pop(key).pitch
        for s in starts.get(at, ()):
            live[id(s)] = s
            total += s.pitch
        item = block.items[at]
        inner, extra = _peak(item.body, region) if isinstance(item, Loop) else ([], 0)
        if total + extra > best:
            best, worst = total + extra, [*live.values(), *inner]
    return worst, best


def _overlaps(placed: list[Storage]) -> None:
    """Link storages that share bytes, by a sweep over their first byte."""
    active: list[Storage] = []
    for s in sorted(placed, key=lambda s: s.address[1] if s.address else 0):
        part, byte = s.address or (0, 0)
        active = [o for o in active if (o.address or (0, 0))[1] + o.pitch > byte]
        for o in active:
            other = (o.address or (0, 0))[0]
            if part < other + o.shape[0] and other < part + s.shape[0] and o not in s.aliases:
                s.aliases.append(o)
                o.aliases.append(s)
        active.append(s)
