"""Readings of NKI wider than what its documents promise, each off unless a user names it: NKI_MOE_ASSUME=name,name.

The kernels take the narrowest reading of AWS's pages. A user who has seen a wider one to hold on his device may name
it here. docs/kernels.md lists what each rests on.
"""

import os

__all__ = ["KNOWN", "VARIABLE", "assumed"]

VARIABLE = "NKI_MOE_ASSUME"
KNOWN = {
    "gather-transpose": "DMA transposes rows that it gathers by an index in SBUF, at the rate of its other transposes; "
    "saves the Tensor Engine the transposition of rows and of forward's weights (bfloat16)",
}


def assumed(name: str) -> bool:
    """Whether the user names this assumption.

    Raises:
        ValueError: the variable holds a name that is none of KNOWN.
    """
    named = {n.strip() for n in os.environ.get(VARIABLE, "").split(",")} - {""}
    if unknown := sorted(named - KNOWN.keys()):
        raise ValueError(f"{VARIABLE} names {', '.join(unknown)}; known are: {', '.join(KNOWN)}. Unset it for none")
    return name in named
