"""The one decision: which implementation of the operators runs.

    NKI_MOE_BACKEND=torch   plain torch, on any device
    NKI_MOE_BACKEND=sim     the kernels, on nki-sim (slow, exact, on CPU)
    NKI_MOE_BACKEND=nki     the kernels, on Trainium through torch_neuronx

Unset, a `neuron` device gets `nki` and every other device `torch`. What was asked for and is missing is an error.

Whose kernels they are is the caller's argument: provider="own", or "nkilib" for AWS's nki-library, which has no torch
to run.
"""

import os
from importlib.util import find_spec
from typing import Literal, cast

__all__ = ["VARIABLE", "Backend", "Provider", "choose", "nkilib_home"]

VARIABLE = "NKI_MOE_BACKEND"
Backend = Literal["torch", "sim", "nki"]
Provider = Literal["own", "nkilib"]

_NEEDS = {"torch": (), "sim": ("nki_sim",), "nki": ("torch_neuronx", "nki.isa")}
_REMEDY = {
    "sim": "pip install 'nki-moe[sim]'",
    "nki": "use the Neuron DLAMI or AWS's wheels (the packages `nki` and `torch-neuronx` on PyPI are placeholders)",
}


def choose(device_type: str, provider: str = "own") -> Backend:
    """The backend for tensors on a device.

    Args:
        device_type: as `torch.device.type` has it.
        provider: whose kernels, "own" or "nkilib".

    Returns:
        "torch", "sim" or "nki".

    Raises:
        ValueError: an unknown backend or provider, or a provider that the backend does not have.
        ModuleNotFoundError: what was asked for is not installed.
    """
    name = os.environ.get(VARIABLE) or ("nki" if device_type == "neuron" else "torch")
    if name not in _NEEDS:
        raise ValueError(f"{VARIABLE}={name!r} is not a backend; choose one of {', '.join(_NEEDS)} or unset it")
    if provider not in ("own", "nkilib"):
        raise ValueError(f"provider={provider!r}: choose own (this package's kernels) or nkilib (AWS's nki-library)")
    if provider == "nkilib" and name == "torch":
        raise ValueError(
            f"provider='nkilib' is a choice between kernels, and here ({device_type!r} tensors, {VARIABLE} "
            f"{os.environ.get(VARIABLE) or 'unset'}) plain torch runs; use provider='own', or {VARIABLE}=sim to "
            "simulate AWS's kernels"
        )
    missing = [module for module in _NEEDS[name] if not _exists(module)]
    if missing:
        asked = f"{VARIABLE}={name} asks" if os.environ.get(VARIABLE) else f"a {device_type!r} tensor asks"
        raise ModuleNotFoundError(
            f"{asked} for the {name!r} backend, but {' and '.join(missing)} cannot be imported; {_REMEDY[name]}, "
            f"or set {VARIABLE}=torch"
        )
    if provider == "nkilib":
        nkilib_home()
    return cast(Backend, name)


def nkilib_home() -> str:
    """The name that nki-library is installed under; ModuleNotFoundError where it is not."""
    for name in ("nkilib", "nkilib_src.nkilib"):  # neuronx-cc brings the first; a checkout's src folder has the second
        if _exists(name):
            return name
    raise ModuleNotFoundError(
        "provider='nkilib' asks for AWS's nki-library, and neither nkilib nor nkilib_src.nkilib can be imported; use "
        "the Neuron DLAMI, "
        "pip install git+https://github.com/aws-neuron/nki-library, or provider='own'"
    )


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # a parent is missing, or a stand-in without a spec
        return False
