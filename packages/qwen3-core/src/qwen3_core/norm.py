"""Root-mean-square normalisation with its derivative written out.

Autograd's own keeps the normalised tensor (and, in bfloat16, a float32 copy of the input) for every norm of
every layer. Here only the input is kept, with one number per row, and there are half as many passes over
memory.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x²) + eps) over the last dim, the mean in float32.

    Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467. The quotient is rounded to the dtype of x before it is
    multiplied by the weight, as Qwen3 is trained and as Transformers does.

    Args:
        x: any shape that ends in D.
        weight_D: one factor for each element of a row.
        eps: added to the mean.

    Returns:
        A tensor of the shape and dtype of x.
    """
    return _RMSNorm.apply(x, weight_D, eps)


class _RMSNorm(torch.autograd.Function):
    """Its derivative, where n = r x and r = 1/rms(x):  dweight = Σ g n  and  dx = r (g w - n mean(g w n))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        r = torch.rsqrt(norm.square() / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight_D, r)
        return (wide * r).to(x.dtype) * weight_D

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_D, r = ctx.saved_tensors
        n = x.float() * r
        grad_n = grad * n
        mean = (grad_n @ weight_D.float()).unsqueeze(-1) / x.shape[-1]
        dx = (grad.float() * weight_D).addcmul_(n, mean, value=-1).mul_(r)
        return dx.to(x.dtype), grad_n.flatten(0, -2).sum(dim=0).to(weight_D.dtype), None
