"""The operators' functions with this package's kernels doing the work, as experts.torch_path does it in torch.

How a kernel is started is an argument: on nki-sim, or on Trainium (neuron.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nki_moe import simulated
from nki_moe.assumptions import assumed
from nki_moe.limits import Fit, check
from nki_moe.tables import Tables, tables
from nki_moe.work import Work

__all__ = ["Own"]

_DATA = ("passes", "data_expert", "data_rows", "data_reads")
_SUMS = ("sum_expert", "sum_rows", "sum_reads", "sum_keep")
_EDGE = ("clear", "row_TK", "score_R")


class Own:
    """This package's kernels, started by run."""

    def __init__(self, run: Callable[..., Any] = simulated.run) -> None:
        self.run = run

    def saved_shape(self, rows: int, experts: int, hidden: int, dim: int) -> tuple[int, ...]:
        """Shape of what forward keeps: gate and up of each row."""
        return (rows, 2 * hidden)

    def tables_shape(self, x: Tensor, work: Work) -> tuple[int, ...]:
        """Shape of the routing tables that forward keeps for backward."""
        fit, choices = _fit(x, work), 0 if work.scores_TK is None else work.scores_TK.shape[1]
        return (Tables.packed(work.rows(x), work.w1_EFD.shape[0], x.shape[0], choices, fit.blocks, fit.lnc),)

    def forward(self, x: Tensor, work: Work, save: bool) -> tuple[Tensor, Tensor, Tensor]:
        """y, (R, D) or (T, D) when fused; `saved_shape`, and the tables, for backward: both empty unless `save`."""
        from nki_moe.experts.kernel_forward import forward

        rows, fit = work.rows(x), _fit(x, work)
        t = tables(work.counts_E, rows, work.placement, work.scores_TK, fit.blocks, fit.lnc)
        out = self.run(
            forward,
            fit.lnc,
            *(x, work.w1_EFD, work.w2_EDF, work.w3_EFD, *_of(t, *_DATA, *_EDGE)),
            rows=rows,
            fused=work.fused,
            save=save,
            by_dma=_by_dma(x),
        )
        y, *kept = _many(out)
        return (y, kept[0], t.pack()) if save else (y, x.new_empty((0,)), t.passes.new_empty((0,)))

    def backward(
        self, dy: Tensor, x: Tensor, work: Work, saved: Tensor, packed: Tensor, weights: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """dx, dscores_TK (empty unless fused), and dw1, dw2, dw3 (empty unless `weights`), rounded once."""
        from nki_moe.experts.kernel_backward import backward

        rows, fit = work.rows(dy), _fit(dy, work)
        K = 0 if work.scores_TK is None else work.scores_TK.shape[1]
        t = Tables.unpack(packed, rows, work.w1_EFD.shape[0], dy.shape[0], K, fit.blocks, fit.lnc)
        out = self.run(
            backward,
            fit.lnc,
            *(dy, x, work.w1_EFD, work.w2_EDF, work.w3_EFD, saved, *_of(t, *_DATA, *_SUMS, *_EDGE)),
            rows=rows,
            fused=work.fused,
            weights=weights,
            f_share=fit.f_share,
            d_share=fit.d_share,
            by_dma=_by_dma(dy),
        )
        dx, *rest = _many(out)
        dscores = dy.new_empty((0,))
        if work.scores_TK is not None:
            of_rows, *rest = rest
            dscores = of_rows.view(-1)[t.row_TK].to(work.scores_TK.dtype)
        dw1, dw2, dw3 = rest if weights else (dy.new_empty((0,)) for _ in range(3))
        return dx, dscores, dw1, dw2, dw3


def _fit(x: Tensor, work: Work) -> Fit:
    return check(work.rows(x), *work.w1_EFD.shape, dtype=x.dtype)


def _by_dma(x: Tensor) -> bool:
    """Whether DMA transposes what it gathers: only two-byte types, and only where the user says that it works."""
    return x.dtype == torch.bfloat16 and assumed("gather-transpose")


def _of(t: Tables, *names: str) -> tuple[Tensor, ...]:
    return tuple(getattr(t, name) for name in names)


def _many(out: Any) -> tuple[Tensor, ...]:
    """A kernel's results; one that returns one tensor gives it bare."""
    return (out,) if isinstance(out, Tensor) else tuple(out)
