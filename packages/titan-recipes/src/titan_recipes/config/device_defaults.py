"""Per-device settings that are not a recipe's business: one table, applied to the built config, each change reported.

What a device cannot do at all is refused here too, by name.
"""

import re
from dataclasses import dataclass
from typing import Any

from ..errors import UserError

__all__ = ["DEVICE_DEFAULTS", "Default", "apply_device_defaults"]


@dataclass(frozen=True)
class Default:
    """A field of TorchTitan's config that has only one sensible value on a device.

    Where `instead_of` is set, that is the only value which is replaced: any other is the user's own.
    """

    field: str
    value: Any
    reason: str
    instead_of: Any = None


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
        Default("compile.backend", "neuron", "inductor has no Neuron target"),
        # Public pre-release sources of torch-neuronx (April 2026): a watchdog enforces a group's limit, and a first
        # compilation takes minutes on each rank.
        Default("comm.init_timeout_seconds", 7200, "ranks compile before the first step", instead_of=300),
        Default("comm.train_timeout_seconds", 1800, "a new shape compiles within a step", instead_of=100),
    ),
}


LOW_PRECISION = re.compile(r"float8|fp8|mxfp|nvfp4", re.IGNORECASE)
"""Classes of TorchTitan's quantization components: Float8Linear, MXFP8Linear, NVFP4Linear and their experts."""


def apply_device_defaults(config: Any, device: str) -> list[str]:
    """Set the device's defaults on `config`; returns a line for each field that changed.

    Raises UserError for a model with float8, MX or NVFP4 layers on neuron.
    """
    if device == "neuron" and config.model_spec is not None:
        _refuse_low_precision(config.model_spec.model)
    changed = []
    for default in DEVICE_DEFAULTS[device]:
        *path, name = default.field.split(".")
        owner = config
        for part in path:
            owner = getattr(owner, part)
        value = getattr(owner, name)
        if value != default.value and (default.instead_of is None or value == default.instead_of):
            setattr(owner, name, default.value)
            changed.append(f"{default.field} = {default.value!r} ({default.reason})")
    return changed


def _refuse_low_precision(model: Any) -> None:
    from torchtitan.config import Configurable

    for name, part, _, _ in model.traverse(Configurable.Config, recurse=True):
        kind = type(part).__qualname__.removesuffix(".Config").rpartition(".")[2]
        if LOW_PRECISION.search(kind):
            raise UserError(
                f"The model's {name} is a {kind}: float8, MX and NVFP4 training need TorchAO kernels that neuron does "
                "not have (FP8 training is a private beta there).\nTrain in bfloat16: leave the quantization "
                "converter out of the recipe."
            )
