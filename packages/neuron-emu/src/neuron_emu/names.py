"""AWS's names, for programs that look for them: while emulation is enabled, and never before.

A finder on sys.meta_path makes `torch_neuronx` importable and known to importlib.metadata, with a version that ends in
"+emulated"; its entry point is how torch.compile finds the backend `neuron`, as it finds AWS's.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["VERSION", "install"]

VERSION = "2.14.3+emulated"
_ENTRY_POINTS = "[torch_dynamo_backends]\nneuron = neuron_emu.compile_backend:neuron\n"


class _EmulatedDistribution(Distribution):
    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {VERSION}\n"
        return _ENTRY_POINTS if filename == "entry_points.txt" else None

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


class _Finder(DistributionFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, origin="neuron-emu (emulated)") if name == "torch_neuronx" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        import torch

        from neuron_emu import nki

        module.__doc__ = "torch_neuronx, emulated by neuron-emu."
        module.__version__ = VERSION  # type: ignore[attr-defined]
        module.emulated = True  # type: ignore[attr-defined]
        module.nki_op, module.wrap_nki = nki.nki_op, nki.wrap_nki  # type: ignore[attr-defined]
        for name in ("synchronize", "device_count", "current_device", "set_device", "is_available", "empty_cache"):
            setattr(module, name, getattr(torch.neuron, name))  # type: ignore[attr-defined]

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        if context is None or context.name is None or context.name.lower().replace("_", "-") == "torch-neuronx":
            yield _EmulatedDistribution()


def install() -> None:
    """Make the names known. Once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
