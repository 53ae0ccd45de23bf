"""Device memory of all ranks: the peak since the last look, on which rank, of how much; a warning before it
runs out.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torchtitan.components.metrics import DeviceMemoryMonitor
from torchtitan.tools import utils

__all__ = ["MemoryPeaks", "MemoryWatch"]

log = logging.getLogger(__name__)

WARN_AT = 0.9
"""Share of a device's memory over which a peak is warned about: what is left goes to fragments and longer steps."""


@dataclass(frozen=True)
class MemoryPeaks:
    """Peaks in GiB by rank. NaN for a device that reports none."""

    by_rank: list[float]
    capacity: float

    @property
    def rank(self) -> int:
        """The rank with the highest peak."""
        return max(range(len(self.by_rank)), key=lambda rank: self.by_rank[rank])

    @property
    def highest(self) -> float:
        """The highest peak of any rank, in bytes."""
        return self.by_rank[self.rank]

    def record(self) -> dict[str, Any]:
        """Return the figures for metrics.jsonl; None where nothing is known."""
        return {
            "memory_gib": None if math.isnan(self.highest) else self.highest,
            "memory_rank": self.rank,
            "memory_capacity_gib": self.capacity,
            "memory_gib_by_rank": [None if math.isnan(peak) else round(peak, 3) for peak in self.by_rank],
        }


class MemoryWatch:
    """Reads peaks through TorchTitan's monitor and gathers them. `look` is collective."""

    def __init__(self, monitor: DeviceMemoryMonitor, *, warns: bool) -> None:
        self.monitor = monitor
        if not monitor.device_capacity:
            # TorchTitan divides by it: a share of an unknown capacity is 0 %.
            monitor.device_capacity = math.inf
        self.warns = warns
        self.warned = False

    def look(self) -> MemoryPeaks:
        """Every rank's peak since the monitor was reset.

        Warns once, when the highest is over WARN_AT of the capacity.
        """
        utils.device_module.synchronize()  # Neuron's statistics mean something only after this
        stats = self.monitor.get_peak_stats()
        known = [peak for peak in (stats.max_reserved_gib, stats.max_active_gib) if peak >= 0]
        # The largest: torch-neuronx reports 0 reserved bytes always, and those in use.
        mine = torch.tensor([max(known, default=float("nan"))], dtype=torch.float32, device=utils.device_type)
        peaks = mine.new_empty(dist.get_world_size())
        dist.all_gather_single(peaks, mine)
        found = MemoryPeaks(peaks.tolist(), self.monitor.device_capacity_gib)
        # Neuron may report 0 as its capacity: then there is nothing to warn of.
        if self.warns and not self.warned and found.capacity > 0 and found.highest > WARN_AT * found.capacity:
            self.warned = True
            log.warning(
                "device memory peaked at %.2f of %.2f GiB (%.0f%%) on rank %d: the next longer step may not fit. Lower "
                "training.local_batch_size or seq_len, save less (activation_checkpoint:full), or shard over more "
                "ranks.",
                found.highest,
                found.capacity,
                100 * found.highest / found.capacity,
                found.rank,
            )
        return found
