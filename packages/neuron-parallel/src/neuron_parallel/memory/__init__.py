"""Bytes of one logical core, moment by moment through a training step, from formulas alone.

`peak.py` has the questions that others ask; the files below it are read in the order timeline, layers, autograd, FSDP's.
"""

from neuron_parallel.memory.peak import core_memory, device_allowance, least_bytes, peak_bytes
from neuron_parallel.memory.snapshot import PARTS, Memory, Snapshot

__all__ = ["PARTS", "Memory", "Snapshot", "core_memory", "device_allowance", "least_bytes", "peak_bytes"]
