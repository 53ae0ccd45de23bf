"""Contract of api.py: nki_moe.grouped_mlp and routed_mlp compute the definition and its gradients, and refuse
what does not fit with what would."""

import nki_moe
import pytest
import torch
import torch.autograd.forward_ad as forward_mode
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import DTYPES, check_grouped, check_routed, problem, routed_problem, with_gradients


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NKI_MOE_BACKEND", "torch")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(0, 5), st.sampled_from(DTYPES))
def test_any_routing_gives_the_definition(counts: list[int], spare: int, dtype: torch.dtype) -> None:
    if sum(counts) == 0:
        counts = [*counts, 1]
    check_grouped(nki_moe.grouped_mlp, counts, sum(counts) + spare, 24, 40, dtype)


@settings(max_examples=20, deadline=None)
@given(st.integers(16, 60), st.integers(1, 8), st.integers(1, 4), st.sampled_from(DTYPES))
def test_routed_gives_the_definition_and_the_gradient_of_scores(T: int, E: int, K: int, dtype: torch.dtype) -> None:
    check_routed(nki_moe.routed_mlp, T, E, min(K, E), 24, 40, dtype)


def test_tensors_may_lie_in_memory_as_they_like() -> None:
    x, experts, scores, weights = routed_problem(20, 6, 2, 24, 40, torch.float32)
    turned = [t.detach().mT.contiguous().mT.requires_grad_() for t in (x, scores, *weights)]
    assert not any(t.is_contiguous() for t in turned)
    found = with_gradients(nki_moe.routed_mlp, turned[0], experts.T.contiguous().T, *turned[1:])
    wanted = with_gradients(nki_moe.routed_mlp, x, experts, scores, *weights)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])


def test_one_expert_of_160_and_160_experts() -> None:
    for counts in ([0] * 80 + [50] + [0] * 79, [i % 3 for i in range(160)]):
        check_grouped(nki_moe.grouped_mlp, counts, sum(counts), 16, 8, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    """Matmuls within the operator would be cast as well, to another dtype than the rest."""
    x, counts, weights = problem([4, 0, 9], 13, 24, 40, dtype)
    plain = with_gradients(nki_moe.grouped_mlp, x, counts, *weights)
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(nki_moe.grouped_mlp, x, counts, *weights)
    assert all(torch.equal(found[name], plain[name]) and found[name].dtype is dtype for name in plain)


def test_a_second_derivative_is_refused_by_name() -> None:
    x, counts, weights = problem([4, 5], 9, 24, 40, torch.float32)
    (dx,) = torch.autograd.grad(nki_moe.grouped_mlp(x, counts, *weights).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"differentiated once.*nki_moe\.experts\.reference"):
        dx.sum().backward()


def test_forward_mode_is_refused_rather_than_taken_for_a_constant() -> None:
    x, counts, weights = problem([4, 5], 9, 24, 40, torch.float32)
    q, angles = torch.zeros(1, 9, 1, 24), torch.zeros(9, 24)
    with forward_mode.dual_level():
        dual = forward_mode.make_dual(x.detach(), torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            nki_moe.grouped_mlp(dual, counts, *weights)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            nki_moe.rope(dual.view_as(q), q, angles, angles)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda t: nki_moe.grouped_mlp(t, counts, *weights), (x.detach(),), (torch.ones_like(x),))


@pytest.mark.parametrize("i", range(5))
def test_each_argument_alone_may_want_a_gradient(i: int) -> None:
    x, experts, scores, weights = routed_problem(20, 6, 2, 24, 40, torch.float32)
    every = torch.autograd.grad(nki_moe.routed_mlp(x, experts, scores, *weights).sum(), [x, scores, *weights])
    alone = [t.detach().requires_grad_(j == i) for j, t in enumerate((x, scores, *weights))]
    nki_moe.routed_mlp(alone[0], experts, *alone[1:]).sum().backward()
    assert [t.grad is not None for t in alone] == [j == i for j in range(5)]
    assert torch.equal(alone[i].grad, every[i])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"counts": torch.tensor([4, 5, 6])}, "one int32 or int64 for each of the 2 experts"),
        ({"counts": torch.tensor([4.0, 5.0])}, "float32"),
        ({"counts": torch.tensor([8, 5])}, "adds up to 13 .* 9 rows"),
        ({"counts": torch.tensor([-1, 5])}, "smallest -1"),
        ({"x": torch.zeros(9, 25)}, r"\(rows, D\)"),
        ({"x": torch.zeros(9, 24, dtype=torch.bfloat16)}, "one of bfloat16 and float32 for all"),
        ({"x": torch.zeros(9, 24, device="meta")}, "x on meta, w1 on cpu.*one device for all"),
        ({"counts": torch.tensor([4, 5], device="meta")}, "counts_E on meta; expected one device"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(change: dict[str, torch.Tensor], words: str) -> None:
    x, counts, weights = problem([4, 5], 9, 24, 40, torch.float32)
    with pytest.raises(ValueError, match=words):
        nki_moe.grouped_mlp(change.get("x", x), change.get("counts", counts), *weights)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"experts": torch.full((9, 2), 2)}, "18 of 18 choices in experts_TK are of no expert; there are 2: 0 to 1"),
        ({"experts": torch.full((9, 2), -1)}, "18 of 18 choices"),
        ({"experts": torch.zeros(9, 2)}, r"experts_TK is \(9, 2\) float32 .* expected int32 or int64"),
        ({"scores": torch.zeros(9, 2, dtype=torch.int64)}, "and floats"),
        ({"scores": torch.zeros(9, 3)}, r"expected \(T, K\) for both with T = 9"),
        ({"scores": torch.zeros(9, 2, device="meta")}, "scores_TK on meta"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "sim"])
def test_choices_that_do_not_fit_are_refused_with_what_would(
    change: dict[str, torch.Tensor], words: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NKI_MOE_BACKEND", backend)
    x, _, weights = problem([4, 5], 9, 24, 40, torch.float32)
    arguments = {"experts": torch.zeros(9, 2, dtype=torch.int64), "scores": torch.ones(9, 2), **change}
    with pytest.raises(ValueError, match=words):
        nki_moe.routed_mlp(x, arguments["experts"], arguments["scores"], *weights)
