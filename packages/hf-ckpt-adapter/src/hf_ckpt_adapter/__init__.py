"""Qwen3 checkpoints between Hugging Face safetensors and TorchTitan: streamed, atomic, provable."""

from .convert import convert, export_step
from .mapping import Layout, read_names, write_names
from .plan import Options
from .report import Report
from .sources import open_source
from .states import Converted, convert_state

__all__ = [
    "Converted",
    "Layout",
    "Options",
    "Report",
    "convert",
    "convert_state",
    "export_step",
    "open_source",
    "read_names",
    "write_names",
]
