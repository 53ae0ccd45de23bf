"""The expert MLP in torch, for whatever is not a Trainium: forward, and one backward for everything.

One expert at a time, so that its rows stay in cache, results and the stacked gradients are written where they belong,
and nothing of the size of a weight is ever copied. Backward works out the gradients of gate and up for one expert only,
just before they are used. Where the CPU has no bfloat16 matmul, blocks of rows and weights are widened to float32 as
they are needed: torch's substitute is slower than that by an order of magnitude.

R rows sorted by expert (or, fused, T tokens of which R = T*K rows are gathered), E experts, D model dim, F hidden dim,
n rows of one expert (or a span of them). `saved_2RF` holds gate and up.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nki_moe.work import Work

__all__ = ["backward", "forward", "saved_shape", "tables_shape"]

_ROWS = 1024  # rows of an expert worked on at a time
_ROWS_WIDENED, _WEIGHT_ROWS_WIDENED = 128, 128  # the same, and rows of a weight, where they are widened


def saved_shape(rows: int, experts: int, hidden: int, dim: int) -> tuple[int, ...]:
    """Shape of what forward keeps for backward."""
    return (2, rows, hidden)


def tables_shape(x: Tensor, work: Work) -> tuple[int, ...]:
    """Shape of the routing tables that forward keeps: none."""
    return (0,)


def _no_tables(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.int32, device=x.device)


def in_own_dtype(function: Callable[..., Any]) -> Callable[..., Any]:
    """The dtype is that of rows and weights: a caller's autocast, which works inside operators too, is off."""

    @wraps(function)
    def call(x: Tensor, *args: Any) -> Any:
        if not torch.is_autocast_enabled(x.device.type):
            return function(x, *args)
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args)

    return call


@in_own_dtype
def forward(x: Tensor, work: Work, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y (like x) and what backward needs (empty unless `save`); no tables."""
    _, w1_EFD, w2_EDF, w3_EFD, *_ = work
    rows = Rows(x, work)
    saved_2RF = x.new_empty(saved_shape(rows.total, *w1_EFD.shape) if save else (0,))
    if save:
        saved_2RF[:, rows.used :] = 0
    y = rows.output(x)
    for e, spans in rows.experts():
        for span in spans:
            x_nD = rows.read(x, span)
            g_nF, u_nF = (
                times_transposed(x_nD, w[e], out=_where(saved_2RF[kind, span]) if save else None)
                for kind, w in enumerate((w1_EFD, w3_EFD))
            )
            if save and _where(saved_2RF) is None:
                saved_2RF[0, span], saved_2RF[1, span] = g_nF, u_nF
            # what is kept must not be overwritten
            h_nF = F.silu(g_nF, inplace=_where(saved_2RF) is None or not save).mul_(u_nF)
            del g_nF, u_nF, x_nD
            rows.write(y, span, times_transposed(h_nF, w2_EDF[e], out=rows.place(y, span)), rows.scores_R)
    return y.to(x.dtype), saved_2RF, _no_tables(x)


@in_own_dtype
def backward(
    dy: Tensor, x: Tensor, work: Work, saved_2RF: Tensor, _tables: Tensor, weights: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx (like x), dscores_TK (empty unless fused), and, if `weights`, dw1_EFD, dw2_EDF, dw3_EFD, rounded once."""
    _, w1_EFD, w2_EDF, w3_EFD, _, _, scores_TK = work
    rows = Rows(dy, work)
    dx = rows.output(dy)
    dscores = scores_TK.new_zeros(scores_TK.shape) if scores_TK is not None else dy.new_empty((0,))
    dw1_EFD, dw2_EDF, dw3_EFD = (w.new_empty(w.shape if weights else (0,)) for w in (w1_EFD, w2_EDF, w3_EFD))
    for e, spans in rows.experts():
        every = slice(spans[0].start, spans[-1].stop) if spans else slice(0, 0)
        dg_nF, du_nF, *h_nF = dy.new_empty((3 if weights else 2, every.stop - every.start, w1_EFD.shape[1]))
        for span in spans:
            here = slice(span.start - every.start, span.stop - every.start)
            dh = times(rows.read(dy, span), w2_EDF[e])
            g, u = (kept_RF[span].to(dh.dtype) for kept_RF in saved_2RF)
            s = F.silu(g)
            if weights:
                torch.mul(s, u, out=h_nF[0][here]) if s.dtype == dy.dtype else h_nF[0][here].copy_(s * u)
            if rows.scores_R is not None and rows.choice_R is not None:
                # <dy, y> = <dy w2, h>: the score's gradient without y
                dscores.view(-1)[rows.choice_R[span]] = (dh * s * u).sum(dim=1).to(dscores.dtype)
                dh *= rows.scores_R[span, None]
            du_nF[here] = s.mul_(dh)
            dg_nF[here] = torch.ops.aten.silu_backward(dh.mul_(u), g)
            del s, dh, g, u
            dx_nD = times(dg_nF[here], w1_EFD[e], out=rows.place(dx, span))
            rows.write(dx, span, times(du_nF[here], w3_EFD[e], out=dx_nD, add=True))
            del dx_nD
        if weights:
            x_nD = rows.read(x, every)
            outer(dg_nF, x_nD, dw1_EFD[e])
            outer(du_nF, x_nD, dw3_EFD[e])
            del dg_nF, du_nF, x_nD
            if rows.scores_R is not None:  # here rather than on dy, which is wider
                h_nF[0] *= rows.scores_R[every, None]
            outer(rows.read(dy, every), h_nF[0], dw2_EDF[e])
            del h_nF
    return dx.to(dy.dtype), dscores, dw1_EFD, dw2_EDF, dw3_EFD


class Rows:
    """Whose rows are where: contiguous ones of a sorted tensor, or, fused, those of the tokens that chose the
    expert.
    """

    def __init__(self, x: Tensor, work: Work) -> None:
        self.total = work.rows(x)
        self.counts: list[int] = work.counts_E.tolist() if self.total else [0] * work.counts_E.shape[0]
        self.used = sum(self.counts)
        self.choice_R = self.tokens_R = self.scores_R = None
        if work.choice_R is not None and work.scores_TK is not None:
            self.choice_R = work.choice_R.long()
            self.tokens_R = self.choice_R // work.scores_TK.shape[1]
            self.scores_R = work.scores_TK.reshape(-1)[self.choice_R]
        self.at_a_time = _ROWS if _compute_dtype(x.dtype) == x.dtype else _ROWS_WIDENED

    def experts(self) -> Iterator[tuple[int, list[slice]]]:
        """Each expert with the spans of its rows; none when it has no rows."""
        start = 0
        for e, n in enumerate(self.counts):
            yield e, [slice(a, min(a + self.at_a_time, start + n)) for a in range(start, start + n, self.at_a_time)]
            start += n

    def read(self, x: Tensor, span: slice) -> Tensor:
        """The rows of a span."""
        return x[span] if self.tokens_R is None else x[self.tokens_R[span]]

    def output(self, like: Tensor) -> Tensor:
        """The place where results go; a token's sum over its experts is kept in float32."""
        if self.tokens_R is not None:
            return like.new_zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32))
        out = like.new_empty(like.shape)
        out[self.used :].zero_()
        return out

    def place(self, out: Tensor, span: slice) -> Tensor | None:
        """Where a span's result may be computed: where it belongs, if it can be."""
        return _where(out[span]) if self.tokens_R is None else None

    def write(self, out: Tensor, span: slice, value: Tensor, scores_R: Tensor | None = None) -> None:
        """Put a span's result where it belongs; fused, add it to its tokens, weighted by the scores."""
        if self.tokens_R is not None:
            weighted = value if scores_R is None else value.mul_(scores_R[span, None])
            out.index_add_(0, self.tokens_R[span], weighted.to(out.dtype))
        elif self.place(out, span) is None:
            out[span] = value


