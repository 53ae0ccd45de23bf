"""Running kernels on nki-sim. A program is traced once for its shapes and constants, and then run on any values: a
kernel that let a routing into its program could not work here.
"""

from importlib import import_module
from typing import Any

from torch import Tensor

__all__ = ["run"]

_programs: dict[Any, Any] = {}


def run(kernel: Any, lnc: int, *tensors: Tensor, **constants: Any) -> Any:
    """What kernel[lnc](*tensors, **constants) returns."""
    nki = import_module("nki_sim")  # whichever language the kernels' modules were first imported in
    key = (kernel, lnc, *((tuple(t.shape), t.dtype) for t in tensors), *sorted(constants.items()))
    # What forward keeps of rows that no expert has stays unwritten, and unread.
    with nki.checks(record=("unwritten-output",)):
        if key not in _programs:
            _programs[key] = nki.trace(kernel[lnc], tensors, **constants)
        return _programs[key].run(*tensors, **constants).outputs
