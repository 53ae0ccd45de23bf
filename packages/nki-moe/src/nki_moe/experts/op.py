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
from nki_moe.experts import torch_path
from nki_moe.experts.launch import Own
from nki_moe.nkilib import launch as nkilib
from nki_moe.nkilib.launch import Nkilib
from nki_moe.work import Work

__all__ = ["Ops", "backward", "define", "differentiate", "forward"]


def implementation(device_type: str, provider: str) -> Any:
    """What has the forward and backward that do the work, away from Trainium."""
    if choose(device_type, provider) == "torch":
        return torch_path
    return Own(simulated.run) if provider == "own" else Nkilib(nkilib.simulated)


class Ops(NamedTuple):
    """The operators of one backend."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


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
        row_TK: Tensor | None,
        choice_R: Tensor | None,
        scores_TK: Tensor | None,
        save: bool,
        provider: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """y, and what backward needs, values and routing tables (empty unless `save`).

        Fused when row_TK, choice_R and scores_TK are given.
        """
        asked = Work(counts_E, w1, w2, w3, row_TK, choice_R, scores_TK)
        rows = asked.rows(x)
        if look:
            need_counts(counts_E.tolist(), rows, asked.fused)
        result: tuple[Tensor, Tensor, Tensor] = _or_torch(work(x.device.type, provider), rows).forward(x, asked, save)
        return result

    @register("grouped_mlp_backward")
    def backward(
        dy: Tensor,
        x: Tensor,
        counts_E: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        row_TK: Tensor | None,
        choice_R: Tensor | None,
        scores_TK: Tensor | None,
        saved: Tensor,
        tables: Tensor,
        weights: bool,
        provider: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """dx, dscores_TK (empty unless fused), and dw1, dw2, dw3 (empty unless `weights`)."""
        asked = Work(counts_E, w1, w2, w3, row_TK, choice_R, scores_TK)
        todo = _or_torch(work(dy.device.type, provider), asked.rows(dy))
        result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = todo.backward(dy, x, asked, saved, tables, weights)
        return result

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

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        *tensors, _save, ctx.provider = inputs
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 10
        weights = any(ctx.needs_input_grad[2:5])
        saved = ctx.saved_tensors  # read once: activation checkpointing gives them once
        dx, dscores, dw1, dw2, dw3 = ops.backward(dy.contiguous(), *saved, weights, ctx.provider)
        dws = (dw1, dw2, dw3) if weights else (None, None, None)
        scored = saved[len(Work._fields)] is not None
        return dx, None, *dws, None, None, dscores if scored else None, None, None

    return setup_context, backward


forward, backward = define(
    lambda name: torch.library.custom_op(f"nki_moe::{name}", mutates_args=()), implementation, look=True
)
_setup_context, _backward = differentiate(Ops(forward, backward))
torch.library.register_autograd("nki_moe::grouped_mlp", _backward, setup_context=_setup_context)
torch.library.register_autograd("nki_moe::grouped_mlp_backward", no_second_derivative)


@torch.library.register_fake("nki_moe::grouped_mlp")
def _(x, counts_E, w1, w2, w3, row_TK, choice_R, scores_TK, save, provider):  # type: ignore[no-untyped-def]
    asked = Work(counts_E, w1, w2, w3, row_TK, choice_R, scores_TK)
    rows = asked.rows(x)
    todo = _or_torch(implementation(x.device.type, provider), rows)
    saved, tables = (todo.saved_shape(rows, *w1.shape), todo.tables_shape(x, asked)) if save else ((0,), (0,))
    return x.new_empty(x.shape), x.new_empty(saved), x.new_empty(tables, dtype=torch.int32)


@torch.library.register_fake("nki_moe::grouped_mlp_backward")
def _(dy, x, counts_E, w1, w2, w3, row_TK, choice_R, scores_TK, saved, tables, weights, provider):  # type: ignore[no-untyped-def]
    dscores = dy.new_empty((0,)) if scores_TK is None else scores_TK.new_empty(scores_TK.shape)
    return dy.new_empty(dy.shape), dscores, *(dy.new_empty(w.shape if weights else (0,)) for w in (w1, w2, w3))
