"""The contract: with provider="nkilib" the operators compute what they always do, through nki-library's blockwise MoE
as AWS documents it: its layouts, what its forward keeps for its backward, its limits. What is documented is written
here in torch, block by block, and takes the kernels' place; with NKI_LIBRARY naming the src folder of a checkout, the
soak test runs AWS's kernels themselves on nki-sim.
"""

import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import moe_neuron_stub
import nki_moe
import nki_sim
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import assert_close, check_grouped, check_routed, definition, problem, with_gradients
from nki_moe import nkilib
from nki_moe.backend import choose
from nki_moe.experts import reference
from nki_moe.nkilib import launch
from nki_moe.nkilib.layout import blocks, blockwise
from nki_moe.work import Work
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

D, HIDDEN = 512, 256  # the smallest that it takes


def forward(x: Tensor, affinities: Tensor, gate_up: Tensor, down: Tensor, blocks: Any) -> tuple[Tensor, Tensor, Tensor]:
    """out[t] = sum over the blocks holding t of affinity[t, e] * down_e(silu(gate_e x) * up_e x); gate and up (N, 2, I,
    B); what down gave."""
    out, kept_gate_up, kept_down = torch.zeros_like(x), [], []
    for ids, e in blocks:
        gate, up = (x[ids] @ gate_up[e, :, i] for i in (0, 1))
        y = (F.silu(gate) * up) @ down[e]
        out.index_add_(0, ids, affinities.view(len(x), -1)[ids, e, None] * y)
        kept_gate_up.append(torch.stack([gate.T, up.T]))
        kept_down.append(y)
    return out, torch.stack(kept_gate_up), torch.stack(kept_down)


