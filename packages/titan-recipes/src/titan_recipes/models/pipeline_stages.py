"""What a pipeline stage sends has to lie in memory in order: gloo and NCCL refuse anything else.

Sequence parallel's collectives leave both a stage's output and its input's gradient transposed, and the buffers to
receive them are made with the same strides, so pipeline x tensor parallel fails without this.
"""

from typing import Any

import torch

__all__ = ["sendable", "sends_its_gradient"]


def sendable(output: torch.Tensor) -> torch.Tensor:
    """A stage's output, contiguous. Nothing is copied where it already is."""
    return output.contiguous()


def sends_its_gradient(stage_input: torch.Tensor) -> torch.Tensor:
    """A stage's input, whose gradient will be contiguous. Token ids pass."""
    if not stage_input.is_floating_point():
        return stage_input
    passed: torch.Tensor = _ContiguousGradient.apply(stage_input)
    return passed


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].contiguous()
