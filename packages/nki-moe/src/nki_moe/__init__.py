"""Grouped expert MLP and RoPE for Trainium, forward and backward, as ordinary torch operators.

Names are loaded when asked for: `nki_moe.check` answers without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nki_moe.backend import Provider
    from nki_moe.experts.op import grouped_mlp, routed_mlp
    from nki_moe.limits import Fit, check, check_rope
    from nki_moe.rotary.op import rope

__all__ = ["Fit", "Provider", "check", "check_rope", "grouped_mlp", "rope", "routed_mlp"]

_HOMES = {
    "Fit": "limits",
    "Provider": "backend",
    "check": "limits",
    "check_rope": "limits",
    "grouped_mlp": "experts.op",
    "rope": "rotary.op",
    "routed_mlp": "experts.op",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"nki_moe.{_HOMES[name]}"), name)
    return value
