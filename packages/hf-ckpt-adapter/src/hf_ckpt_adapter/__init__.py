"""Qwen3 checkpoints between Hugging Face safetensors and TorchTitan: streamed, atomic, provable.

Names are loaded when asked for, so that `hf-ckpt --help` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compare import diff
    from .convert import convert_checkpoint, export_step
    from .dcp_reader import CheckpointReader
    from .mapping import Layout, read_names, write_names
    from .plan import Options
    from .report import Report
    from .sources import open_source
    from .states import Converted, convert_state

__all__ = [
    "CheckpointReader",
    "Converted",
    "Layout",
    "Options",
    "Report",
    "convert_checkpoint",
    "convert_state",
    "diff",
    "export_step",
    "open_source",
    "read_names",
    "write_names",
]

_HOMES = {
    "CheckpointReader": "dcp_reader",
    "Converted": "states",
    "Layout": "mapping",
    "Options": "plan",
    "Report": "report",
    "convert_checkpoint": "convert",
    "convert_state": "states",
    "diff": "compare",
    "export_step": "convert",
    "open_source": "sources",
    "read_names": "mapping",
    "write_names": "mapping",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
