"""RoPE as a differentiable torch operator, nki_moe::rope.

    q, k = nki_moe.rope(q, k, cos, sin)

Backward turns gradients back by the very cos and sin that forward used. Not a default anywhere: docs/kernels.md says when it pays.

B batch, L length, N query heads, M key heads, H head dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nki_moe.arguments import need_one_device, refuse_forward_mode
from nki_moe.backend import choose
from nki_moe.limits import check_rope, logical_cores
from nki_moe.rotary.reference import rotate

__all__ = ["rope"]

_choose = torch.compiler.assume_constant_result(choose)


def rope(q_BLNH: Tensor, k_BLMH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k rotated, half-split as in Qwen3; differentiable in q and k.

    Args:
        q_BLNH, k_BLMH: TorchTitan's layout, bfloat16 or float32.
        cos, sin: (L, H), or (B, L, H) where documents in a batch have their own positions; float32, both halves
            alike (the first is read). Pick rows of a cache by position: cos = cache_cos[positions].

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
            f"q is {tuple(q_BLNH.shape)}, k {tuple(k_BLMH.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}; expected "
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
        from nki_moe import neuron

        neuron.register(q_BLNH.device.type, "rope")
        return torch.ops.nki_moe.rope_nki(q_BLNH.contiguous(), k_BLMH.contiguous(), cos, sin, False)
    return turn(q_BLNH.contiguous(), k_BLMH.contiguous(), cos, sin, False)


@torch.library.custom_op("nki_moe::rope", mutates_args=())
def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """Rotate by the angles of cos, sin (B, L, H), or back."""
    if choose(q.device.type) == "torch":
        return rotate(q, cos, sin, inverse), rotate(k, cos, sin, inverse)
    from nki_moe import simulated

    return launch(q, k, cos, sin, inverse, simulated.run)


@turn.register_fake
def _(q, k, cos, sin, inverse):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape)


def launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool, run: Callable[..., Any]
) -> tuple[Tensor, Tensor]:
    """The kernel, started by `run`."""
    from nki_moe.rotary import kernel

    B, L, _, H = q.shape
    if not q.numel():
        return q.clone(), k.clone()
    lnc = logical_cores()
    check_rope(B * L, H, dtype=q.dtype, lnc=lnc)
    rows = tuple(t.reshape(B * L, -1) for t in (q, k, cos.float(), sin.float()))
    q_out, k_out = run(kernel.rope, lnc, *rows, head_dim=H, inverse=inverse)
    return q_out.view(q.shape), k_out.view(k.shape)


def differentiate(op: Callable[..., Any]) -> tuple[Callable[..., None], Callable[..., Any]]:
    """setup_context and backward for register_autograd: one formula for every backend."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, _, cos, sin, ctx.inverse = inputs
        ctx.save_for_backward(cos, sin)

    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dq, dk = op(dq.contiguous(), dk.contiguous(), cos, sin, not ctx.inverse)
        return dq, dk, None, None, None

    return setup_context, backward


_setup_context, _backward = differentiate(turn)
turn.register_autograd(_backward, setup_context=_setup_context)
