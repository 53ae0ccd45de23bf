"""Contract: choices get rows by their expert, as many rows as any routing needs, and rows without a choice never
contribute, whatever they hold."""

import math

import pytest
import torch
import torch.nn.functional as F
from titan_recipes.moe import permute as dispatch_rows
from titan_recipes.moe.permute import combine_rows, pack, pack_all, packed_rows, segment, take_rows
from torch.utils._python_dispatch import TorchDispatchMode

T, K, E, D = 37, 3, 6, 8


def routing(seed=0, experts=E, tokens=T):
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)).topk(K).indices


def inputs():
    torch.manual_seed(0)
    return torch.randn(T, D, requires_grad=True), torch.rand(T, K, requires_grad=True)


def plain(x_TD, scores_TK, expert_TK, experts):
    """Each choice by itself: an expert e multiplies by e + 2. `experts` and above have no row."""
    factor_TK = torch.where(expert_TK < experts, expert_TK + 2.0, 0.0)
    return torch.stack(
        [sum(scores_TK[t, k] * factor_TK[t, k] * x_TD[t] for k in range(expert_TK.shape[1])) for t in range(len(x_TD))]
    )


@pytest.mark.parametrize("block", [1, 4, 128])
@pytest.mark.parametrize("experts", [E, 2], ids=["all here", "2 of 6 here"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_rows_without_a_choice_never_contribute(block, experts, garbage):
    expert_TK = routing().clamp(max=experts)  # several choices of a token may be elsewhere
    rows = packed_rows(T * min(K, experts), experts, block)
    placement, counts_E = pack(expert_TK, experts, rows, block)
    empty_R = ~placement.filled_R
    x_TD, scores_TK = inputs()
    weight_TD = torch.randn(T, D)
    x_RD = take_rows(x_TD, placement)
    assert x_RD.shape == (rows, D) and (empty_R.any() or (block == 1 and experts == E))
    last = int(counts_E.sum())
    assert (x_RD[:last][empty_R[:last]] == 0).all()  # an expert multiplies these, and its weights' gradient: no NaN
    factor_R = torch.repeat_interleave(torch.arange(experts) + 2.0, counts_E)
    y_RD = x_RD * F.pad(factor_R, (0, rows - last))[:, None]
    y_RD = torch.where(empty_R[:, None], garbage, y_RD)
    seen = []
    y_RD.register_hook(lambda g: seen.append(g))
    x_RD.register_hook(lambda g: torch.where(empty_R[:, None], garbage, g))
    out_TD = combine_rows(y_RD, placement, scores_TK)
    (out_TD * weight_TD).sum().backward()
    assert (seen[0][empty_R] == 0).all()
    (x2_TD, scores2_TK) = inputs()
    expected_TD = plain(x2_TD, scores2_TK, expert_TK, experts)
    (expected_TD * weight_TD).sum().backward()
    torch.testing.assert_close(out_TD, expected_TD)
    torch.testing.assert_close(x_TD.grad, x2_TD.grad)
    torch.testing.assert_close(scores_TK.grad, scores2_TK.grad)


class NoSort(TorchDispatchMode):
    """Refuses what sorts, searches, or brings a value to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        refused = (
            "sort",
            "argsort",
            "topk",
            "bincount",
            "nonzero",
            "bucketize",
            "searchsorted",
            "unique",
            "_local_scalar",
        )
        assert not name.startswith(refused), f"{func} in a training step"
        return func(*args, **(kwargs or {}))


def test_no_route_sorts_or_reads_a_value():
    expert_TK = routing()
    (x_TD, scores_TK) = inputs()
    with NoSort():
        rows = packed_rows(T * K, E, 4)
        for placement in (pack(expert_TK, E, rows, 4)[0], pack_all(expert_TK, E), segment(expert_TK % 2, 2, 40)):
            combine_rows(take_rows(x_TD, placement), placement, scores_TK).sum().backward()


def test_all_choices_here_and_blocks_of_one_need_no_other_rows():
    expert_TK = routing()
    full, (packed, counts_E) = pack_all(expert_TK, E), pack(expert_TK, E, packed_rows(T * K, E, 1))
    assert full.here_TK is None and full.filled_R is None
    assert torch.equal(full.row_TK, packed.row_TK) and torch.equal(full.choice_R, packed.choice_R)
    assert torch.equal(counts_E, expert_TK.flatten().bincount(minlength=E)) and packed.filled_R.all()
    assert torch.equal(expert_TK.flatten()[full.choice_R], expert_TK.flatten().sort().values)


@pytest.mark.parametrize("block", [1, 7, 128])
@pytest.mark.parametrize("choices, experts", [(1, 4), (3, 8), (50, 4), (1000, 16)])
def test_no_routing_needs_more_rows_and_one_needs_all(choices, experts, block):
    limit = packed_rows(choices, experts, block)
    worst = 0
    spare = [e % experts for e in range(choices - min(choices, experts))]
    skewed = [*range(min(choices, experts)), *[0] * len(spare)]  # each expert one, the first the rest
    even = [*range(min(choices, experts)), *spare]
    for experts_of in (skewed, even, [0] * choices, [experts - 1] * choices):
        counts = torch.tensor(experts_of).bincount(minlength=experts)
        worst = max(worst, int(((counts + block - 1) // block * block).sum()))
        placement, _ = pack(torch.tensor(experts_of)[:, None], experts, limit, block)
        assert placement.here_TK.all() and placement.filled_R.sum() == choices
    assert worst <= limit < worst + 2 * block


def test_a_full_segment_turns_away_the_later_tokens():
    group_TK = torch.tensor([[0, 1], [1, 0], [0, 1], [0, 2]])
    placement = segment(group_TK, 3, 2)
    assert placement.here_TK.tolist() == [[True, True], [True, True], [False, False], [False, True]]
    assert placement.row_TK.tolist() == [[0, 2], [3, 1], [0, 0], [0, 4]]
    assert placement.filled_R.tolist() == [True, True, True, True, True, False]
    assert placement.choice_R.tolist() == [0, 3, 1, 2, 7, 0]


def test_bfloat16_rows_are_scored_and_summed_in_float32():
    x_TD, scores_TK = inputs()
    placement = pack_all(routing(), E)
    y_RD = take_rows(x_TD.detach().bfloat16(), placement)
    out_TD = combine_rows(y_RD, placement, scores_TK)
    exact_TD = x_TD.detach().bfloat16().float() * scores_TK.sum(1, keepdim=True)
    assert out_TD.dtype is torch.bfloat16
    assert (
        torch.equal(out_TD, exact_TD.bfloat16())
        or (out_TD.float() - exact_TD).abs().max() < 2**-8 * exact_TD.abs().max()
    )


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("block", [0, 4], ids=["as they are", "blocks"])
def test_any_number_of_tokens_has_its_rows(tokens, block):
    """Case 112: none, and a number that no degree divides."""
    expert_TK = routing(tokens=tokens)
    x_TD, scores_TK = torch.randn(tokens, D, requires_grad=True), torch.rand(tokens, K, requires_grad=True)
    placement = pack(expert_TK, E, packed_rows(tokens * K, E, block), block)[0] if block else pack_all(expert_TK, E)
    out_TD = combine_rows(take_rows(x_TD, placement) * 2, placement, scores_TK)
    torch.testing.assert_close(out_TD, 2 * x_TD * scores_TK.sum(1, keepdim=True))
    assert [g.shape for g in torch.autograd.grad(out_TD.sum(), [x_TD, scores_TK])] == [(tokens, D), (tokens, K)]


def scored(rows_a_block, monkeypatch, dtype=torch.bfloat16):
    """Result and gradients of `combine_rows`, and the largest float32 results of an operator in forward and in
    backward.
    """
    monkeypatch.setattr(dispatch_rows, "BLOCK_ROWS", rows_a_block)
    expert_TK = routing(tokens=400, experts=8).clamp(max=4)  # half of the experts are elsewhere
    placement, _ = pack(expert_TK, 4, packed_rows(400 * K, 4, 1))
    generator = torch.Generator().manual_seed(0)
    y_RD = torch.randn(1200, 64, generator=generator).to(dtype)
    y_RD[~placement.filled_R] = math.nan
    scores_TK = torch.rand(400, K, generator=generator, requires_grad=True)
    y_RD.requires_grad_()
    with Largest() as forward:
        out_TD = combine_rows(y_RD, placement, scores_TK)
    dout_TD = torch.randn(out_TD.shape, generator=generator).to(dtype)
    with Largest() as backward:
        gradients = torch.autograd.grad(out_TD, [y_RD, scores_TK], dout_TD)
    return (out_TD.detach(), *gradients), forward.elements, backward.elements


class Largest(TorchDispatchMode):
    """Elements of the largest float32 tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype is torch.float32:
            self.elements = max(self.elements, out.numel())
        return out


def test_a_combination_is_in_float32_a_sixteenth_at_a_time_and_no_number_changes(monkeypatch):
    """Rows are as many as the fullest routing needs: float32 copies of all of them were most of a rank's memory."""
    whole, *at_once = scored(1200, monkeypatch)
    parts, *sixteenth = scored(1, monkeypatch)
    assert at_once == [1200 * 64] * 2 and sixteenth == [75 * 64] * 2
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(whole, parts, strict=True))
    wide = (scored(rows, monkeypatch, torch.float32)[0] for rows in (1200, 1))
    assert all(torch.equal(a, b) for a, b in zip(*wide, strict=True))
