"""The expert MLP in torch, for whatever is not a Trainium: three functions with the kernels' signatures.

One expert at a time, so that an expert's rows stay in cache, gradients of weights are written straight into the
stacked gradient, and nothing of the size of a weight is ever copied. Where the CPU has no bfloat16 matmul, rows and
weights of the expert at hand are widened to float32: torch's substitute is slower than that by an order of magnitude.

R rows sorted by expert (or, fused, T tokens of which R = T*K rows are gathered), E experts, D model dim, F hidden dim,
n rows of one expert. `saved_3RF` holds gate, up and silu(gate)*up.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["backward_data", "backward_weights", "forward", "saved_shape"]

_CHUNK = 1024  # rows widened at a time


def saved_shape(rows: int, experts: int, hidden: int) -> tuple[int, ...]:
    """Shape of what forward keeps for backward."""
    return (3, rows, hidden)


def forward(
    x: Tensor,
    counts_E: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    w3_EFD: Tensor,
    order_R: Tensor | None,
    scores_TK: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """y (like x) and what backward needs (empty unless `save`)."""
    rows = Rows(x, counts_E, order_R, scores_TK)
    saved_3RF = x.new_empty(saved_shape(rows.total, len(w1_EFD), w1_EFD.shape[1]) if save else (0,))
    if save:
        saved_3RF[:, rows.used :] = 0
    y = rows.output(x)
    widen = Widened(x.dtype)
    for e, spans in rows.experts():
        for span in spans:
            x_nD = rows.read(x, span).to(widen.dtype)
            g_nF = x_nD @ widen(w1_EFD, e).T
            u_nF = x_nD @ widen(w3_EFD, e).T
            h_nF = F.silu(g_nF).mul_(u_nF)
            if save:
                for kept_RF, value_nF in zip(saved_3RF, (g_nF, u_nF, h_nF), strict=True):
                    kept_RF[span] = value_nF
            y_nD = h_nF @ widen(w2_EDF, e).T
            rows.write(y, span, y_nD if scores_TK is None else y_nD * rows.scores(span, widen.dtype))
    return rows.finish(y, x.dtype), saved_3RF


def backward_data(
    dy: Tensor,
    counts_E: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    w3_EFD: Tensor,
    order_R: Tensor | None,
    scores_TK: Tensor | None,
    saved_3RF: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx (like x), dscores_TK (empty unless fused), and the gradients of gate and up that the weights' backward needs."""
    rows = Rows(dy, counts_E, order_R, scores_TK)
    dgu_2RF = torch.empty_like(saved_3RF[:2])
    dgu_2RF[:, rows.used :] = 0
    dx = rows.output(dy)
    dscores = torch.zeros_like(scores_TK) if scores_TK is not None else dy.new_empty((0,))
    widen = Widened(dy.dtype)
    for e, spans in rows.experts():
        for span in spans:
            dh_nF = rows.read(dy, span).to(widen.dtype) @ widen(w2_EDF, e)
            g_nF, u_nF, h_nF = (kept_RF[span].to(widen.dtype) for kept_RF in saved_3RF)
            if order_R is not None:  # <dy, y> = <dy w2, h>: the score's gradient without y
                dscores.view(-1)[order_R[span]] = (dh_nF * h_nF).sum(dim=1).to(dscores.dtype)
                dh_nF *= rows.scores(span, widen.dtype)
            s_nF = torch.sigmoid(g_nF)
            du_nF = (g_nF * s_nF).mul_(dh_nF)
            dg_nF = dh_nF.mul_(u_nF).mul_(s_nF * (1 + g_nF * (1 - s_nF)))
            dgu_2RF[0, span] = dg_nF
            dgu_2RF[1, span] = du_nF
            dx_nD = dg_nF @ widen(w1_EFD, e)
            rows.write(dx, span, dx_nD.addmm_(du_nF, widen(w3_EFD, e)))
    return rows.finish(dx, dy.dtype), dscores, dgu_2RF


