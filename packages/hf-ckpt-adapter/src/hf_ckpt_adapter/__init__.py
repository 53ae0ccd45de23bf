"""Qwen3 checkpoints between Hugging Face safetensors and TorchTitan: streamed, atomic, provable."""

from .convert import export_step, open_source
from .mapping import Layout, read_names, write_names
from .plan import Options
from .report import Report
from .states import Converted, convert_state

__all__ = [
    "Converted",
    "Layout",
    "Options",
    "Report",
    "convert_state",
    "export_step",
    "open_source",
    "read_names",
    "write_names",
]
