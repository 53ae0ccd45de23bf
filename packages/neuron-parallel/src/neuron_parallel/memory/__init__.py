"""Bytes of one logical core, moment by moment through a training step, from formulas alone.

    report = core_memory(plan, shape, training)
    report.peak.bytes, report.peak.where
    print(report.peak.table())                  # every tensor group with its formula

`peak.py` answers the questions of others. What it needs, from top to bottom: `timeline.py` lists the moments of a step,
`stage.py` what a pipeline stage consists of, `lifetimes.py` which tensors live when, `layers.py` and `experts.py` which
operations a layer has, `autograd.py` what they keep, `fsdp_units.py` and `fsdp_buffers.py` what FSDP2 gathers and
reduces.
"""

import sys
from types import ModuleType
from typing import Any

from neuron_parallel.memory.peak import ACCURACY, core_memory, device_allowance, least_bytes, peak_bytes
from neuron_parallel.memory.snapshot import PARTS, Memory, Snapshot

__all__ = ["ACCURACY", "PARTS", "Memory", "Snapshot", "core_memory", "device_allowance", "least_bytes", "peak_bytes"]

_RENAMED = "the function neuron_parallel.memory is now neuron_parallel.core_memory"


def __getattr__(name: str) -> Any:
    if name == "memory":
        raise ImportError(_RENAMED, name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(ModuleType):
    """This package, which says the new name to callers of the function that had its name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(_RENAMED)


sys.modules[__name__].__class__ = _Package
