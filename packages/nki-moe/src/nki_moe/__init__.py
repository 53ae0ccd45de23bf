"""Grouped expert MLP and RoPE for Trainium, forward and backward, as ordinary torch operators.

Names are loaded when asked for: `nki_moe.check` answers without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nki_moe.api import grouped_mlp, rope, routed_mlp
    from nki_moe.backend import Provider
    from nki_moe.limits import Fit, check, check_rope

__all__ = ["Fit", "Provider", "check", "check_rope", "grouped_mlp", "rope", "routed_mlp"]

__version__ = "0.1.0"

_HOMES = {
    "Fit": "limits",
    "Provider": "backend",
    "check": "limits",
    "check_rope": "limits",
    "grouped_mlp": "api",
    "rope": "api",
    "routed_mlp": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"nki_moe.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