def backward(
    x: Tensor, affinities: Tensor, gate_up: Tensor, down: Tensor, blocks: Any, kept: Tensor, y: Tensor, dout: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of x, affinities, gate_up and down from what forward kept."""
    dx, da, dgu, dd = (torch.zeros_like(t) for t in (x, affinities, gate_up, down))
    for n, (ids, e) in enumerate(blocks):
        gate, up = kept[n].mT
        dy = dout[ids]
        da.view(len(x), -1)[ids, e] = (dy * y[n]).sum(1)
        dy = affinities.view(len(x), -1)[ids, e, None] * dy
        dd[e] += (F.silu(gate) * up).T @ dy
        dh, s = dy @ down[e].T, gate.sigmoid()
        for i, d in enumerate((dh * up * s * (1 + gate * (1 - s)), dh * gate * s)):
            dgu[e, :, i] += x[ids].T @ d
            dx.index_add_(0, ids, d @ gate_up[e, :, i].T)
    return dx, da, dgu, dd


def run(kernel: Any, lnc: int, *tensors: Tensor, block_size: int, save: bool = False) -> Any:
    """Stand in for AWS's kernels: the documented computation in float32, its results in bfloat16."""
    assert lnc == 2 and all(t.is_contiguous() for t in tensors)
    assert [t.dtype for t in tensors[:6]] == [torch.bfloat16] * 4 + [torch.int32] * 2
    positions, experts = tensors[4:6]
    blocks = list(zip(positions.view(-1, block_size).long(), experts[:, 0].tolist(), strict=True))
    wide = [t.float() for t in (*tensors[:4], *tensors[6:])]
    if kernel.__name__ == "backward":
        return tuple(t.bfloat16() for t in backward(*wide[:4], blocks, *wide[4:]))
    return tuple(t.bfloat16() for t in forward(*wide, blocks)[: 3 if save else 1])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An nki-library whose kernels are what is documented."""
    names = (
        "core",
        "core.moe",
        "core.moe.moe_cte",
        "core.utils",
        "experimental",
        "experimental.moe",
        "experimental.moe.bwd",
    )
    for name in ("nkilib", *(f"nkilib.{n}" for n in names)):
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    for name, content in {
        "core.moe.moe_cte.bwmm_shard_on_I": "blockwise_mm_baseline_shard_intermediate",
        "core.utils.common_types": "ExpertAffinityScaleMode",
        "experimental.moe.bwd.blockwise_mm_backward": "blockwise_mm_bwd",
    }.items():
        module = types.ModuleType(name)
        setattr(module, content, types.SimpleNamespace(POST_SCALE=None))
        monkeypatch.setitem(sys.modules, f"nkilib.{name}", module)
    monkeypatch.setenv("NKI_MOE_BACKEND", "sim")
    monkeypatch.setattr(launch, "simulated", run)
    yield
    sys.modules.pop("nki_moe.nkilib.kernel", None)


def grouped_mlp(*args: Tensor) -> Tensor:
    return nki_moe.grouped_mlp(*args, provider="nkilib")


def routed_mlp(*args: Tensor) -> Tensor:
    return nki_moe.routed_mlp(*args, provider="nkilib")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("counts", "rows"), [([40, 0, 300], 350), ([5], 5), ([0, 0, 1, 0], 3), ([1100, 2], 1102)])
def test_rows_go_through_its_blocks_and_all_gradients_come_back(counts: list[int], rows: int) -> None:
    check_grouped(grouped_mlp, counts, rows, D, HIDDEN, torch.bfloat16)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("T", "E", "K"), [(70, 4, 2), (33, 3, 1)])
def test_tokens_go_through_with_their_scores_as_affinities(T: int, E: int, K: int) -> None:
    check_routed(routed_mlp, T, E, K, D, HIDDEN, torch.bfloat16)


@pytest.mark.usefixtures("installed")
def test_compiles_whole_and_once_for_every_routing() -> None:
    x, _, weights = problem([3, 0, 37], 40, D, HIDDEN, torch.bfloat16)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(grouped_mlp, fullgraph=True, backend=counter)
    for counts in ([3, 0, 37], [40, 0, 0]):
        found = with_gradients(compiled, x, torch.tensor(counts), *weights)
        eager = with_gradients(grouped_mlp, x, torch.tensor(counts), *weights)
        assert all(torch.equal(found[name], eager[name]) for name in eager)
    assert counter.frame_count == 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.sampled_from([128, 256]))
def test_every_row_is_in_one_block_of_its_expert_and_the_worst_case_suffices(
    counts: list[int], block_size: int
) -> None:
    rows = max(1, sum(counts))
    x, counts_E, weights = problem(counts, rows, 4, 4, torch.float32)
    a = blockwise(x.detach(), Work(counts_E, *(w.detach() for w in weights), None, None, None), block_size)
    assert len(a.block_to_expert) == blocks(rows, len(counts), block_size)
    ids = a.token_position_to_id.view(-1, block_size)
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts_E)
    for block, (e,) in zip(ids, a.block_to_expert.tolist(), strict=True):
        assert (owner[block[block < rows].long()] == e).all()
    assert sorted(i for i in a.token_position_to_id.tolist() if i < rows) == list(range(sum(counts)))


def test_is_never_replaced_by_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    x, counts, weights = problem([4, 5], 9, D, HIDDEN, torch.bfloat16)
    monkeypatch.setenv("NKI_MOE_BACKEND", "torch")
    with pytest.raises(ValueError, match=r"a choice between kernels, and here .* plain torch runs"):
        nki_moe.grouped_mlp(x, counts, *weights, provider="nkilib")
    with pytest.raises(ValueError, match=r"choose own .* or nkilib"):
        nki_moe.grouped_mlp(x, counts, *weights, provider="aws")  # type: ignore[arg-type]
    monkeypatch.setenv("NKI_MOE_BACKEND", "sim")
    for name in ("nkilib", "nkilib_src"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match="asks for AWS's nki-library"):
        nki_moe.grouped_mlp(x, counts, *weights, provider="nkilib")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 768}, "nearest: 512 or 1024"),
        ({"dim": 16384}, "nearest: 8192$"),
        ({"hidden": 128}, "nearest: 256$"),
        ({"hidden": 320}, "multiples of 256 from 256 to 16384; nearest: 256 or 512"),
        ({"dtype": torch.float32}, "provider='own' takes float32"),
        ({"lnc": 1}, "LNC=2"),
        ({"rows": 0}, "at least one"),
    ],
)
def test_its_limits_are_known_without_it(change: dict[str, Any], words: str) -> None:
    shape = {"rows": 4096, "experts": 128, "hidden": 768, "dim": 2048}
    nkilib.check(**shape, lnc=2)
    with pytest.raises(ValueError, match=words):
        nkilib.check(**{"lnc": 2, **shape, **change})


@pytest.mark.soak
@pytest.mark.skipif(
    "NKI_LIBRARY" not in os.environ, reason="NKI_LIBRARY names no src folder of an nki-library checkout"
)
def test_aws_kernels_themselves_on_nki_sim(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS's kernels are of NKI 0.3; both branches, simulated and as on Trainium (moe_neuron_stub)."""
    monkeypatch.syspath_prepend(os.environ["NKI_LIBRARY"])
    monkeypatch.setenv("NKI_MOE_BACKEND", "sim")
    sys.modules.pop("nki_moe.nkilib.kernel", None)
    nki_sim.install(compat="0.3")
    try:
        check_grouped(grouped_mlp, [100, 0, 200], 310, D, HIDDEN, torch.bfloat16)
        check_grouped(grouped_mlp, [700, 500], 1200, 1024, 768, torch.bfloat16)
        check_routed(routed_mlp, 60, 4, 2, D, HIDDEN, torch.bfloat16)
        moe_neuron_stub.install(monkeypatch)
        nki_sim.install(compat="0.3")
        assert choose("cpu", "nkilib") == "nki"
        x, counts, weights = problem([3, 0, 37], 40, D, HIDDEN, torch.bfloat16)
        monkeypatch.setattr(moe_neuron_stub, "RECORDED", ["unwritten-output", "race", "uninitialized"])
        found = with_gradients(grouped_mlp, x, counts, *weights)
        assert_close(found, definition(reference.grouped_mlp, x, counts, *weights), 1e-2)
    finally:
        nki_sim.uninstall()
        sys.modules.pop("nki_moe.nkilib.kernel", None)
