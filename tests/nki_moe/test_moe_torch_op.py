"""The contract: nki_moe.grouped_mlp and routed_mlp are ordinary torch operators. They compute the definition and its gradients
whatever the routing, never read rows that belong to no expert, and compile once for every routing.
"""

import nki_moe
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import check_grouped, check_routed, problem, routed_problem, with_gradients
from nki_moe.experts import op, torch_path
from torch._dynamo.testing import CompileCounterWithBackend

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NKI_MOE_BACKEND", "torch")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(0, 5), st.sampled_from(DTYPES))
def test_any_routing_gives_the_definition(counts: list[int], spare: int, dtype: torch.dtype) -> None:
    if sum(counts) == 0:
        counts = [*counts, 1]
    check_grouped(nki_moe.grouped_mlp, counts, sum(counts) + spare, 24, 40, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_expert_may_own_more_rows_than_are_widened_at_a_time(dtype: torch.dtype) -> None:
    check_grouped(nki_moe.grouped_mlp, [0, 2100, 3], 2103, 16, 8, dtype)


@settings(max_examples=20, deadline=None)
@given(st.integers(16, 60), st.integers(1, 8), st.integers(1, 4), st.sampled_from(DTYPES))
def test_routed_gives_the_definition_and_the_gradient_of_scores(T: int, E: int, K: int, dtype: torch.dtype) -> None:
    check_routed(nki_moe.routed_mlp, T, E, min(K, E), 24, 40, dtype)


def test_sums_over_a_tokens_experts_are_rounded_once() -> None:
    x, experts, scores, weights = routed_problem(64, 16, 8, 32, 16, torch.bfloat16)
    y = nki_moe.routed_mlp(x, experts, scores, *weights)
    wide = nki_moe.routed_mlp(x.float(), experts, scores, *(w.float() for w in weights))
    assert (y.float() - wide).abs().max() <= wide.abs().max() * 2**-7


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_passes(dtype: torch.dtype) -> None:
    x, counts, weights = problem([4, 0, 9], 13, 24, 40, dtype)
    torch.library.opcheck(op.forward, (x, counts, *weights, None, None, True, "own"))
    torch.library.opcheck(
        op.forward, (x, counts, *weights, None, None, False, "own"), test_utils=("test_schema", "test_faketensor")
    )
    y, saved = op.forward(x.detach(), counts, *(w.detach() for w in weights), None, None, True, "own")
    args = (y, x.detach(), counts, *(w.detach() for w in weights), None, None, saved)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    for wanted in (True, False):
        torch.library.opcheck(op.backward, (*args, wanted, "own"), test_utils=tests)


def test_compiles_whole_and_once_for_every_routing() -> None:
    x, _, weights = problem([10, 10, 10], 30, 24, 40, torch.float32)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(nki_moe.grouped_mlp, fullgraph=True, backend=counter)
    for counts in ([10, 10, 10], [30, 0, 0], [0, 1, 2], [0, 0, 0]):
        counts_E = torch.tensor(counts)
        found = with_gradients(compiled, x, counts_E, *weights)
        eager = with_gradients(nki_moe.grouped_mlp, x, counts_E, *weights)
        assert all(torch.equal(found[name], eager[name]) for name in eager)
    assert counter.frame_count == 1


def test_routed_compiles_whole_and_once_for_every_routing() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(nki_moe.routed_mlp, fullgraph=True, backend=counter)
    for seed in range(3):
        x, experts, scores, weights = routed_problem(20, 6, 2, 24, 40, torch.float32, seed)
        with_gradients(compiled, x, experts, scores, *weights)
    assert counter.frame_count == 1


def test_frozen_weights_cost_no_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("a weight's gradient was computed")

    x, counts, weights = problem([4, 5], 9, 24, 40, torch.float32)
    y = nki_moe.grouped_mlp(x, counts, *(w.detach() for w in weights))
    monkeypatch.setattr(torch_path, "outer", fail)
    y.sum().backward()
    assert x.grad is not None


def test_nothing_is_kept_when_no_gradient_is_wanted() -> None:
    x, counts, weights = problem([4, 5], 9, 24, 40, torch.float32)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t), torch.no_grad():
        nki_moe.grouped_mlp(x, counts, *weights)
    assert not kept
    assert op.forward(x, counts, *weights, None, None, False, "own")[1].numel() == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"counts": torch.tensor([4, 5, 6])}, "one int32 or int64 for each of the 2 experts"),
        ({"counts": torch.tensor([4.0, 5.0])}, "float32"),
        ({"counts": torch.tensor([8, 5])}, "adds up to 13 .* 9 rows"),
        ({"counts": torch.tensor([-1, 5])}, "smallest -1"),
        ({"x": torch.zeros(9, 25)}, r"\(rows, D\)"),
        ({"x": torch.zeros(9, 24, dtype=torch.bfloat16)}, "one of bfloat16 and float32 for all"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(change: dict[str, torch.Tensor], words: str) -> None:
    x, counts, weights = problem([4, 5], 9, 24, 40, torch.float32)
    with pytest.raises(ValueError, match=words):
        nki_moe.grouped_mlp(change.get("x", x), change.get("counts", counts), *weights)
