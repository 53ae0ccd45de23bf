"""Contract of experts/op.py: the operators pass torch's own checks and compile once for every routing."""

import nki_moe
import pytest
import torch
from moe_cases import DTYPES, problem, routed_problem, with_gradients
from nki_moe.experts import op
from torch._dynamo.testing import CompileCounterWithBackend


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NKI_MOE_BACKEND", "torch")


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_passes(dtype: torch.dtype) -> None:
    x, counts, weights = problem([4, 0, 9], 13, 24, 40, dtype)
    torch.library.opcheck(op.forward, (x, counts, *weights, None, None, None, True, "own"))
    torch.library.opcheck(
        op.forward, (x, counts, *weights, None, None, None, False, "own"), test_utils=("test_schema", "test_faketensor")
    )
    y, saved, tables = op.forward(x.detach(), counts, *(w.detach() for w in weights), None, None, None, True, "own")
    args = (y, x.detach(), counts, *(w.detach() for w in weights), None, None, None, saved, tables)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    for wanted in (True, False):
        torch.library.opcheck(op.backward, (*args, wanted, "own"), test_utils=tests)
    turned = (x.detach().T.contiguous().T.requires_grad_(), counts, *(w.detach().mT.contiguous().mT for w in weights))
    torch.library.opcheck(
        op.forward, (*turned, None, None, None, True, "own")
    )  # results lie in order whatever the arguments do


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


def test_nothing_is_kept_when_no_gradient_is_wanted() -> None:
    x, counts, weights = problem([4, 5], 9, 24, 40, torch.float32)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t), torch.no_grad():
        nki_moe.grouped_mlp(x, counts, *weights)
    assert not kept
    assert op.forward(x, counts, *weights, None, None, None, False, "own")[1].numel() == 0
