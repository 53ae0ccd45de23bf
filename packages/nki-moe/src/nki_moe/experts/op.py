"""The expert MLP as differentiable torch operators: nki_moe::grouped_mlp and its backward.

    y_RD = nki_moe.grouped_mlp(x_RD, counts_E, w1_EFD, w2_EDF, w3_EFD)              # rows sorted by expert
    y_TD = nki_moe.routed_mlp(x_TD, experts_TK, scores_TK, w1_EFD, w2_EDF, w3_EFD)  # gather, experts, combine in one

Counts are data: neither a change of routing nor torch.compile makes another program. What runs is decided in backend.py; whose
kernels, by `provider`.

T tokens, K experts a token, R rows (T*K when routed), E experts, D model dim, F hidden dim.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nki_moe import simulated
from nki_moe.arguments import need_one_device, no_second_derivative, refuse_forward_mode
from nki_moe.backend import Provider, choose
from nki_moe.experts import launch, torch_path
from nki_moe.nkilib import launch as nkilib
from nki_moe.nkilib.launch import Nkilib

__all__ = ["grouped_mlp", "routed_mlp"]

_choose = torch.compiler.assume_constant_result(choose)


def grouped_mlp(
    x_RD: Tensor, counts_E: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor, *, provider: Provider = "own"
) -> Tensor:
    """y = (silu(x w1) * (x w3)) w2 for each row with its expert's weights; differentiable in x and the weights.

    Args:
        x_RD: rows sorted by expert, float32 or bfloat16. Rows past the last expert's are ignored (they may hold
            anything) and are zero in y and in the gradient.
        counts_E: rows of each expert, int32 or int64; zeros are fine.
        w1_EFD, w2_EDF, w3_EFD: gate, down and up projections in TorchTitan's layout, same dtype as x.
        provider: whose kernels, where kernels run: "own", or "nkilib" for AWS's (nki_moe.nkilib.check has their limits).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together; a provider that the backend does not have; counts that are
            negative or exceed the rows (on Trainium nobody looks: it would stop the device at every step).
        ModuleNotFoundError: a backend or provider that was asked for and is not installed.
    """
    _validate(x_RD, w1_EFD, w2_EDF, w3_EFD, counts_E=counts_E)
    if counts_E.shape != w1_EFD.shape[:1] or counts_E.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"counts_E is {_describe(counts_E)}; expected one int32 or int64 for each of the {w1_EFD.shape[0]} experts"
        )
    return _run(provider, x_RD, counts_E, w1_EFD, w2_EDF, w3_EFD, None, None)


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
    """Dispatch, experts and combine for experts that all live here: the sum over k of scores[t, k] * expert(x[t]).

    Neither the gathered rows nor the experts' outputs are kept for backward. Differentiable in x, scores and weights.

    Args:
        x_TD: tokens. experts_TK: an int64 or int32 expert for each of a token's K choices, all different.
        scores_TK: routing scores, applied to the experts' outputs in float32; any float dtype.
        w1_EFD, w2_EDF, w3_EFD, provider: as for grouped_mlp; nkilib rounds scores and their gradients to x's dtype.

    Raises: as grouped_mlp, with choices outside 0 to E - 1 in the counts' place.
    """
    _validate(x_TD, w1_EFD, w2_EDF, w3_EFD, experts_TK=experts_TK, scores_TK=scores_TK)
    if experts_TK.dtype not in (torch.int32, torch.int64) or not scores_TK.is_floating_point():
        raise ValueError(
            f"experts_TK is {_describe(experts_TK)} and scores_TK {_describe(scores_TK)}; expected int32 or int64, and floats"
        )
    if experts_TK.shape != scores_TK.shape or experts_TK.ndim != 2 or experts_TK.shape[0] != x_TD.shape[0]:
        raise ValueError(
            f"experts_TK is {_describe(experts_TK)} and scores_TK {_describe(scores_TK)}; expected (T, K) for both "
            f"with T = {x_TD.shape[0]}, the tokens of x"
        )
    E, chosen_R = w1_EFD.shape[0], experts_TK.flatten().long()
    # what is no expert is of one more, last and uncounted, for need_counts to find
    chosen_R = torch.where((chosen_R >= 0) & (chosen_R < E), chosen_R, E)
    counts_E = torch.zeros(E + 1, dtype=torch.int64, device=x_TD.device)
    counts_E = counts_E.scatter_add(0, chosen_R, torch.ones_like(chosen_R))[:E]
    return _run(provider, x_TD, counts_E, w1_EFD, w2_EDF, w3_EFD, chosen_R.argsort(stable=True), scores_TK)


def _run(
    provider: Provider,
    x: Tensor,
    counts_E: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    order_R: Tensor | None,
    scores_TK: Tensor | None,
) -> Tensor:
    inputs = (x, w1, w2, w3) if scores_TK is None else (x, w1, w2, w3, scores_TK)
    refuse_forward_mode(*inputs)
    save = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    op = forward
    if _choose(x.device.type, provider) == "nki":
        from nki_moe import neuron

        neuron.register(x.device.type, provider)
        op = torch.ops.nki_moe.grouped_mlp_nki
    return op(x, counts_E, w1, w2, w3, order_R, scores_TK, save, provider)[0]


class Own:
    """This package's kernels as the operators want their work done, started by run (launch.py)."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def saved_shape(self, rows: int, experts: int, hidden: int, dim: int) -> tuple[int, ...]:
        return launch.saved_shape(rows, experts, hidden)

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        return launch.forward(*args, run=self.run)  # type: ignore[misc]  # mypy: *args might be longer

    def backward(
        self, dy: Tensor, x: Tensor, counts_E: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
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
    """The operators of one backend: register(name) decorates an annotated function; work(device type, provider) has the functions
    that do the work; look: whether at counts, before anything runs."""

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
            f"{rows - used} of {rows} choices in experts_TK are of no expert; there are {len(counts)}: 0 to {len(counts) - 1}"
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


def _validate(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, **routing: Tensor) -> None:
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
    need_one_device(x=x, w1=w1, w2=w2, w3=w3, **routing)


def _describe(t: Tensor) -> str:
    return f"{tuple(t.shape)} {t.dtype}".replace("torch.", "")
