"""A stand-in for the device module that TorchTitan expects of an accelerator, on a CPU.

`torch.cpu` lacks calls that TorchTitan makes (memory statistics, a device count that is not None, and others).
"""

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["CpuModule", "process_memory_bytes"]


class CpuModule(ModuleType):
    """`torch.cpu` plus the calls that TorchTitan makes of an accelerator's module. Memory is this process's RSS."""

    def __init__(self) -> None:
        super().__init__("titan_recipes.device.cpu.CpuModule")

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        """Return 1: every rank has the whole host as torch.device("cpu", 0)."""
        return 1  # every rank has the whole host: torch.device("cpu", 0)

    def current_device(self) -> int:
        """Return 0, the only one."""
        return 0

    def set_device(self, device: "torch.device | int") -> None:
        """Do nothing: there is one device."""
        pass

    def synchronize(self, device: "torch.device | int | None" = None) -> None:
        """Do nothing: a CPU runs in order."""
        pass

    def get_device_name(self, device: "torch.device | int | None" = None) -> str:
        """Return the name that TorchTitan prints."""
        return "CPU"

    def get_device_properties(self, device: "torch.device | int | None" = None) -> SimpleNamespace:
        """Return name and memory in bytes, as an accelerator's properties have them."""
        return SimpleNamespace(name="CPU", total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: "torch.device | int | None" = None) -> dict[str, int]:
        """Return this process's memory under the names of an accelerator's statistics."""
        rss = process_memory_bytes()
        return {
            "active_bytes.all.peak": rss,
            "reserved_bytes.all.peak": rss,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: "torch.device | int | None" = None) -> None:
        """Do nothing: the host keeps no peak to reset."""
        pass

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""
        pass


def process_memory_bytes() -> int:
    """Resident memory of this process in bytes: now where /proc tells, else the peak."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
