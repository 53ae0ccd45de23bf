"""Contract of tables.py: every row is in one item of each list, and nothing sorts or asks the device for a value."""

from collections import Counter
from typing import Any

import nki_moe
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import routed_problem
from nki_moe.hardware import P
from nki_moe.tables import CLEARED, Placement, Tables, place, tables
from torch.utils._python_dispatch import TorchDispatchMode

# What sorts, searches, makes a shape of values, or brings a value to the host.
REFUSED = (
    "sort",
    "argsort",
    "topk",
    "bincount",
    "histc",
    "nonzero",
    "bucketize",
    "searchsorted",
    "unique",
    "item",
    "_local_scalar_dense",
)

# What moves nothing.
VIEWS = ("view", "_unsafe_view", "slice", "select", "unsqueeze", "transpose", "unbind", "expand")


class Seen(TorchDispatchMode):
    """Counts the operators that run, and refuses some by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names[name] += 1
        refused = any(name == r or name.startswith(f"{r}_") for r in REFUSED)
        assert not refused, f"{func} in a training step"
        return func(*args, **(kwargs or {}))


def by_row(index: torch.Tensor, blocks: int) -> list[int]:
    """An item's indices in order of its rows: tables hold them by partition."""
    return index.view(P, blocks).T.reshape(-1).tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 900), min_size=1, max_size=6),
    st.integers(0, 700),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
)
def test_every_row_is_in_one_item_of_its_expert(counts: list[int], spare: int, blocks: int, cores: int) -> None:
    rows, size = max(1, sum(counts) + spare), blocks * P
    t = tables(torch.tensor(counts), rows, None, None, blocks, cores)
    ends = torch.tensor(counts).cumsum(0).tolist()
    data = [
        (int(t.data_expert[i, core]), by_row(t.data_rows[i].view(cores, size)[core], blocks))
        for i in range(int(t.passes[0, 0]))
        for core in range(cores)
    ]
    sums = [(int(t.sum_expert[i]), by_row(t.sum_rows[i], blocks)) for i in range(int(t.passes[0, 1]))]
    for items in (data, sums):
        real = [(e, [r for r in item if r < rows]) for e, item in items]
        assert [r for _, item in real for r in item] == list(range(sum(counts)))
        assert all(ends[e] - counts[e] <= r < ends[e] for e, item in real for r in item)
        assert all(0 <= e < len(counts) for e, _ in items) and all(r <= rows for _, item in items for r in item)
    assert len(data) < cores + max(sum(-(-n // size) for n in counts), 1), "at most one pass is not full"
    assert {e for e, _ in sums} == set(range(len(counts))), "an expert without rows has a gradient too"
    experts = [e for e, _ in sums]
    kept = t.sum_keep[: len(sums), 0].tolist()
    assert kept == [float(i > 0 and experts[i - 1] == e) for i, e in enumerate(experts)]
    cleared = [by_row(t.clear[i], CLEARED) for i in range(int(t.passes[0, 2]))]
    assert sorted({r for block in cleared for r in block} - {rows}) == list(range(sum(counts), rows))
    assert (t.passes >= 1).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 4), st.integers(0, 2**31))
def test_choices_are_placed_as_a_stable_sort_would(T: int, E: int, K: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(T, E, generator=generator).topk(min(K, E)).indices
    placement, counts = place(chosen, E)
    assert counts.tolist() == chosen.flatten().bincount(minlength=E).tolist()
    assert placement.choice_R.tolist() == chosen.flatten().argsort(stable=True).tolist()
    assert placement.choice_R[placement.row_TK.flatten()].tolist() == list(range(chosen.numel()))
    assert {t.dtype for t in (*placement, counts)} == {torch.int32}


def test_rows_are_read_from_their_tokens_and_have_their_scores() -> None:
    chosen = torch.tensor([[2, 0], [0, 1], [0, 2]])
    scores = torch.arange(6.0).view(3, 2)
    placement, counts = place(chosen, 3)
    t = tables(counts, 6, placement, scores, 1, 2)
    read = [r for i in range(int(t.passes[0, 1])) for r in by_row(t.sum_reads[i], 1) if r < 3]
    assert read == [0, 1, 2, 1, 0, 2], "rows of no expert read past the last token"
    assert t.score_R[:, 0].tolist() == [1.0, 2.0, 4.0, 3.0, 0.0, 5.0]
    assert t.sum_reads[t.sum_rows == 6].unique().tolist() == [3]


@pytest.mark.parametrize("fused", [False, True])
def test_tables_survive_packing(fused: bool) -> None:
    chosen, scores = torch.tensor([[0, 1], [1, 3]]), torch.rand(2, 2)
    placement, counts = place(chosen, 4)
    given = (placement, scores) if fused else (None, None)
    t = tables(counts, 4, *given, 2, 2)
    sizes = (4, 4, 2, 2 if fused else 0, 2, 2)
    packed = t.pack()
    assert packed.shape == (Tables.packed(*sizes),) and packed.dtype == torch.int32
    for a, b in zip(t, Tables.unpack(packed, *sizes), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


def test_tables_take_few_operators_and_none_that_sorts_or_reads() -> None:
    chosen, scores = torch.rand(64, 8).topk(4).indices, torch.rand(64, 4)
    with Seen() as placing:
        placement, counts = place(chosen, 8)
    with Seen() as making:
        tables(counts, 256, placement, scores, 2, 2)
    work = [{name: n for name, n in seen.names.items() if name not in VIEWS} for seen in (placing, making)]
    assert all("cumsum" in names for names in work), "it counted the operators"
    assert sum(n for names in work for n in names.values()) < 60, work


@pytest.mark.parametrize("fused", [False, True])
def test_a_training_step_with_kernels_neither_sorts_nor_reads(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in has the kernels' results here; tables are made once, and backward takes forward's."""
    from nki_moe.experts import launch
    from nki_moe.work import Work

    x, experts, scores, (w1, w2, w3) = routed_problem(64, 4, 2, 256, 256, torch.bfloat16)
    made: list[Placement | None] = []
    real = launch.tables
    monkeypatch.setattr(launch, "tables", lambda *a: (made.append(a[2]), real(*a))[1])
    monkeypatch.setenv("NKI_MOE_BACKEND", "sim")

    def run(kernel: Any, lnc: int, *tensors: torch.Tensor, **constants: Any) -> Any:
        if kernel.__name__ == "forward":
            return torch.zeros_like(x), x.new_zeros(constants["rows"], 512)
        dscore = [torch.zeros(constants["rows"], 1)] if fused else []
        return (torch.zeros_like(x), *dscore, *(torch.zeros_like(w) for w in (w1, w2, w3)))

    own = launch.Own(run)
    with Seen() as seen, torch.no_grad():
        if fused:
            placement, counts = place(experts, 4)
            work = Work(counts, w1, w2, w3, *placement, scores)
        else:
            work = Work(torch.tensor([10, 0, 3, 51]), w1, w2, w3, None, None, None)
        y, *kept = own.forward(x, work, True)
        own.backward(y, x, work, *kept, True)
    assert len(made) == 1 and seen.names["cumsum"] >= 2
    assert nki_moe.check(64, 4, 256, 256).lnc in (1, 2)
