"""The contract: the branch that runs on Trainium registers annotated functions through torch_neuronx, launches the
kernels on both cores, differentiates, compiles whole and once, and proves itself before first use. Run against a strict
stand-in (moe_neuron_stub.py).
"""

import inspect
import sys
import threading
from collections.abc import Iterator
from typing import Any

import moe_neuron_stub as stub
import nki_moe
import nki_sim
import pytest
import torch
from moe_cases import assert_close, definition, problem, routed_problem, with_gradients
from nki_moe import neuron
from nki_moe.experts import reference
from torch._dynamo.testing import CompileCounterWithBackend


@pytest.fixture(autouse=True)
def on_neuron(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    stub.install(monkeypatch)
    neuron._wrapped.cache_clear()
    yield
    nki_sim.uninstall()


def test_runs_the_kernels_eagerly_on_both_cores_after_proving_them() -> None:
    x, counts, weights = problem([3, 0, 37], 40, 256, 256, torch.bfloat16)
    stub.LAUNCHES.clear()
    found = with_gradients(nki_moe.grouped_mlp, x, counts, *weights)
    assert_close(found, definition(reference.grouped_mlp, x, counts, *weights), 1e-2)
    assert set(stub.LAUNCHES) == {("forward", 2), ("backward", 2)}


def test_routed_tokens_and_tensors_that_do_not_lie_in_order() -> None:
    """The stand-in takes contiguous tensors only."""
    x, experts, scores, weights = routed_problem(30, 4, 2, 256, 256, torch.bfloat16)
    turned = [t.detach().mT.contiguous().mT.requires_grad_() for t in (x, scores, *weights)]
    found = with_gradients(nki_moe.routed_mlp, turned[0], experts, *turned[1:])
    assert_close(found, definition(reference.routed_mlp, x, experts, scores, *weights), 1e-2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole_and_once_whatever_the_counts(dynamic: bool) -> None:
    """Sizes that torch.compile made symbolic, on its own or because it was told to, are fixed: a kernel has its
    sizes."""
    torch._dynamo.reset()
    x, _, weights = problem([3, 0, 37], 40, 256, 256, torch.bfloat16)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(nki_moe.grouped_mlp, fullgraph=True, backend=counter, dynamic=dynamic)
    for counts in ([3, 0, 37], [40, 0, 0], [0, 20, 1]):
        counts_E = torch.tensor(counts)
        with torch.no_grad():
            assert torch.equal(compiled(x, counts_E, *weights), nki_moe.grouped_mlp(x, counts_E, *weights)), counts
    assert counter.frame_count == 1
    found, eager = (with_gradients(f, x, torch.tensor([0, 39, 1]), *weights) for f in (compiled, nki_moe.grouped_mlp))
    assert all(torch.equal(found[name], eager[name]) for name in eager)
    assert counter.frame_count == 2  # one more, with gradients


def test_rope_runs_eagerly_and_compiled() -> None:
    q, k = (torch.randn(1, 64, n, 32, requires_grad=True) for n in (2, 1))
    theta = torch.rand(64, 16).repeat(1, 2)
    stub.LAUNCHES.clear()
    out = nki_moe.rope(q, k, theta.cos(), theta.sin())
    back = torch.autograd.grad(out, [q, k], [t.detach() for t in out])
    torch.testing.assert_close(back, (q.detach(), k.detach()))
    compiled = torch.compile(nki_moe.rope, fullgraph=True, backend="aot_eager", dynamic=True)
    assert all(torch.equal(a, b) for a, b in zip(compiled(q, k, theta.cos(), theta.sin()), out, strict=True))
    assert ("rope", 2) in stub.LAUNCHES


def zeroed(out: Any) -> Any:
    return torch.zeros_like(out) if isinstance(out, torch.Tensor) else tuple(torch.zeros_like(t) for t in out)


def test_a_kernel_is_wrapped_once() -> None:
    x, counts, weights = problem([3, 0, 37], 40, 256, 256, torch.bfloat16)
    stub.WRAPPED.clear()
    for _ in range(2):
        with_gradients(nki_moe.grouped_mlp, x, counts, *weights)
    assert sorted(stub.WRAPPED) == ["backward", "forward"]


def test_the_coming_launch_without_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch_neuronx"], "wrap_nki", stub.wrap_nki_without_grid)
    neuron.register("cpu")
    stub.LAUNCHES.clear()
    x, counts, weights = problem([3, 0, 37], 40, 256, 256, torch.bfloat16)
    with_gradients(nki_moe.grouped_mlp, x, counts, *weights)
    assert stub.LAUNCHES == [("forward", 2), ("backward", 2)]
    with pytest.raises(RuntimeError, match="NEURON_LOGICAL_NC_CONFIG=2 cores; 1 were asked for"):
        neuron._wrapped(object(), 1)


def test_a_self_check_that_hangs_ends_the_process_with_versions_and_a_stack(capfd: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []
    waiting = threading.Event()

    def end(code: int) -> None:
        ended.append(code)
        waiting.set()

    with neuron.time_limit(0.01, "the check", end):
        assert waiting.wait(60)
    said = capfd.readouterr().err
    assert ended == [1] and "the check did not end within 0.01 s; found nki " in said
    assert "test_a_self_check_that_hangs" in said, "the stack of the thread that hangs"


def test_the_self_check_sees_a_kernel_that_takes_one_item_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A register that keeps its first value is what a rewritten loop bound was feared to do."""
    neuron.register("cpu")
    real = stub.launch

    def first_expert_only(kernel: Any, cores: int, args: tuple[Any, ...], constants: Any) -> Any:
        names = list(inspect.signature(kernel.function).parameters)
        at = names.index("data_expert") if "data_expert" in names else None
        args = tuple(torch.zeros_like(a) if i == at else a for i, a in enumerate(args))
        return real(kernel, cores, args, constants)

    monkeypatch.setattr(stub, "launch", first_expert_only)
    with pytest.raises(RuntimeError, match="own kernels' y on a fixed small input differs"):
        neuron.self_check("cpu")


@pytest.mark.parametrize(("kernels", "names"), [("own", "own kernels' y"), ("rope", "rope kernels' q")])
def test_kernels_that_return_zeros_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, kernels: Any, names: str
) -> None:
    neuron.register("cpu", kernels)
    real = stub.wrap_nki.__call__

    def zeros(*args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
        return zeroed(real(*args, **kwargs))  # type: ignore[arg-type]

    monkeypatch.setattr(stub.wrap_nki, "__call__", zeros)
    with pytest.raises(RuntimeError, match=names + r" .*\(all zeros\).*Found nki .*neuronx-cc"):
        neuron.self_check("cpu", kernels)


@pytest.mark.parametrize("wrong", ["forward", "backward", "rope"])
def test_each_kernel_is_proven_before_it_is_first_used(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Case 108, for every kernel; also where the first use is one without gradients."""
    monkeypatch.setattr(neuron, "_checked", {})
    real = stub.wrap_nki.__call__

    def zeros(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = real(self, *args, **kwargs)
        return zeroed(out) if self.kernel.__name__ == wrong else out

    monkeypatch.setattr(stub.wrap_nki, "__call__", zeros)
    w, q, angles = torch.zeros(1, 256, 256).bfloat16(), torch.zeros(1, 2, 1, 32).bfloat16(), torch.zeros(2, 32)
    with torch.no_grad(), pytest.raises(RuntimeError, match="all zeros"):
        if wrong == "rope":
            nki_moe.rope(q, q, angles, angles)
        else:
            nki_moe.grouped_mlp(w[0], torch.tensor([256]), w, w, w)


def test_a_failed_self_check_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    neuron.register("cpu")
    monkeypatch.setattr(neuron, "_checked", {("cpu", "own"): False})
    with pytest.raises(RuntimeError, match="failed before in this process"):
        neuron.register("cpu")


def test_what_the_limits_refuse_never_reaches_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    neuron.register("cpu")
    stub.LAUNCHES.clear()
    w = torch.zeros(2, 384, 256)
    with pytest.raises(ValueError, match="nearest: 256 or 512"):
        nki_moe.grouped_mlp(torch.zeros(4, 256), torch.tensor([2, 2]), w, w.mT.contiguous(), w)
    assert not stub.LAUNCHES