def backward_weights(
    dy: Tensor,
    x: Tensor,
    counts_E: Tensor,
    order_R: Tensor | None,
    scores_TK: Tensor | None,
    saved_3RF: Tensor,
    dgu_2RF: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dw1_EFD, dw2_EDF, dw3_EFD: accumulated in float32, rounded once."""
    rows = Rows(dy, counts_E, order_R, scores_TK)
    E, D, hidden = counts_E.shape[0], dy.shape[1], saved_3RF.shape[2]
    dw1_EFD, dw2_EDF, dw3_EFD = (dy.new_empty(shape) for shape in ((E, hidden, D), (E, D, hidden), (E, hidden, D)))
    widen = Widened(dy.dtype)
    for e, spans in rows.experts():
        if not spans:
            for dw in (dw1_EFD, dw2_EDF, dw3_EFD):
                dw[e].zero_()
        for dw, kept_RF, other, swap in (
            (dw1_EFD, dgu_2RF[0], x, False),
            (dw2_EDF, saved_3RF[2], dy, True),
            (dw3_EFD, dgu_2RF[1], x, False),
        ):
            total = widen.target(dw, e)
            for i, span in enumerate(spans):
                kept_nF, other_nD = kept_RF[span].to(widen.dtype), rows.read(other, span).to(widen.dtype)
                if swap and scores_TK is not None:
                    other_nD = other_nD * rows.scores(span, widen.dtype)
                left, right = (other_nD, kept_nF) if swap else (kept_nF, other_nD)
                torch.addmm(total, left.T, right, beta=min(i, 1), out=total)  # the first overwrites
            if spans and total.dtype != dw.dtype:
                dw[e] = total
    return dw1_EFD, dw2_EDF, dw3_EFD


class Rows:
    """Whose rows are where: contiguous ones of a sorted tensor, or, fused, those of the tokens that chose the expert."""

    def __init__(self, x: Tensor, counts_E: Tensor, order_R: Tensor | None, scores_TK: Tensor | None) -> None:
        self.counts: list[int] = counts_E.tolist()
        self.total = x.shape[0] if order_R is None else order_R.shape[0]
        self.used = sum(self.counts)
        if self.used > self.total or min(self.counts, default=0) < 0:
            raise ValueError(
                f"counts_E adds up to {self.used} (smallest {min(self.counts)}) but there are {self.total} rows; "
                "counts must not be negative nor add up to more than the rows"
            )
        self.order_R = order_R
        self.tokens_R = None if order_R is None or scores_TK is None else order_R // scores_TK.shape[1]
        self.scores_R = None if order_R is None or scores_TK is None else scores_TK.reshape(-1)[order_R]
        self.chunk = _CHUNK if _compute_dtype(x.dtype) != x.dtype else max(self.total, 1)

    def experts(self) -> Iterator[tuple[int, list[slice]]]:
        """Each expert with the spans of its rows; none when it has no rows."""
        start = 0
        for e, n in enumerate(self.counts):
            yield e, [slice(a, min(a + self.chunk, start + n)) for a in range(start, start + n, self.chunk)]
            start += n

    def read(self, x: Tensor, span: slice) -> Tensor:
        return x[span] if self.tokens_R is None else x[self.tokens_R[span]]

    def scores(self, span: slice, dtype: torch.dtype) -> Tensor:
        assert self.scores_R is not None
        return self.scores_R[span, None].to(dtype)

    def output(self, like: Tensor) -> Tensor:
        """Where results go; a token's sum over its experts is kept in float32."""
        if self.tokens_R is not None:
            return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
        out = torch.empty_like(like)
        out[self.used :].zero_()
        return out

    def write(self, out: Tensor, span: slice, value: Tensor) -> None:
        if self.tokens_R is None:
            out[span] = value
        else:
            out.index_add_(0, self.tokens_R[span], value.to(out.dtype))

    def finish(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        return out.to(dtype)


class Widened:
    """One matrix of one expert at a time in the dtype matmuls run in, in one buffer: what was given before is gone."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = _compute_dtype(dtype)
        self.buffer: Tensor | None = None

    def __call__(self, w_EMN: Tensor, e: int) -> Tensor:
        if w_EMN.dtype == self.dtype:
            return w_EMN[e]
        return self.target(w_EMN, e).copy_(w_EMN[e])

    def target(self, out_EMN: Tensor, e: int) -> Tensor:
        """Where out[e] may be computed: itself, or the buffer."""
        if out_EMN.dtype == self.dtype:
            return out_EMN[e]
        if self.buffer is None:
            self.buffer = torch.empty(out_EMN[0].numel(), dtype=self.dtype, device=out_EMN.device)
        return self.buffer.view(out_EMN.shape[1:])


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """bfloat16 where the CPU multiplies it natively, float32 in its place elsewhere."""
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return dtype
