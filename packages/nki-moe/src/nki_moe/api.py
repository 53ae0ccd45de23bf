"""The functions that users call: arguments are checked here, then the operators of the chosen backend run.

    y_RD = nki_moe.grouped_mlp(x_RD, counts_E, w1_EFD, w2_EDF, w3_EFD)              # rows sorted by expert
    y_TD = nki_moe.routed_mlp(x_TD, experts_TK, scores_TK, w1_EFD, w2_EDF, w3_EFD)  # gather, experts, combine in one
    q, k = nki_moe.rope(q, k, cos, sin)

RoPE is not a default anywhere: docs/kernels.md says when it pays.

T tokens, K experts a token, R rows (T*K when routed), E experts, D model dim, F hidden dim; B batch, L length, N query
heads, M key heads, H head dim.
"""

import torch
from torch import Tensor

from nki_moe import neuron
from nki_moe.arguments import need_one_device, refuse_forward_mode
from nki_moe.backend import Provider, choose
from nki_moe.experts import op
from nki_moe.rotary.op import turn
from nki_moe.tables import place
from nki_moe.work import Work

__all__ = ["grouped_mlp", "rope", "routed_mlp"]

_choose = torch.compiler.assume_constant_result(choose)


def grouped_mlp(
    x_RD: Tensor, counts_E: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor, *, provider: Provider = "own"
) -> Tensor:
    """y = (silu(x w1) * (x w3)) w2 for each row with its expert's weights; differentiable in x and the weights.

    Args:
        x_RD: rows sorted by expert, float32 or bfloat16. Rows past the last expert's are ignored (they may hold
            anything) and are zero in y and in the gradient.
        counts_E: rows of each expert, int32 or int64; zeros are fine.
        w1_EFD: gate projections in TorchTitan's layout, of the dtype of x.
        w2_EDF: down projections.
        w3_EFD: up projections.
        provider: whose kernels run, where kernels do: "own", or "nkilib" for AWS's. nki_moe.nkilib.check has their
            limits.

    Returns:
        y_RD like x; rows that belong to no expert are zero.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together; a provider that the backend does not have;
            counts that are negative or exceed the rows (not on Trainium, where a look would stop the device at every
            step).
        ModuleNotFoundError: a backend or provider that was asked for and is not installed.
    """
    _validate(x_RD, w1_EFD, w2_EDF, w3_EFD, counts_E=counts_E)
    if counts_E.shape != w1_EFD.shape[:1] or counts_E.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"counts_E is {_describe(counts_E)}; expected one int32 or int64 for each of the {w1_EFD.shape[0]} experts"
        )
    return _run(provider, x_RD, Work(counts_E, w1_EFD, w2_EDF, w3_EFD, None, None, None))


def routed_mlp(
    x_TD: Tensor,
    experts_TK: Tensor,
    scores_TK: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    w3_EFD: Tensor,
    *,
    provider: Provider = "own",
) -> Tensor:
    """Dispatch, experts and combine for experts that all live here: y[t] is the sum over k of scores[t, k] *
    expert(x[t]).

    Neither the gathered rows nor the experts' outputs are kept for backward. Differentiable in x, scores and weights.

    Args:
        x_TD: tokens, float32 or bfloat16.
        experts_TK: the expert of each of a token's K choices, int64 or int32, all different.
        scores_TK: routing scores of any float dtype, applied to the experts' outputs in float32.
        w1_EFD: gate projections in TorchTitan's layout, of the dtype of x.
        w2_EDF: down projections.
        w3_EFD: up projections.
        provider: as for grouped_mlp; nkilib rounds scores and their gradients to x's dtype.

    Returns:
        y_TD like x.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together; a provider that the backend does not have;
            choices outside 0 to E - 1.
        ModuleNotFoundError: a backend or provider that was asked for and is not installed.
    """
    _validate(x_TD, w1_EFD, w2_EDF, w3_EFD, experts_TK=experts_TK, scores_TK=scores_TK)
    if experts_TK.dtype not in (torch.int32, torch.int64) or not scores_TK.is_floating_point():
        raise ValueError(
            f"experts_TK is {_describe(experts_TK)} and scores_TK {_describe(scores_TK)}; expected int32 or int64, "
            "and floats"
        )
    if experts_TK.shape != scores_TK.shape or experts_TK.ndim != 2 or experts_TK.shape[0] != x_TD.shape[0]:
        raise ValueError(
            f"experts_TK is {_describe(experts_TK)} and scores_TK {_describe(scores_TK)}; expected (T, K) for both "
            f"with T = {x_TD.shape[0]}, the tokens of x"
        )
    placement, counts_E = place(experts_TK, w1_EFD.shape[0])
    return _run(provider, x_TD, Work(counts_E, w1_EFD, w2_EDF, w3_EFD, *placement, scores_TK))


def rope(q_BLNH: Tensor, k_BLMH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k rotated, half-split as in Qwen3; differentiable in q and k.

    Args:
        q_BLNH: queries in TorchTitan's layout, bfloat16 or float32.
        k_BLMH: keys, of the same dtype.
        cos: (L, H), or (B, L, H) where documents in a batch have their own positions; float32, both halves
            alike (the first is read). Pick rows of a cache by position: cos = cache_cos[positions].
        sin: of the shape of `cos`.

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
    return turn(q_BLNH.contiguous(), k_BLMH.contiguous(), cos, sin, False)


def _run(provider: Provider, x: Tensor, work: Work) -> Tensor:
    inputs = [t for t in (x, *work[1:4], work.scores_TK) if t is not None]
    refuse_forward_mode(*inputs)
    save = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    run = op.forward
    if _choose(x.device.type, provider) == "nki":
        neuron.register(x.device.type, provider)
        run = torch.ops.nki_moe.grouped_mlp_nki
    return run(x, *work, save, provider)[0]


def _validate(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, **routing: Tensor) -> None:
    E, F, D = w1.shape if w1.ndim == 3 else (-1, -1, -1)
    if x.ndim != 2 or w1.ndim != 3 or w3.shape != w1.shape or w2.shape != (E, D, F) or x.shape[1] != D:
        raise ValueError(
            f"x is {_describe(x)}, w1 {_describe(w1)}, w2 {_describe(w2)}, w3 {_describe(w3)}; "
            "expected (rows, D), (E, F, D), (E, D, F), (E, F, D)"
        )
    if len({x.dtype, w1.dtype, w2.dtype, w3.dtype}) > 1 or x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"x is {x.dtype}, w1 {w1.dtype}, w2 {w2.dtype}, w3 {w3.dtype}; expected one of bfloat16 and float32 for "
            "all. "
            "Cast the weights as mixed-precision FSDP does, or x.to(w1.dtype)"
        )
    need_one_device(x=x, w1=w1, w2=w2, w3=w3, **routing)


def _describe(t: Tensor) -> str:
    return f"{tuple(t.shape)} {t.dtype}".replace("torch.", "")
