"""The operators' functions with the kernels doing the work, as experts.torch_path does it in torch.

How a kernel is started is the last argument: on nki-sim, or on Trainium (neuron.py).
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nki_moe import simulated
from nki_moe.hardware import P
from nki_moe.limits import check
from nki_moe.tiling import columns, routing

__all__ = ["backward_data", "backward_weights", "forward", "saved_shape"]


def saved_shape(rows: int, experts: int, hidden: int) -> tuple[int, ...]:
    """Shape of what forward keeps: which no one but the kernels reads."""
    return (3, columns(rows, experts), hidden)


def forward(
    x: Tensor,
    counts_E: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    order_R: Tensor | None,
    scores_TK: Tensor | None,
    save: bool,
    run: Callable[..., Any] = simulated.run,
) -> tuple[Tensor, Tensor]:
    """The output, [R, D] or [T, D] when fused, and what backward needs (`saved_shape`; empty unless `save`)."""
    from nki_moe.experts.kernel_forward import forward

    rows = x.shape[0] if order_R is None else order_R.shape[0]
    fit = check(rows, *w1.shape, dtype=x.dtype)
    t = routing(counts_E, rows, order_R, scores_TK, fit.lnc)
    out = run(
        forward,
        fit.lnc,
        *(x, w1, w2, w3, t.plan, t.tails, t.clear, t.source, t.inverse, t.scores),
        rows=rows,
        fused=order_R is not None,
        save=save,
        **fit.forward._asdict(),
    )
    return out[0], out[1].view(saved_shape(rows, w1.shape[0], w1.shape[1])) if save else x.new_empty((0,))


def backward_data(
    dy: Tensor,
    counts_E: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    order_R: Tensor | None,
    scores_TK: Tensor | None,
    saved: Tensor,
    run: Callable[..., Any] = simulated.run,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows or tokens and of the scores (empty unless fused), and those of gate and up for
    `backward_weights`.
    """
    from nki_moe.experts.kernel_backward_data import backward_data

    rows = dy.shape[0] if order_R is None else order_R.shape[0]
    fit = check(rows, *w1.shape, dtype=dy.dtype)
    t = routing(counts_E, rows, order_R, scores_TK, fit.lnc)
    dx, dkept, dscore_parts = run(
        backward_data,
        fit.lnc,
        *(dy, w1, w2, w3, _kernel_view(saved)),
        *(t.plan, t.tails, t.scale, t.clear, t.source, t.score_rows, t.inverse),
        rows=rows,
        fused=order_R is not None,
        **fit.backward_data._asdict(),
    )
    dscores = dy.new_empty((0,))
    if order_R is not None and scores_TK is not None:
        of_rows = dscore_parts.sum(dim=0)[t.column_R]
        dscores = scores_TK.new_zeros(order_R.shape).index_copy(0, order_R, of_rows.to(scores_TK.dtype))
        dscores = dscores.view(scores_TK.shape)
    return dx, dscores, dkept.view(2, *saved.shape[1:])


def backward_weights(
    dy: Tensor,
    x: Tensor,
    counts_E: Tensor,
    order_R: Tensor | None,
    scores_TK: Tensor | None,
    saved: Tensor,
    dgu: Tensor,
    run: Callable[..., Any] = simulated.run,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of w1, w2, w3 in their layouts, added up in float32 and rounded once."""
    from nki_moe.experts.kernel_backward_weights import backward_weights

    rows = x.shape[0] if order_R is None else order_R.shape[0]
    E = counts_E.shape[0]
    fit = check(rows, E, saved.shape[2], x.shape[1], dtype=x.dtype)
    t = routing(counts_E, rows, order_R, scores_TK, fit.lnc)
    return run(
        backward_weights,
        fit.lnc,
        *(dy, x, _kernel_view(saved), _kernel_view(dgu)),
        *(t.plan, t.tails, t.factors, t.source, t.score_rows),
        experts=E,
        fused=order_R is not None,
        **fit.backward_weights._asdict(),
    )


def _kernel_view(kept: Tensor) -> Tensor:
    """(kinds, C, F) as the kernels lay it out."""
    kinds, C, F = kept.shape
    return kept.view(kinds * P, C, F // P)
