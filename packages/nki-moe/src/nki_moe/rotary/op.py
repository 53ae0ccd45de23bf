"""RoPE as a differentiable torch operator, nki_moe::rope.

Backward turns gradients back by the very cos and sin that forward used. nki_moe/api.py has the function that users
call.

B batch, L length, N query heads, M key heads, H head dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nki_moe import simulated
from nki_moe.backend import choose
from nki_moe.limits import check_rope, logical_cores
from nki_moe.rotary.reference import rotate

__all__ = ["differentiate", "launch", "turn"]


@torch.library.custom_op("nki_moe::rope", mutates_args=())
def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """Rotate by the angles of cos, sin (B, L, H), or back."""
    if choose(q.device.type) == "torch":
        return rotate(q, cos, sin, inverse), rotate(k, cos, sin, inverse)
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
