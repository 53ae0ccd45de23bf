"""A real PyTorch device named `neuron` on CPU memory, as strict as the public sources say Trainium is. Emulated
throughout.

    import neuron_emu
    neuron_emu.enable(cores=4, instance="trn2.48xlarge")
    torch.ones(2, device="neuron")
    print(neuron_emu.report())

or, with no change to a program, NEURON_EMU=1 in its environment. Importing this package does nothing.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuron_emu.nki import set_reference as set_reference
    from neuron_emu.report import Count as Count
    from neuron_emu.report import counts as counts
    from neuron_emu.report import report as report
    from neuron_emu.report import reset_counts as reset_counts
    from neuron_emu.rules import RULES as RULES
    from neuron_emu.rules import Mode as Mode
    from neuron_emu.start import enable as enable
    from neuron_emu.start import is_enabled as is_enabled
    from neuron_emu.switches import relax as relax
    from neuron_emu.switches import relaxed as relaxed
    from neuron_emu.switches import set_compile_delay as set_compile_delay
    from neuron_emu.switches import set_rule as set_rule

_HOMES = {
    "enable": "start",
    "is_enabled": "start",
    "RULES": "rules",
    "Mode": "rules",
    "relax": "switches",
    "relaxed": "switches",
    "set_rule": "switches",
    "set_compile_delay": "switches",
    "Count": "report",
    "counts": "report",
    "report": "report",
    "reset_counts": "report",
    "set_reference": "nki",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"neuron_emu.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'neuron_emu' has no attribute {name!r}")


def _autoload() -> None:
    """What `import torch` calls, by the entry point torch.backends: nothing, unless NEURON_EMU says otherwise.

    NEURON_EMU=1 emulates with the defaults; NEURON_EMU=cores=4,instance=trn2.3xlarge says how.
    """
    asked = os.environ.get("NEURON_EMU", "")
    if asked in ("", "0"):
        return
    from neuron_emu.start import enable, options_of

    enable(**options_of(asked))
