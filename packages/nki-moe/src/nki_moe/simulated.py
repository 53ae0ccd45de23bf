"""Running kernels on nki-sim. A program is traced once for its shapes and constants, and then run on any values: a
kernel that let a routing into its program could not work here.
"""

from importlib import import_module
from typing import Any

from torch import Tensor

__all__ = ["UNCURED", "run"]

# Rules of nki-sim that the expert kernels break until they are rewritten: loops that differ between the cores or run no
# pass, one register that bounds several loops, DMA transposes at run-time addresses.
UNCURED = ("lnc-trips", "zero-trip", "loop-bound-rewritten", "dynamic-dma-transpose")

_programs: dict[Any, Any] = {}


def run(kernel: Any, lnc: int, *tensors: Tensor, **constants: Any) -> Any:
    """What kernel[lnc](*tensors, **constants) returns."""
    nki = import_module("nki_sim")  # whichever language the kernels' modules were first imported in
    key = (kernel, lnc, *((tuple(t.shape), t.dtype) for t in tensors), *sorted(constants.items()))
    # What forward keeps has columns for any routing; those past the last expert's stay unwritten, and unread.
    with nki.checks(record=("unwritten-output", *UNCURED)):
        if key not in _programs:
            _programs[key] = nki.trace(kernel[lnc], tensors, **constants)
        return _programs[key].run(*tensors, **constants).outputs
