"""Plan a Trainium training run on a laptop: degrees, memory, step time, launch files. Needs nothing but Python.

The `figure` extra draws (matplotlib), the `mesh` extra makes DeviceMeshes (torch).
"""

import sys

from neuron_parallel.hardware import INSTANCES, Cluster, instance
from neuron_parallel.memory import core_memory
from neuron_parallel.model import ModelShape
from neuron_parallel.plan import Finding, ParallelPlan, Training, errors, validate
from neuron_parallel.search import suggest

__all__ = [
    "INSTANCES",
    "Cluster",
    "Finding",
    "ModelShape",
    "ParallelPlan",
    "Training",
    "core_memory",
    "errors",
    "instance",
    "suggest",
    "validate",
]

__version__ = "0.1.0"

# Where a module of an earlier version is now.
_MOVED = {
    "blocks": "memory.layers",
    "buffers": "memory.fsdp_buffers",
    "experts": "memory.experts",
    "figure": "memory.figure",
    "launch": "launch_files",
    "pieces": "memory.activations",
    "placement": "parameters",
    "quantity": "memory.quantity",
    "report": "memory.snapshot",
    "roofline": "step_time",
    "shape": "model",
    "stage": "memory.timeline",
    "symbols": "memory.symbols",
    "tape": "memory.autograd",
    "units": "memory.fsdp_units",
}


class _Moved:
    """Asked last for a module that nobody has found: an old name is answered with the new one."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package, _, module = name.rpartition(".")
        if package == __name__ and module in _MOVED:
            raise ImportError(f"{name} is now {package}.{_MOVED[module]}", name=name)


sys.meta_path.append(_Moved)
