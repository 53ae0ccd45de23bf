"""Machines that can be emulated: logical cores at LNC=2, and memory of each.

Source: AWS Neuron documentation 2.32, instance pages. Four HBM banks of 24 GiB a chip, each shared by two physical
cores.
"""

from dataclasses import dataclass

__all__ = ["INSTANCES", "Instance", "instance_named"]

GIB = 1 << 30


@dataclass(frozen=True)
class Instance:
    """What one host has.

    Attributes:
        cores: logical NeuronCores at LNC=2.
        core_bytes: device memory of a logical core, bytes.
    """

    cores: int
    core_bytes: int


INSTANCES = {
    "trn2.3xlarge": Instance(cores=4, core_bytes=24 * GIB),
    "trn2.48xlarge": Instance(cores=64, core_bytes=24 * GIB),
    "trn2u.48xlarge": Instance(cores=64, core_bytes=24 * GIB),
}


def instance_named(name: str) -> Instance:
    """The instance of that name. Raises ValueError, with the names there are."""
    if name not in INSTANCES:
        raise ValueError(f"instance {name!r} is not known; choose one of {', '.join(INSTANCES)}")
    return INSTANCES[name]
