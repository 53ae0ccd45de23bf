"""The operators' functions with AWS's kernels doing the work, as experts.torch_path does it in torch.

How a kernel is started is the argument: on nki-sim (`simulated`), or on Trainium (neuron.py). Dimensions as in
layout.py.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nki_moe.nkilib import block_size, check
from nki_moe.nkilib.layout import blocks, blockwise, score_gradients, weight_gradients, with_padding
from nki_moe.work import Work

__all__ = ["Nkilib", "simulated"]

LNC = 2


class Nkilib:
    """AWS's kernels as the operators want their work done, started by run."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def saved_shape(self, rows: int, experts: int, hidden: int, dim: int) -> tuple[int, ...]:
        """Shape of what forward keeps: gate and up, then the experts' outputs, of every place in every block."""
        B = block_size(rows, experts)
        return (blocks(rows, experts, B) * B * (2 * hidden + dim),)

    def forward(self, x: Tensor, work: Work, save: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Compute what experts.torch_path.forward does."""
        from nki_moe.nkilib import kernel

        rows, w1 = work.rows(x), work.w1_EFD
        check(rows, *w1.shape, dtype=x.dtype)
        B = block_size(rows, w1.shape[0])
        blocked = blockwise(x, work, B)
        none = torch.empty(0, dtype=torch.int32, device=x.device)
        out = self.run(kernel.forward, LNC, *blocked, block_size=B, save=save)
        if not save:
            return (out if isinstance(out, Tensor) else out[0])[:-1].contiguous(), x.new_empty((0,)), none
        kept = x.new_empty(self.saved_shape(rows, *w1.shape))
        for part, value in zip(self._parts(kept, rows, *w1.shape), out[1:], strict=True):
            part.copy_(value)
        return out[0][:-1].contiguous(), kept, none

    def backward(
        self, dy: Tensor, x: Tensor, work: Work, saved: Tensor, _tables: Tensor, weights: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What experts.torch_path.backward computes. AWS's kernel computes all gradients, wanted or not."""
        from nki_moe.nkilib import kernel

        rows, ws = work.rows(x), work[1:4]
        B = block_size(rows, ws[0].shape[0])
        blocked = blockwise(x, work, B)
        kept = self._parts(saved, rows, *ws[0].shape)
        dhidden, daffinities, dgate_up, ddown = self.run(
            kernel.backward, LNC, *blocked, *kept, with_padding(dy), block_size=B
        )
        dscores = dy.new_empty((0,))
        if work.scores_TK is not None:
            dscores = score_gradients(daffinities, work)
        dws = weight_gradients(dgate_up, ddown) if weights else tuple(w.new_empty((0,)) for w in ws)
        return dhidden[:-1].contiguous(), dscores, *dws

    def tables_shape(self, x: Tensor, work: Work) -> tuple[int, ...]:
        """Shape of the routing tables that forward keeps: none, since AWS's kernels have tables of their own."""
        return (0,)

    def _parts(self, saved: Tensor, rows: int, experts: int, hidden: int, dim: int) -> tuple[Tensor, Tensor]:
        B = block_size(rows, experts)
        N = blocks(rows, experts, B)
        gate_up, down = saved.split([N * B * 2 * hidden, N * B * dim])
        return gate_up.view(N, 2, hidden, B), down.view(N, B, dim)


def simulated(kernel: Any, lnc: int, *tensors: Tensor, **constants: Any) -> Any:
    """What kernel[lnc](*tensors, **constants) returns on nki-sim.

    What AWS's kernels do against the simulator's rules is recorded rather than raised: backward zeroes the affinities'
    gradients without a barrier before it adds to them. Cores take turns, so that these come out right; other orders are
    possible.
    """
    nki = import_module("nki_sim")
    with nki.checks(record=("unwritten-output", "race", "uninitialized")):
        program = nki.trace(kernel[lnc], tensors, **constants)
        return program.run(*tensors, order="alternate", **constants).outputs
