"""Make `neuron` an emulated device of this process and of the ranks that it starts."""

import os
from importlib.util import find_spec

from ..errors import UserError

__all__ = ["emulate"]

VARIABLE = "NEURON_EMU"


def emulate(device: str) -> None:
    """Enable neuron-emu here, and let ranks find it: they are spawned, and `import torch` reads the variable.

    Raises UserError for another device than neuron, and without the package.
    """
    if device != "neuron":
        raise UserError(f"--emulate is for --device neuron; this run asked for {device}.")
    if find_spec("neuron_emu") is None:
        raise UserError("--emulate needs the package neuron-emu: pip install neuron-emu, or leave the option out.")
    os.environ.setdefault(VARIABLE, "1")
    import neuron_emu

    if not neuron_emu.is_enabled():
        from neuron_emu.start import options_of

        neuron_emu.enable(**options_of(os.environ[VARIABLE]))
