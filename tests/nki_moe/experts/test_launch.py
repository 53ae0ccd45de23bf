"""Contract of experts/launch.py and the kernels that it starts: on nki-sim they compute the definition and its
gradients for any routing, by one program."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import nki_moe
import nki_sim
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from moe_cases import check_grouped, check_routed, definition, problem, routed_problem, with_gradients
from nki_moe import limits, simulated
from nki_moe.experts import reference
from nki_moe.experts.launch import Own
from nki_moe.tables import place
from nki_moe.work import Work
from nki_sim.rules import RULES

STRICT = [name for name, rule in RULES.items() if rule.recorded]  # what nki-sim lets pass unless it is told not to


@pytest.fixture(autouse=True)
def simulated_pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NKI_MOE_BACKEND", "sim")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    monkeypatch.delenv("NKI_MOE_ASSUME", raising=False)
    with nki_sim.checks(refuse=STRICT):
        yield


def grouped(counts: Any, weights: Any) -> Work:
    return Work(torch.as_tensor(counts), *(w.detach() for w in weights), None, None, None)


BF16, FP32 = torch.bfloat16, torch.float32


ROWS, E, D, F = 1300, 5, 256, 256  # one shape, so that one trace serves the sweep


def cut(rows: int, cuts: list[float], spare: float) -> list[int]:
    """Counts of E experts that add up to about rows * (1 - spare)."""
    total = int(rows * (1 - spare))
    edges = [0, *sorted(int(c * total) for c in cuts), total]
    return [b - a for a, b in pairwise(edges)]


@settings(max_examples=8, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=E - 1, max_size=E - 1), st.sampled_from([0.0, 0.0, 0.3]))
@example([0.0, 0.0, 1.0, 1.0], 0.0)  # one expert owns everything, the others nothing
@example([1.0, 1.0, 1.0, 1.0], 0.999)  # one row
@example([0.0, 0.4, 0.405, 0.6], 0.01)
def test_any_routing_on_two_cores(cuts: list[float], spare: float) -> None:
    check_grouped(nki_moe.grouped_mlp, cut(ROWS, cuts, spare), ROWS, D, F, BF16)


@pytest.mark.parametrize(
    "counts", [[512, 640, 0, 33, 64], [180, 32, 65, 310, 383], [280, 513, 500, 0, 7], [0, 0, 0, 0, 7]]
)
def test_every_kind_of_tile(counts: list[int]) -> None:
    check_grouped(nki_moe.grouped_mlp, counts, ROWS, D, F, BF16)


@pytest.mark.parametrize("lnc", ["1", "2"])
@pytest.mark.parametrize(("shape", "counts"), [((3, 256, 256), [40, 0, 90]), ((1, 512, 256), [9])])
def test_float32_is_exact_to_1e_5(monkeypatch: pytest.MonkeyPatch, lnc: str, shape: Any, counts: list[int]) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", lnc)
    E, D, F = shape
    assert len(counts) == E
    check_grouped(nki_moe.grouped_mlp, counts, sum(counts) + 3, D, F, FP32)


def test_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    check_grouped(nki_moe.grouped_mlp, [600, 0, 97], 700, 384, 128, BF16)


@pytest.mark.parametrize(("lnc", "f_share"), [("1", 256), ("2", 128)])
def test_shares_of_f_and_d_change_nothing(monkeypatch: pytest.MonkeyPatch, lnc: str, f_share: int) -> None:
    """What 235B needs (its sums exceed SBUF), at a size that runs quickly, as SBUF is made to look small.

    Forward keeps groups of 384 columns: a share may lie within one, and in two.
    """
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", lnc)
    monkeypatch.setattr("nki_moe.limits.SBUF_BYTES", 48_000)
    limits._plan.cache_clear()
    assert nki_moe.check(140, 2, 768, 1024).f_share == f_share
    check_grouped(nki_moe.grouped_mlp, [13, 120], 140, 1024, 768, BF16)
    limits._plan.cache_clear()


@pytest.mark.parametrize("fused", [False, True])
def test_gather_transposes_that_a_user_vouches_for_compute_the_same(
    monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    monkeypatch.setenv("NKI_MOE_ASSUME", "gather-transpose")
    if fused:
        check_routed(nki_moe.routed_mlp, 300, 4, 2, 256, 256, BF16)
    else:
        check_grouped(nki_moe.grouped_mlp, [512, 640, 0, 33, 64], ROWS, D, F, BF16)
        check_grouped(nki_moe.grouped_mlp, [40, 0, 90], 133, 256, 256, FP32)


def test_nothing_is_transposed_by_dma_unless_a_user_vouches_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, set[str]] = {}

    def only_trace(kernel: Any, cores: int, *tensors: Any, **constants: Any) -> Any:
        program = nki_sim.trace(kernel[cores], tensors, **constants)
        found[kernel.__name__] = {i.op for core in program.cores for i in core.instructions()}
        return tuple(torch.empty(v.shape, dtype=getattr(torch, str(v.dtype))) for v in program.cores[0].result)

    for assume in ("", "gather-transpose"):
        monkeypatch.setenv("NKI_MOE_ASSUME", assume)
        x, counts, weights = problem([40, 0, 90], 130, 256, 256, BF16)
        y, *kept = Own(only_trace).forward(x.detach(), grouped(counts, weights), True)
        Own(only_trace).backward(y, x.detach(), grouped(counts, weights), *kept, True)
        assert found.keys() == {"forward", "backward"}
        assert all(("dma_transpose" in ops) == bool(assume) for ops in found.values())


@pytest.mark.parametrize(("lnc", "dtype"), [("2", BF16), ("1", FP32)])
def test_gather_and_combine_in_the_kernels(monkeypatch: pytest.MonkeyPatch, lnc: str, dtype: torch.dtype) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", lnc)
    check_routed(nki_moe.routed_mlp, 300, 4, 2, 256, 256, dtype)


def test_no_rows_and_no_tokens_run_as_well() -> None:
    """Case 112: a rank may have none."""
    w1, w2, w3 = (torch.ones(s, requires_grad=True) for s in ((2, 256, 512), (2, 512, 256), (2, 256, 512)))
    x, none = torch.zeros(0, 512, requires_grad=True), torch.zeros(0, 2)
    for y in (
        nki_moe.grouped_mlp(x, torch.tensor([0, 0]), w1, w2, w3),
        nki_moe.routed_mlp(x, none.long(), none, w1, w2, w3),
    ):
        assert y.shape == (0, 512)
        assert not any(g.any() for g in torch.autograd.grad(y.sum(), [x, w1, w2, w3]))
    check_routed(nki_moe.routed_mlp, 1, 3, 2, 256, 256, BF16)


@pytest.mark.parametrize(("counts", "words"), [([4, 9], "adds up to 13"), ([-1, 5], "smallest -1")])
def test_counts_that_cannot_be_are_refused_before_a_kernel_runs(counts: list[int], words: str) -> None:
    w = torch.zeros(2, 256, 256)
    with pytest.raises(ValueError, match=words):
        nki_moe.grouped_mlp(torch.zeros(9, 256), torch.tensor(counts), w, w, w)


@pytest.mark.parametrize("fused", [False, True])
def test_all_interleavings_of_the_cores_agree(fused: bool) -> None:
    def every_order(kernel: Any, lnc: int, *tensors: Any, **constants: Any) -> Any:
        with nki_sim.checks(record=("unwritten-output",)):
            return nki_sim.simulate(kernel[lnc], order="all")(*tensors, **constants)

    x, counts, weights = problem([40, 0, 90], 130, 256, 256, BF16)
    work, wanted = grouped(counts, weights), definition(reference.grouped_mlp, x, counts, *weights)
    if fused:
        x, experts, scores, weights = routed_problem(70, 4, 2, 256, 256, BF16)
        placement, counts = place(experts, 4)
        work = Work(counts, *(w.detach() for w in weights), *placement, scores.detach())
        wanted = definition(reference.routed_mlp, x, experts, scores, *weights)
    y, *kept = Own(every_order).forward(x.detach(), work, True)
    assert float((y.float() - wanted["y"]).norm() / wanted["y"].norm()) < 1e-2
    Own(every_order).backward(y, x.detach(), work, *kept, True)


def routings(many: int, rows: int, E: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(0)
    for i in range(many):
        share = torch.rand(E, generator=generator) ** (1 + i % 7)  # from even to one expert owning nearly all
        used = rows if i % 3 else rows - i
        yield torch.multinomial(share, used, replacement=True, generator=generator).bincount(minlength=E).tolist()


def test_one_program_serves_a_hundred_routings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is traced once (values cannot be read then), and each routing runs from that trace; every twentieth back
    as well."""
    monkeypatch.setattr(simulated, "_programs", {})
    for i, counts in enumerate(routings(100, 200, 4)):
        if i % 20 == 0:
            check_grouped(nki_moe.grouped_mlp, counts, 200, 256, 256, BF16)
            continue
        x, counts_E, weights = problem(counts, 200, 256, 256, BF16)
        y = Own().forward(x.detach(), grouped(counts_E, weights), False)[0]
        wanted = reference.grouped_mlp(x.detach().float().nan_to_num(0), counts_E, *(w.float() for w in weights))
        assert ((y.float() - wanted).norm() <= 1e-2 * wanted.norm()).item()
    used = sorted(key[0].__name__ for key in simulated._programs)
    assert used == ["backward", "forward", "forward"]  # forward with and without what it keeps


