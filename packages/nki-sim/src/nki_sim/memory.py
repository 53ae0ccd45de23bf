"""Where on-chip tensors live: capacity and high-water marks from lifetimes, and which explicit addresses overlap.

A tensor without an address occupies its bytes from its first use to its last; inside a dynamic loop it lives for a pass,
and one from outside lives through the loop. How the compiler packs is its own affair: the sum of what is live at once is what
any packing needs, where tensors of up to 32 or 64 partitions take a quarter or half of them (they may stand side by side).
"""

from typing import NamedTuple

from nki_sim.errors import need, refuse
from nki_sim.limits import (
    PARTITIONS,
    PSUM_ALIGN,
    PSUM_BANK_BYTES,
    PSUM_BANKS,
    SBUF_BYTES,
    SBUF_RESERVED,
    start_partitions,
)
from nki_sim.program import Block, CoreProgram, Loop
from nki_sim.tensor import MemoryRegion, Storage

CAPACITY = {MemoryRegion.sbuf: SBUF_BYTES - SBUF_RESERVED, MemoryRegion.psum: PSUM_BANKS * PSUM_BANK_BYTES}


class Usage(NamedTuple):
    """High-water marks in bytes per partition, of the core that needs most."""

    sbuf: int
    psum: int


def plan(cores: list[CoreProgram]) -> Usage:
    """Check capacity, link tensors whose explicit addresses overlap, and say how much is used."""
    return Usage(*(max(_plan(core.block, region) for core in cores) for region in CAPACITY))


def _plan(block: Block, region: MemoryRegion) -> int:
    placed = [s for b in block.blocks() for s in b.storages if s.buffer is region and s.address is not None]
    _overlaps(placed)
    live, used = _peak(block, region)
    used = max([used, *(s.address[1] + s.pitch for s in placed if s.address)])
    if used > CAPACITY[region]:
        peak = sorted(live, key=lambda s: -s.pitch)[:4]
        found = f"{region.value} needs {used} bytes per partition of {CAPACITY[region]}; use smaller tiles"
        most = "; ".join(f"{s.pitch} B {s}" for s in peak)
        refuse("capacity", f"{found}. Live at the peak: {most}", peak[0].where if peak else None)
    return used


def check_address(storage: Storage) -> None:
    """A tensor must fit its memory, at its address when it has one."""
    part, byte = storage.address or (0, 0)
    size = SBUF_BYTES if storage.buffer is MemoryRegion.sbuf else CAPACITY[MemoryRegion.psum]
    fits = 0 <= part <= PARTITIONS - storage.shape[0] and 0 <= byte <= size - storage.pitch
    found, rule = "{} of {} bytes per partition at {} leaves {} x {}", "address" if storage.address else "capacity"
    need(fits, rule, found, storage, storage.pitch, (part, byte), PARTITIONS, size)
    even = storage.buffer is not MemoryRegion.psum or byte % PSUM_ALIGN == 0
    need(even, "alignment", "{} is at byte {}; PSUM addresses are multiples of {}", storage, byte, PSUM_ALIGN)


def _peak(block: Block, region: MemoryRegion) -> tuple[list[Storage], int]:
    """What is live at the worst moment, and its bytes per partition."""
    starts: dict[int, list[Storage]] = {}
    for s in block.storages:
        if s.buffer is region and s.first is not None and s.address is None:
            starts.setdefault(s.first, []).append(s)
    live: list[Storage] = []
    best: tuple[list[Storage], int] = ([], 0)
    loops = {at for at, item in enumerate(block.items) if isinstance(item, Loop)}
    for at in sorted(starts.keys() | loops):
        live = [s for s in live if s.last is not None and s.last >= at] + starts.get(at, [])
        item = block.items[at]
        inner, extra = _peak(item.body, region) if isinstance(item, Loop) else ([], 0)
        total = extra + sum(s.pitch // len(start_partitions(s.shape[0])) for s in live)
        if total > best[1]:
            best = ([*live, *inner], total)
    return best


def _overlaps(placed: list[Storage]) -> None:
    """Link storages that share bytes, by a sweep over their first byte."""
    places = sorted(((*s.address, s) for s in placed if s.address), key=lambda p: p[1])
    open_: list[tuple[int, int, Storage]] = []
    for part, byte, s in places:
        open_ = [p for p in open_ if p[1] + p[2].pitch > byte]
        for other_part, _, other in open_:
            if part < other_part + other.shape[0] and other_part < part + s.shape[0]:
                s.aliases.append(other)
                other.aliases.append(s)
        open_.append((part, byte, s))
