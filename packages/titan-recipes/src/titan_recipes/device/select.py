"""Choose the device once, and tell TorchTitan: the only place that touches TorchTitan from outside.

TorchTitan 0.3.0 decides its device when `torchtitan.tools.utils` is imported and most of its modules copy the answer,
so `set_device` has to run before any of them is imported.
"""

import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

from ..errors import UserError
from .cpu import CpuModule

__all__ = ["DEVICES", "choose_device", "set_device"]

log = logging.getLogger(__name__)

DEVICES = ("auto", "neuron", "cuda", "cpu")

_INSTALL = {
    "neuron": (
        "torch-neuronx is not usable here. On a Trainium instance start from the Neuron DLAMI or container, which "
        "brings\n"
        "torch-neuronx 2.14.3 for torch 2.14 (Neuron SDK 2.33); see 'On a Neuron host' in the README. PyPI's package "
        "of\n"
        "that name is an empty placeholder."
    ),
    "cuda": "Install a CUDA driver and a CUDA build of torch, or pass --device cpu.",
}


def choose_device(asked: str) -> str:
    """Resolve `auto` to neuron, cuda or cpu; check that an asked-for device is there. Never falls back in silence.

    Raises UserError, saying what to install, when the asked-for device is absent.
    """
    import torch

    if asked not in DEVICES:
        raise UserError(f"--device {asked!r} is unknown; choose one of {', '.join(DEVICES)}.")
    if asked == "cpu":
        return "cpu"
    present = {"neuron": _neuron_available(torch), "cuda": torch.cuda.is_available()}
    if asked == "auto":
        return next((name for name, there in present.items() if there), "cpu")
    if not present[asked]:
        raise UserError(f"--device {asked} was asked for, but torch sees no {asked} device.\n{_INSTALL[asked]}")
    return asked


def _neuron_available(torch: ModuleType) -> bool:
    """True when torch-neuronx is real (not the placeholder) and sees a core."""
    if importlib.util.find_spec("torch_neuronx") is None:
        return False
    module = getattr(torch, "neuron", None)
    return module is not None and bool(module.is_available())


def set_device(device: str) -> list[str]:
    """Point TorchTitan at `device` and return a line for each attribute that was set. Idempotent.

    Must run in each rank before TorchTitan's other modules are imported; AssertionError otherwise.
    """
    import torch
    from torchtitan.tools import utils

    module: Any = CpuModule() if device == "cpu" else getattr(torch, device)
    if utils.device_type != device or (device == "cpu" and not isinstance(utils.device_module, CpuModule)):
        late = sorted(
            {"torchtitan.distributed", "torchtitan.trainer", "torchtitan.components.metrics"} & sys.modules.keys()
        )
        assert not late, f"set_device({device!r}) came after {late} had copied the device {utils.device_type!r}"
        utils.device_type = device
        utils.device_module = module
    changes = [
        f"torchtitan.tools.utils.device_type = {device!r}",
        f"torchtitan.tools.utils.device_module = {utils.device_module.__name__}",
    ]
    for line in changes:
        log.debug("device: set %s", line)
    return changes
