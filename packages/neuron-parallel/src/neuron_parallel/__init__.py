"""Plan a Trainium training run on a laptop: degrees, memory, step time, launch files. Needs nothing but Python.

The `figure` extra draws (matplotlib), the `mesh` extra makes DeviceMeshes (torch).
"""

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
