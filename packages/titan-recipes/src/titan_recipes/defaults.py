"""Per-device settings that are not a recipe's business: one table, applied to the built config, each change reported."""

from dataclasses import dataclass
from typing import Any

__all__ = ["DEVICE_DEFAULTS", "Default", "apply_device_defaults"]


@dataclass(frozen=True)
class Default:
    """A field of TorchTitan's config that has only one sensible value on a device."""

    field: str
    value: Any
    reason: str


_NO_CUDA_GRAPHS = Default("training.disable_cuda_graphs", True, "CUDA graphs exist on CUDA alone")
_NO_FLIGHT_RECORDER = Default("comm.trace_buf_size", 0, "the flight recorder records NCCL only")

DEVICE_DEFAULTS: dict[str, tuple[Default, ...]] = {
    "cuda": (),
    "cpu": (
        _NO_CUDA_GRAPHS,
        _NO_FLIGHT_RECORDER,
        Default("training.mixed_precision_param", "float32", "bf16 matmuls are slower than float32 on most CPUs"),
    ),
    "neuron": (
        _NO_CUDA_GRAPHS,
        _NO_FLIGHT_RECORDER,
        Default("optimizer.implementation", "foreach", "fused AdamW is a CUDA and CPU kernel"),
        Default("compile.backend", "neuron", "inductor has no Neuron target"),
    ),
}


def apply_device_defaults(config: Any, device: str) -> list[str]:
    """Set the device's defaults on `config`; returns a line for each field that changed."""
    changed = []
    for default in DEVICE_DEFAULTS[device]:
        *path, name = default.field.split(".")
        owner = config
        for part in path:
            owner = getattr(owner, part)
        if getattr(owner, name) != default.value:
            setattr(owner, name, default.value)
            changed.append(f"{default.field} = {default.value!r} ({default.reason})")
    return changed
