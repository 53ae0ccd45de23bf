"""Inputs for the expert MLP's tests, and the definition in float32 with autograd that everything is held against."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from nki_moe.experts import reference
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]


def problem(
    counts: Sequence[int], rows: int, D: int, F: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """x_RD whose rows past the last expert's are NaN, counts_E, and w1, w2, w3."""
    g = torch.Generator().manual_seed(seed)
    E = len(counts)
    x = torch.randn(rows, D, generator=g).to(dtype)
    x[sum(counts) :] = float("nan")
    w1, w2, w3 = (
        (torch.randn(s, generator=g) * 0.1).to(dtype).requires_grad_() for s in ((E, F, D), (E, D, F), (E, F, D))
    )
    return x.requires_grad_(), torch.tensor(counts), (w1, w2, w3)


def routed_problem(
    T: int, E: int, K: int, D: int, F: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """x_TD, experts_TK (all different for a token), scores_TK in float32, weights."""
    x, _, weights = problem([0] * (E - 1) + [T], T, D, F, dtype, seed)
    g = torch.Generator().manual_seed(seed + 1)
    experts = torch.rand(T, E, generator=g).topk(K).indices
    return x, experts, torch.rand(T, K, generator=g).requires_grad_(), weights


def with_gradients(function: Callable[..., Tensor], *args: Tensor, seed: int = 7) -> dict[str, Tensor]:
    """The result and the gradient of each argument that wants one."""
    y = function(*args)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype)
    wanted = [a for a in args if a.requires_grad]
    return {"y": y.detach(), **dict(zip("abcde", torch.autograd.grad(y, wanted, dy), strict=False))}


def definition(function: Callable[..., Tensor], *args: Tensor, seed: int = 7) -> dict[str, Tensor]:
    """with_gradients of the reference, in float32, with zeros where x is padding."""
    wide = [a.detach().float().nan_to_num(0).requires_grad_() if a.is_floating_point() else a for a in args]
    return with_gradients(function, *wide, seed=seed)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Relative L2 within tolerance, everything finite, exact zeros where all of the expected is zero."""
    assert found.keys() == expected.keys()
    for name, e in expected.items():
        f = found[name].float()
        assert f.shape == e.shape, name
        assert torch.isfinite(f).all(), f"{name} is not finite"
        error = float((f - e).norm() / e.norm().clamp(min=1e-20))
        assert error <= tolerance, f"{name}: relative error {error:.2e}, at most {tolerance}"


def check_grouped(grouped_mlp: Any, counts: Sequence[int], rows: int, D: int, F: int, dtype: torch.dtype) -> None:
    """One routing, forward and backward, against the definition."""
    x, counts_E, weights = problem(counts, rows, D, F, dtype, seed=sum(counts) + rows)
    found = with_gradients(grouped_mlp, x, counts_E, *weights)
    assert not found["y"][sum(counts) :].any() and not found["a"][sum(counts) :].any()
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert_close(found, definition(reference.grouped_mlp, x, counts_E, *weights), tolerance)


def check_routed(routed_mlp: Any, T: int, E: int, K: int, D: int, F: int, dtype: torch.dtype) -> None:
    """Gather, experts and combine as one, forward and backward, against the definition."""
    x, experts, scores, weights = routed_problem(T, E, K, D, F, dtype, seed=T)
    found = with_gradients(routed_mlp, x, experts, scores, *weights)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert_close(found, definition(reference.routed_mlp, x, experts, scores, *weights), tolerance)
