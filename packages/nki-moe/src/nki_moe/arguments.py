"""Mistakes that torch itself would pass over: arguments on several devices, and derivatives that it drops."""

from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

__all__ = ["need_one_device", "no_second_derivative", "refuse_forward_mode"]


def need_one_device(**tensors: Tensor) -> None:
    """ValueError unless all are on one device.

    Torch runs an operator on the device of one of them, whatever the others hold.
    """
    if len({t.device for t in tensors.values()}) > 1:
        found = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        raise ValueError(f"{found}; expected one device for all. Move them with .to(device)")


def refuse_forward_mode(*tensors: Tensor) -> None:
    """NotImplementedError under torch.func.jvp and dual numbers: torch would call every custom operator constant."""
    if not torch.compiler.is_compiling() and any(unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(
            "nki_moe's operators have no forward-mode derivative; use backward() or torch.autograd.grad"
        )


def no_second_derivative(*_: object) -> NoReturn:
    """The backward of an operator's backward."""
    raise NotImplementedError(
        "nki_moe.grouped_mlp and routed_mlp can be differentiated once; a second derivative (create_graph=True) needs "
        "the "
        "plain formula, nki_moe.experts.reference"
    )