def test_every_kernel_traced_anew_for_another_routing_is_the_same_program(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes: dict[str, list[str]] = {}

    def traced_anew(kernel: Any, lnc: int, *tensors: Any, **constants: Any) -> Any:
        program = nki_sim.trace(kernel[lnc], tensors, **constants)
        fused = " fused" if constants["fused"] else ""
        hashes.setdefault(kernel.__name__ + fused, []).append(program.hash)
        with nki_sim.checks(record=("unwritten-output",)):
            return program.run(*tensors, **constants).outputs

    monkeypatch.setattr(simulated, "run", traced_anew)
    for counts in ([60, 0, 0, 0], [1, 2, 3, 4]):
        x, counts_E, weights = problem(counts, 60, 256, 256, BF16)
        with_gradients(nki_moe.grouped_mlp, x, counts_E, *weights)
    for spread in (1, 4):
        x, experts, scores, weights = routed_problem(30, 4, 2, 256, 256, BF16)
        with_gradients(nki_moe.routed_mlp, x, experts % spread, scores, *weights)
    assert len(hashes) == 4 and all(len(h) == 2 and len(set(h)) == 1 for h in hashes.values()), hashes


def test_two_layers_with_kernels_in_one_graph_and_experts_without_tokens() -> None:
    """Embedded twice with other operators between, not only alone; an expert without a token must not send a gather
    astray."""
    x, experts, scores, weights = (*_layers()[:2], *_layers()[2:])

    def two_layers(x: torch.Tensor, scores: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            normed = torch.nn.functional.rms_norm(x, x.shape[-1:])
            x = x + nki_moe.routed_mlp(normed, experts, scores, *w)
        return x

    def defined(x: torch.Tensor, scores: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            normed = torch.nn.functional.rms_norm(x, x.shape[-1:])
            x = x + reference.routed_mlp(normed, experts, scores, *w)
        return x

    found = with_gradients(two_layers, x, scores, *weights)
    wanted = definition(defined, x, scores, *weights)
    for name in wanted:
        assert float((found[name].float() - wanted[name]).norm()) <= 2e-2 * float(wanted[name].norm()), name


def _layers() -> tuple[Any, ...]:
    x, experts, scores, weights = routed_problem(300, 4, 2, 256, 256, BF16)
    return x, experts % 3, scores, weights  # expert 3 gets no token


@pytest.mark.soak
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(
    ("D", "F", "E"), [(2048, 768, 128), (4096, 1536, 128), (6144, 2560, 160), (512, 256, 1), (6144, 256, 8)]
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_real_sizes_stay_within_sbuf_and_psum(D: int, F: int, E: int, lnc: int, dtype: torch.dtype) -> None:
    """Traced by shape; nki-sim refuses what exceeds capacity, and check() promised no less than is used."""
    trace_all(4096, E, D, F, lnc, dtype)


def test_235b_stays_within_sbuf_and_psum() -> None:
    trace_all(4096, 128, 4096, 1536, 2, BF16)


def trace_all(R: int, E: int, D: int, F: int, lnc: int, dtype: torch.dtype) -> None:
    used: list[int] = []

    def only_trace(kernel: Any, cores: int, *tensors: Any, **constants: Any) -> Any:
        program = nki_sim.trace(kernel[cores], tensors, **constants)
        used.append(program.usage.sbuf)
        results = program.cores[0].result
        return tuple(torch.empty(view.shape, dtype=getattr(torch, str(view.dtype)), device="meta") for view in results)

    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEURON_LOGICAL_NC_CONFIG", str(lnc))
        x, w1, w2 = meta(R, D), meta(E, F, D), meta(E, D, F)
        work = Work(torch.full((E,), R // E), w1, w2, w1, None, None, None)
        y, *kept = Own(only_trace).forward(x, work, True)
        Own(only_trace).backward(y, x, work, *kept, True)
        fit = nki_moe.check(R, E, F, D, dtype=dtype)
    assert len(used) == 2 and max(used) <= fit.sbuf_bytes


@pytest.mark.soak
@pytest.mark.parametrize(
    "counts", [[2 if i % 3 else 0 for i in range(160)], [0] * 159 + [300]], ids=["few each", "one owns all"]
)
def test_160_experts(counts: list[int]) -> None:
    check_grouped(nki_moe.grouped_mlp, counts, sum(counts) + 1, D, F, BF16)


@pytest.mark.soak
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.sampled_from([256, 512, 768]),
    st.sampled_from([256, 512]),
    st.integers(1, 900),
    st.sampled_from(["1", "2"]),
    st.sampled_from([BF16, FP32]),
    st.integers(0, 2**31),
)
def test_any_shape_and_routing(E: int, D: int, F: int, rows: int, lnc: str, dtype: torch.dtype, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEURON_LOGICAL_NC_CONFIG", lnc)
        share = torch.rand(E, generator=torch.Generator().manual_seed(seed)) ** (seed % 7)
        counts = torch.multinomial(share, rows, replacement=True).bincount(minlength=E).tolist()
        check_grouped(nki_moe.grouped_mlp, counts, rows + seed % 5, D, F, dtype)
