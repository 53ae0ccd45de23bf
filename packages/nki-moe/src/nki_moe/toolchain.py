"""The language kernels are written in: AWS's `nki`, or nki-sim where NKI_MOE_BACKEND=sim asks for it.

Imported by the kernels and by nothing else; importing nki_moe needs neither.
"""

from importlib import import_module
from typing import Any

from nki_moe.backend import choose

_NAME = "nki_sim" if choose("neuron") == "sim" else "nki"

nki: Any = import_module(_NAME)
nl: Any = import_module(f"{_NAME}.language")
nisa: Any = import_module(f"{_NAME}.isa")
