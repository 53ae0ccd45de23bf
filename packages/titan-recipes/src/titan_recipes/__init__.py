"""What joins the Qwen3 layers to TorchTitan. A recipe imports all that it uses from here.

    from titan_recipes import Trainer, native, TextDataLoader

Names are loaded when asked for, so that `titan_recipes.cli` stays light enough for `--help`. Which file holds what is
docs/architecture.md's to say.
"""

import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from . import moved

if TYPE_CHECKING:
    from .checkpoint.manager import StepCheckpoints
    from .data.documents import python_docs
    from .data.loader import TextDataLoader
    from .data.source import Source
    from .device.select import choose_device, set_device
    from .errors import UserError
    from .models.activation_checkpoint import SaveLinears
    from .models.native import native
    from .models.simple_fsdp import simple_fsdp
    from .models.spec import transformers, use_model
    from .moe.dispatchers import use_dispatcher
    from .moe.kernels import kernel
    from .moe.router import use_balance_loss
    from .preflight.rehearsal import rehearse
    from .train.metrics import RunMetrics
    from .train.trainer import Trainer

__all__ = [
    "RunMetrics",
    "SaveLinears",
    "Source",
    "StepCheckpoints",
    "TextDataLoader",
    "Trainer",
    "UserError",
    "choose_device",
    "kernel",
    "native",
    "python_docs",
    "rehearse",
    "set_device",
    "simple_fsdp",
    "transformers",
    "use_balance_loss",
    "use_dispatcher",
    "use_model",
]

_HOMES = {
    "RunMetrics": "train.metrics",
    "SaveLinears": "models.activation_checkpoint",
    "Source": "data.source",
    "StepCheckpoints": "checkpoint.manager",
    "TextDataLoader": "data.loader",
    "Trainer": "train.trainer",
    "UserError": "errors",
    "choose_device": "device.select",
    "kernel": "moe.kernels",
    "native": "models.native",
    "python_docs": "data.documents",
    "rehearse": "preflight.rehearsal",
    "set_device": "device.select",
    "simple_fsdp": "models.simple_fsdp",
    "transformers": "models.spec",
    "use_balance_loss": "moe.router",
    "use_dispatcher": "moe.dispatchers",
    "use_model": "models.spec",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("titan-recipes")
    if name not in _HOMES:
        raise AttributeError(moved.message(f"{__name__}.{name}") or f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


if not any(isinstance(finder, moved.MovedModules) for finder in sys.meta_path):
    sys.meta_path.append(moved.MovedModules())