def times_transposed(x_nK: Tensor, w_MK: Tensor, out: Tensor | None = None) -> Tensor:
    """x w^T in the dtype matmuls run in."""
    dtype = _compute_dtype(w_MK.dtype)
    if dtype == w_MK.dtype:
        return torch.mm(x_nK, w_MK.T) if out is None else torch.mm(x_nK, w_MK.T, out=out)
    x_nK, y_nM = x_nK.to(dtype), x_nK.new_empty((len(x_nK), len(w_MK)), dtype=dtype)
    for block in _blocks(w_MK):
        torch.mm(x_nK, w_MK[block].to(dtype).T, out=y_nM[:, block])
    return y_nM


def times(x_nM: Tensor, w_MK: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
    """x w in the dtype matmuls run in; with `add`, on top of what `out` holds."""
    dtype = _compute_dtype(w_MK.dtype)
    if dtype == w_MK.dtype:
        if add and out is not None:
            return out.addmm_(x_nM, w_MK)
        return torch.mm(x_nM, w_MK) if out is None else torch.mm(x_nM, w_MK, out=out)
    assert add or out is None
    y_nK = x_nM.new_zeros((len(x_nM), w_MK.shape[1]), dtype=dtype) if out is None else out
    for block in _blocks(w_MK):
        y_nK.addmm_(x_nM[:, block].to(dtype), w_MK[block].to(dtype))
    return y_nK


def outer(a_nM: Tensor, b_nK: Tensor, out_MK: Tensor) -> None:
    """a^T b into `out`: summed in float32, rounded once."""
    dtype = _compute_dtype(out_MK.dtype)
    if not len(a_nM):
        out_MK.zero_()
    elif dtype == out_MK.dtype:
        torch.mm(a_nM.T, b_nK, out=out_MK)
    else:
        span = _ROWS_WIDENED
        b_nK = b_nK if len(b_nK) > span else b_nK.to(dtype)
        for block in _blocks(out_MK):
            total = torch.zeros_like(out_MK[block], dtype=dtype)
            for a, b in zip(a_nM[:, block].split(span), b_nK.split(span), strict=True):
                total.addmm_(a.to(dtype).T, b.to(dtype))
            out_MK[block] = total


def _where(out: Tensor) -> Tensor | None:
    """`out`, if matmuls may write there: their dtype is its own."""
    return out if _compute_dtype(out.dtype) == out.dtype else None


def _blocks(w_MK: Tensor) -> list[slice]:
    """Rows of a weight that are widened together."""
    return [slice(i, i + _WEIGHT_ROWS_WIDENED) for i in range(0, len(w_MK), _WEIGHT_ROWS_WIDENED)]


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """bfloat16 where the CPU multiplies it natively, float32 in its place elsewhere."""
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return dtype
