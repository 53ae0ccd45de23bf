"""Random weights that are a layout's own choice nowhere: each is drawn as one process would draw it.

DTensor gives every shard its part of one stream of random numbers on devices whose generator it can set. CPU is not
among them: there each rank draws from an equal generator, so that the shards of a tensor become copies of each other,
and stay so.
"""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["normal_"]


def normal_(tensor: torch.Tensor, *, std: float) -> torch.Tensor:
    """nn.init.normal_ with mean 0, in place, for a parameter of any shape and sharding.

    Where DTensor has no generator every rank draws the whole tensor for a moment and keeps its part.
    """
    if not isinstance(tensor, DTensor) or _has_generator(tensor.device_mesh.device_type):
        return nn.init.normal_(tensor, std=std)
    whole = nn.init.normal_(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), std=std)
    part = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    with torch.no_grad():
        tensor.to_local().copy_(part.to_local())
    return tensor


@cache
def _has_generator(device_type: str) -> bool:
    """Return whether a draw on this device moves the generator that DTensor sets for each shard.

    That torch.<device>.set_rng_state is there says nothing: torch-neuronx has it, registers no random operator, and its
    draws fall to the CPU generator, which DTensor does not set (public pre-release sources of April 2026).
    """
    module: Any = getattr(torch, device_type, None)
    if not hasattr(module, "set_rng_state"):
        return False
    of_host, of_device = torch.get_rng_state(), module.get_rng_state()
    torch.empty(4, device=device_type).normal_()
    moved = not torch.equal(of_device, module.get_rng_state())
    module.set_rng_state(of_device)
    torch.set_rng_state(of_host)
    return moved
