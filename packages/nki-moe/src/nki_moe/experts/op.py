"""The expert MLP as differentiable torch operators: nki_moe::grouped_mlp and its two backward halves.

    y_RD = nki_moe.grouped_mlp(x_RD, counts_E, w1_EFD, w2_EDF, w3_EFD)              # rows sorted by expert
    y_TD = nki_moe.routed_mlp(x_TD, experts_TK, scores_TK, w1_EFD, w2_EDF, w3_EFD)  # gather, experts, combine in one

Counts are data: neither a change of routing nor torch.compile makes another program. What runs is decided in backend.py.

T tokens, K experts a token, R rows (T*K when routed), E experts, D model dim, F hidden dim.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nki_moe.backend import choose
from nki_moe.experts import host

__all__ = ["grouped_mlp", "routed_mlp"]

_choose = torch.compiler.assume_constant_result(choose)


def grouped_mlp(x_RD: Tensor, counts_E: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor) -> Tensor:
    """y = (silu(x w1) * (x w3)) w2 for each row with its expert's weights; differentiable in x and the weights.

    Args:
        x_RD: rows sorted by expert, float32 or bfloat16. Rows past the last expert's are ignored (they may hold
            anything) and are zero in y and in the gradient.
        counts_E: rows of each expert, int32 or int64; zeros are fine.
        w1_EFD, w2_EDF, w3_EFD: gate, down and up projections in TorchTitan's layout, same dtype as x.

    Raises:
        ValueError: shapes or dtypes that do not fit together; counts that are negative or exceed the rows.
    """
    _validate(x_RD, w1_EFD, w2_EDF, w3_EFD)
    if counts_E.shape != w1_EFD.shape[:1] or counts_E.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"counts_E is {_describe(counts_E)}; expected one int32 or int64 for each of the {w1_EFD.shape[0]} experts"
        )
    return _run(x_RD, counts_E, w1_EFD, w2_EDF, w3_EFD, None, None)


def routed_mlp(
    x_TD: Tensor, experts_TK: Tensor, scores_TK: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor
) -> Tensor:
    """Dispatch, experts and combine for experts that all live here: the sum over k of scores[t, k] * expert(x[t]).

    Neither the gathered rows nor the experts' outputs are kept for backward. Differentiable in x, scores and weights.

    Args:
        x_TD: tokens. experts_TK: an int64 or int32 expert for each of a token's K choices, all different.
        scores_TK: routing scores, applied to the experts' outputs in float32; any float dtype.
        w1_EFD, w2_EDF, w3_EFD: as for grouped_mlp.
    """
    _validate(x_TD, w1_EFD, w2_EDF, w3_EFD)
    if experts_TK.shape != scores_TK.shape or experts_TK.ndim != 2 or experts_TK.shape[0] != x_TD.shape[0]:
        raise ValueError(
            f"experts_TK is {_describe(experts_TK)} and scores_TK {_describe(scores_TK)}; expected (T, K) for both "
            f"with T = {x_TD.shape[0]}, the tokens of x"
        )
    chosen_R = experts_TK.flatten()
    counts_E = torch.zeros(w1_EFD.shape[0], dtype=torch.int64, device=x_TD.device)
    counts_E = counts_E.scatter_add(0, chosen_R.long(), torch.ones_like(chosen_R, dtype=torch.int64))
    return _run(x_TD, counts_E, w1_EFD, w2_EDF, w3_EFD, chosen_R.argsort(stable=True), scores_TK)


def _run(
    x: Tensor, counts_E: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, order_R: Tensor | None, scores_TK: Tensor | None
) -> Tensor:
    inputs = (x, w1, w2, w3) if scores_TK is None else (x, w1, w2, w3, scores_TK)
    save = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    if _choose(x.device.type) == "nki":
        from nki_moe import neuron

        neuron.register(x.device.type)
        return torch.ops.nki_moe.grouped_mlp_nki(x, counts_E, w1, w2, w3, order_R, scores_TK, save)[0]
    return forward(x, counts_E, w1, w2, w3, order_R, scores_TK, save)[0]


def implementation(device_type: str) -> ModuleType:
    """The module whose forward, backward_data and backward_weights do the work."""
    if choose(device_type) == "torch":
        return host
    from nki_moe.experts import launch

    return launch


class Ops(NamedTuple):
    """The three operators of one backend."""

    forward: Callable[..., Any]
    backward_data: Callable[..., Any]
    backward_weights: Callable[..., Any]


def define(register: Callable[[str], Callable[..., Any]], work: Callable[[str], Any]) -> Ops:
    """The operators of one backend: register(name) decorates an annotated function; work(device type) has the functions that do the work."""

    @register("grouped_mlp")
    def forward(
        x: Tensor,
        counts_E: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        order_R: Tensor | None,
        scores_TK: Tensor | None,
        save: bool,
    ) -> tuple[Tensor, Tensor]:
        """y and what backward needs (empty unless `save`); fused when order_R and scores_TK are given."""
        return work(x.device.type).forward(x, counts_E, w1, w2, w3, order_R, scores_TK, save)

    @register("grouped_mlp_backward_data")
    def backward_data(
        dy: Tensor,
        counts_E: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        order_R: Tensor | None,
        scores_TK: Tensor | None,
        saved: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dx, dscores_TK (empty unless fused) and the gradients of gate and up."""
        return work(dy.device.type).backward_data(dy, counts_E, w1, w2, w3, order_R, scores_TK, saved)

    @register("grouped_mlp_backward_weights")
    def backward_weights(
        dy: Tensor,
        x: Tensor,
        counts_E: Tensor,
        order_R: Tensor | None,
        scores_TK: Tensor | None,
        saved: Tensor,
        dgu: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dw1_EFD, dw2_EDF, dw3_EFD."""
        return work(dy.device.type).backward_weights(dy, x, counts_E, order_R, scores_TK, saved, dgu)

    return Ops(forward, backward_data, backward_weights)


def differentiate(ops: Ops) -> tuple[Callable[..., None], Callable[..., Any]]:
    """setup_context and backward for register_autograd: one formula for every backend."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, counts_E, w1, w2, w3, order_R, scores_TK, _save = inputs
        ctx.save_for_backward(x, counts_E, w1, w2, w3, order_R, scores_TK, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, dy: Tensor | None, _dsaved: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 8
        x, counts_E, w1, w2, w3, order_R, scores_TK, saved = ctx.saved_tensors
        dy = dy.contiguous()
        dx, dscores, dgu = ops.backward_data(dy, counts_E, w1, w2, w3, order_R, scores_TK, saved)
        dw1 = dw2 = dw3 = None
        if any(ctx.needs_input_grad[2:5]):
            dw1, dw2, dw3 = ops.backward_weights(dy, x, counts_E, order_R, scores_TK, saved, dgu)
        return dx, None, dw1, dw2, dw3, None, None if scores_TK is None else dscores, None

    return setup_context, backward


forward, backward_data, backward_weights = define(
    lambda name: torch.library.custom_op(f"nki_moe::{name}", mutates_args=()), implementation
)
_setup_context, _backward = differentiate(Ops(forward, backward_data, backward_weights))
torch.library.register_autograd("nki_moe::grouped_mlp", _backward, setup_context=_setup_context)


@torch.library.register_fake("nki_moe::grouped_mlp")
def _(x, counts_E, w1, w2, w3, order_R, scores_TK, save):  # type: ignore[no-untyped-def]
    rows = x.shape[0] if order_R is None else order_R.shape[0]
    shape = implementation(x.device.type).saved_shape(rows, w1.shape[0], w1.shape[1])
    return x.new_empty(x.shape), x.new_empty(shape if save else (0,))


@torch.library.register_fake("nki_moe::grouped_mlp_backward_data")
def _(dy, counts_E, w1, w2, w3, order_R, scores_TK, saved):  # type: ignore[no-untyped-def]
    dscores = dy.new_empty((0,)) if scores_TK is None else torch.empty_like(scores_TK)
    return dy.new_empty(dy.shape), dscores, saved.new_empty((2, *saved.shape[1:]))


@torch.library.register_fake("nki_moe::grouped_mlp_backward_weights")
def _(dy, x, counts_E, order_R, scores_TK, saved, dgu):  # type: ignore[no-untyped-def]
    E, D, F = counts_E.shape[0], dy.shape[1], saved.shape[2]
    return dy.new_empty((E, F, D)), dy.new_empty((E, D, F)), dy.new_empty((E, F, D))


def _validate(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> None:
    E, F, D = w1.shape if w1.ndim == 3 else (-1, -1, -1)
    if x.ndim != 2 or w1.ndim != 3 or w3.shape != w1.shape or w2.shape != (E, D, F) or x.shape[1] != D:
        raise ValueError(
            f"x is {_describe(x)}, w1 {_describe(w1)}, w2 {_describe(w2)}, w3 {_describe(w3)}; "
            "expected (rows, D), (E, F, D), (E, D, F), (E, F, D)"
        )
    if len({x.dtype, w1.dtype, w2.dtype, w3.dtype}) > 1 or x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"x is {x.dtype}, w1 {w1.dtype}, w2 {w2.dtype}, w3 {w3.dtype}; expected one of bfloat16 and float32 for all. "
            "Cast the weights as mixed-precision FSDP does, or x.to(w1.dtype)"
        )


def _describe(t: Tensor) -> str:
    return f"{tuple(t.shape)} {t.dtype}".replace("torch.", "")
