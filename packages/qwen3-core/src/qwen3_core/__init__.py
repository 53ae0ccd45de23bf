"""Every Qwen3, defined once: sizes, configuration, model, accounting.

`MODELS`, `Qwen3Config` and the accounting need no torch and load at once; the names that do are loaded at
first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qwen3_core.config import Qwen3Config, Yarn
from qwen3_core.models import MODELS

if TYPE_CHECKING:
    from qwen3_core.cache import KVCache
    from qwen3_core.generation import generate
    from qwen3_core.loss import next_token_targets, target_loss
    from qwen3_core.model import Qwen3ForCausalLM
    from qwen3_core.weights import from_hub, to_hub

__all__ = [
    "MODELS",
    "KVCache",
    "Qwen3Config",
    "Qwen3ForCausalLM",
    "Yarn",
    "from_hub",
    "generate",
    "next_token_targets",
    "target_loss",
    "to_hub",
]

__version__ = "0.1.0"

_NEEDS_TORCH = {
    "KVCache": "cache",
    "Qwen3ForCausalLM": "model",
    "from_hub": "weights",
    "generate": "generation",
    "next_token_targets": "loss",
    "target_loss": "loss",
    "to_hub": "weights",
}


def __getattr__(name: str) -> Any:
    if name == "token_loss":
        raise ImportError(
            f"{__name__}.token_loss is target_loss now. It never shifted: pass next_token_targets(tokens), not the "
            "tokens."
        )
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
