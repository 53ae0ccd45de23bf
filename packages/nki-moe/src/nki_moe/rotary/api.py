"""RoPE as users call it: arguments are checked here, then the operator of the chosen backend runs.

    q, k = nki_moe.rope(q, k, cos, sin)

Not a default anywhere: docs/kernels.md says when it pays.

B batch, L length, N query heads, M key heads, H head dim.
"""

import torch
from torch import Tensor

from nki_moe import neuron
from nki_moe.arguments import need_one_device, refuse_forward_mode
from nki_moe.backend import choose
from nki_moe.rotary import op

__all__ = ["rope"]

_choose = torch.compiler.assume_constant_result(choose)


def rope(q_BLNH: Tensor, k_BLMH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k rotated, half-split as in Qwen3; differentiable in q and k.

    Args:
        q_BLNH, k_BLMH: TorchTitan's layout, bfloat16 or float32.
        cos, sin: (L, H), or (B, L, H) where documents in a batch have their own positions; float32, both halves
            alike (the first is read). Pick rows of a cache by position: cos = cache_cos[positions].

    Returns:
        q and k of the shapes and dtypes that they had.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    refuse_forward_mode(q_BLNH, k_BLMH)
    B, L, _, H = q_BLNH.shape if q_BLNH.ndim == 4 else (-1, -1, -1, -1)
    if (
        q_BLNH.ndim != 4
        or k_BLMH.ndim != 4
        or k_BLMH.shape != (B, L, k_BLMH.shape[2], H)
        or cos.shape not in ((L, H), (B, L, H))
        or sin.shape != cos.shape
    ):
        raise ValueError(
            f"q is {tuple(q_BLNH.shape)}, k {tuple(k_BLMH.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}; "
            "expected "
            "(B, L, N, H), (B, L, M, H) and twice (L, H) or (B, L, H)"
        )
    if H % 2 or q_BLNH.dtype != k_BLMH.dtype or q_BLNH.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"head dim {H} must be even and q, k ({q_BLNH.dtype}, {k_BLMH.dtype}) of one dtype, bfloat16 or float32"
        )
    if not (cos.is_floating_point() and sin.is_floating_point()):
        raise ValueError(f"cos is {cos.dtype}, sin {sin.dtype}; expected float32")
    need_one_device(q=q_BLNH, k=k_BLMH, cos=cos, sin=sin)
    cos, sin = (c.expand(B, L, H).contiguous() for c in (cos, sin))
    if _choose(q_BLNH.device.type) == "nki":
        neuron.register(q_BLNH.device.type, "rope")
        return torch.ops.nki_moe.rope_nki(q_BLNH.contiguous(), k_BLMH.contiguous(), cos, sin, False)
    return op.turn(q_BLNH.contiguous(), k_BLMH.contiguous(), cos, sin, False)
