"""Qwen3 checkpoints between Hugging Face safetensors and TorchTitan: streamed, atomic, provable.

Names are loaded when asked for, so that `hf-ckpt --help` needs no torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compare import diff
    from .convert import convert_checkpoint, export_step
    from .dcp_reader import CheckpointReader
    from .names.read import read_names
    from .names.table import Layout
    from .names.write import write_names
    from .options import Options
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

__version__ = "0.1.0"

_HOMES = {
    "CheckpointReader": "dcp_reader",
    "Converted": "states",
    "Layout": "names.table",
    "Options": "options",
    "Report": "report",
    "convert_checkpoint": "convert",
    "convert_state": "states",
    "diff": "compare",
    "export_step": "convert",
    "open_source": "sources",
    "read_names": "names.read",
    "write_names": "names.write",
}

# Where a module of an earlier version is now.
_MOVED = {
    "dcp_io": "formats.dcp_read",
    "dcp_records": "formats.dcp_records",
    "dcp_write": "formats.dcp_write",
    "mapping": "names",
    "publish": "formats.staging",
    "safetensors_io": "formats.safetensors",
    "tensors": "formats.tensors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Moved:
    """Asked last for a module that nobody has found: an old name is answered with the new one."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package, _, module = name.rpartition(".")
        if package == __name__ and module in _MOVED:
            raise ImportError(f"{name} is now {package}.{_MOVED[module]}", name=name)


sys.meta_path.append(_Moved)
