"""Contract of experts/torch_path.py: bounded memory, one rounding, and no gradient that nobody wants."""

import nki_moe
import pytest
import torch
from moe_cases import DTYPES, check_grouped, problem, routed_problem
from nki_moe.experts import torch_path


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NKI_MOE_BACKEND", "torch")


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_expert_may_own_more_rows_than_are_widened_at_a_time(dtype: torch.dtype) -> None:
    check_grouped(nki_moe.grouped_mlp, [0, 2100, 3], 2103, 16, 8, dtype)


def test_sums_over_a_tokens_experts_are_rounded_once() -> None:
    x, experts, scores, weights = routed_problem(64, 16, 8, 32, 16, torch.bfloat16)
    y = nki_moe.routed_mlp(x, experts, scores, *weights)
    wide = nki_moe.routed_mlp(x.float(), experts, scores, *(w.float() for w in weights))
    assert (y.float() - wide).abs().max() <= wide.abs().max() * 2**-7


def test_frozen_weights_cost_no_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("a weight's gradient was computed")

    x, counts, weights = problem([4, 5], 9, 24, 40, torch.float32)
    y = nki_moe.grouped_mlp(x, counts, *(w.detach() for w in weights))
    monkeypatch.setattr(torch_path, "outer", fail)
    y.sum().backward()
    assert x.grad is not None
