"""RoPE, half-split as Qwen3 has it, in torch: what runs where no kernel does, and what tests compare with.

B batch, L length, N heads, H head dim.
"""

import torch
from torch import Tensor

__all__ = ["rotate"]


def rotate(x_BLNH: Tensor, cos_BLH: Tensor, sin_BLH: Tensor, inverse: bool = False) -> Tensor:
    """Each pair (x[i], x[i + H/2]) turned by its token's angle, or back by it; in float32, rounded once."""
    half = x_BLNH.shape[-1] // 2
    cos, sin = cos_BLH[..., None, :half].float(), sin_BLH[..., None, :half].float()
    if inverse:
        sin = -sin
    a, b = x_BLNH[..., :half].float(), x_BLNH[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BLNH.dtype)
