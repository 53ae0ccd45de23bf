"""The initial distribution of every parameter, in one place; Transformers' Qwen3 has the same.

| parameter                                               | distribution                                 |
|---------------------------------------------------------|----------------------------------------------|
| norms (input, post-attention, query, key, final)        | 1                                            |
| the rest: embedding, head, projections, router, experts | normal, mean 0, std initializer_range (0.02) |

A tied head is the embedding and drawn once. Nothing is scaled by depth, unlike TorchTitan's Qwen3.
"""

import torch
from torch import nn

__all__ = ["init_weights"]


@torch.no_grad()
def init_weights(model: nn.Module, std: float, generator: torch.Generator | None = None) -> None:
    """Fill the parameters of a model in place, in the order of `named_parameters`; 1-D ones are norms.

    Args:
        model: a Qwen3, or a part of one.
        std: standard deviation of all but the norms.
        generator: for drawing.
    """
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=std, generator=generator)
