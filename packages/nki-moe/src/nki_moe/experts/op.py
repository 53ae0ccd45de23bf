"""The expert MLP as differentiable torch operators: nki_moe::grouped_mlp and its backward.

Counts are data: neither a change of routing nor torch.compile makes another program. What runs is decided in
backend.py; whose kernels, by `provider`. nki_moe/api.py has the functions that users call.

T tokens, K experts a token, R rows (T*K when routed), E experts, D model dim, F hidden dim.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nki_moe import simulated
from nki_moe.arguments import no_second_derivative
from nki_moe.backend import choose
from nki_moe.experts import launch, torch_path
from nki_moe.nkilib import launch as nkilib
from nki_moe.nkilib.launch import Nkilib

__all__ = ["Ops", "Own", "backward", "define", "differentiate", "forward"]


class Own:
    """This package's kernels as the operators want their work done, started by run (launch.py)."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def saved_shape(self, rows: int, experts: int, hidden: int, dim: int) -> tuple[int, ...]:
        """Shape of what forward keeps."""
        return launch.saved_shape(rows, experts, hidden)

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        """What experts.torch_path.forward computes, by the kernel."""
        return launch.forward(*args, run=self.run)  # type: ignore[misc]  # mypy: *args might be longer

    def backward(
        self, dy: Tensor, x: Tensor, counts_E: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What experts.torch_path.backward computes, by the kernels."""
        w1, w2, w3, order_R, scores_TK, saved, wanted = rest
        dx, dscores, dgu = launch.backward_data(dy, counts_E, w1, w2, w3, order_R, scores_TK, saved, self.run)
        if not wanted:
            return dx, dscores, dy.new_empty((0,)), dy.new_empty((0,)), dy.new_empty((0,))
        return dx, dscores, *launch.backward_weights(dy, x, counts_E, order_R, scores_TK, saved, dgu, self.run)


def implementation(device_type: str, provider: str) -> Any:
    """What has the forward and backward that do the work, away from Trainium."""
    if choose(device_type, provider) == "torch":
        return torch_path
    return Own(simulated.run) if provider == "own" else Nkilib(nkilib.simulated)


class Ops(NamedTuple):
    """The operators of one backend."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def _rows(x: Tensor, order_R: Tensor | None) -> int:
    return x.shape[0] if order_R is None else order_R.shape[0]


def _or_torch(todo: Any, rows: int) -> Any:
    """What does the work; torch for no rows at all, which no kernel takes."""
    return todo if todo is torch_path or rows else torch_path


def define(register: Callable[[str], Callable[..., Any]], work: Callable[[str, str], Any], *, look: bool) -> Ops:
    """The operators of one backend: register(name) decorates an annotated function; work(device type, provider) has the
    functions that do the work; look: whether at counts, before anything runs.
    """

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
        provider: str,
    ) -> tuple[Tensor, Tensor]:
        """y and what backward needs (empty unless `save`); fused when order_R and scores_TK are given."""
        rows = _rows(x, order_R)
        if look:
            need_counts(counts_E.tolist(), rows, order_R is not None)
        todo = _or_torch(work(x.device.type, provider), rows)
        return todo.forward(x, counts_E, w1, w2, w3, order_R, scores_TK, save)

    @register("grouped_mlp_backward")
    def backward(
        dy: Tensor,
        x: Tensor,
        counts_E: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        order_R: Tensor | None,
        scores_TK: Tensor | None,
        saved: Tensor,
        weights: bool,
        provider: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """dx, dscores_TK (empty unless fused), and dw1, dw2, dw3 (empty unless `weights`)."""
        todo = _or_torch(work(dy.device.type, provider), _rows(dy, order_R))
        return todo.backward(dy, x, counts_E, w1, w2, w3, order_R, scores_TK, saved, weights)

    return Ops(forward, backward)


def need_counts(counts: list[int], rows: int, routed: bool) -> None:
    """ValueError for counts that cannot be, and for choices of no expert."""
    used, least = sum(counts), min(counts, default=0)
    if routed and used < rows:
        raise ValueError(
            f"{rows - used} of {rows} choices in experts_TK are of no expert; there are {len(counts)}: 0 to "
            f"{len(counts) - 1}"
        )
    if used > rows or least < 0:
        raise ValueError(
            f"counts_E adds up to {used} (smallest {least}) but there are {rows} rows; "
            "counts must not be negative nor add up to more than the rows"
        )


def differentiate(ops: Ops) -> tuple[Callable[..., None], Callable[..., Any]]:
    """setup_context and backward for register_autograd: one formula for every backend."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, counts_E, w1, w2, w3, order_R, scores_TK, _save, ctx.provider = inputs
        ctx.save_for_backward(x, counts_E, w1, w2, w3, order_R, scores_TK, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, dy: Tensor | None, _dsaved: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 9
        weights = any(ctx.needs_input_grad[2:5])
        saved = ctx.saved_tensors  # read once: activation checkpointing gives them once
        dx, dscores, dw1, dw2, dw3 = ops.backward(dy.contiguous(), *saved, weights, ctx.provider)
        dws = (dw1, dw2, dw3) if weights else (None, None, None)
        return dx, None, *dws, None, None if saved[6] is None else dscores, None, None

    return setup_context, backward


forward, backward = define(
    lambda name: torch.library.custom_op(f"nki_moe::{name}", mutates_args=()), implementation, look=True
)
_setup_context, _backward = differentiate(Ops(forward, backward))
torch.library.register_autograd("nki_moe::grouped_mlp", _backward, setup_context=_setup_context)
torch.library.register_autograd("nki_moe::grouped_mlp_backward", no_second_derivative)


@torch.library.register_fake("nki_moe::grouped_mlp")
def _(x, counts_E, w1, w2, w3, order_R, scores_TK, save, provider):  # type: ignore[no-untyped-def]
    rows = _rows(x, order_R)
    shape = _or_torch(implementation(x.device.type, provider), rows).saved_shape(rows, *w1.shape)
    return x.new_empty(x.shape), x.new_empty(shape if save else (0,))


@torch.library.register_fake("nki_moe::grouped_mlp_backward")
def _(dy, x, counts_E, w1, w2, w3, order_R, scores_TK, saved, weights, provider):  # type: ignore[no-untyped-def]
    dscores = dy.new_empty((0,)) if scores_TK is None else scores_TK.new_empty(scores_TK.shape)
    return dy.new_empty(dy.shape), dscores, *(dy.new_empty(w.shape if weights else (0,)) for w in (w1, w2, w3))
