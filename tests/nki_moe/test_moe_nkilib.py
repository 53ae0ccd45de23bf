"""The contract: through the adapter, nki-library's documented blockwise MoE computes what grouped_mlp does, values and gradients. The
blockwise computation here is written from that documentation, block by block.
"""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import definition, problem
from nki_moe.experts import reference
from nki_moe.nkilib import Blockwise, blocks, blockwise, weight_gradients
from torch import Tensor


def documented(a: Blockwise, block_size: int) -> Tensor:
    """out[t] = sum over the blocks holding t of affinity[t, e] * down_e(silu(gate_e x) * up_e x)."""
    T, E = a.hidden_states.shape[0] - 1, a.down_proj_weight.shape[0]
    out = torch.zeros_like(a.hidden_states)
    affinity = a.expert_affinities_masked.view(T + 1, E)
    for ids, (e,) in zip(a.token_position_to_id.view(-1, block_size).long(), a.block_to_expert.tolist(), strict=True):
        x = a.hidden_states[ids]
        gate, up = (x @ a.gate_up_proj_weight[e, :, i] for i in (0, 1))
        out = out.index_add(0, ids, affinity[ids, e, None] * ((F.silu(gate) * up) @ a.down_proj_weight[e]))
    return out[:T]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 3), st.sampled_from([4, 16]))
def test_blockwise_computes_grouped_mlp(counts: list[int], spare: int, block_size: int) -> None:
    rows = max(1, sum(counts) + spare)
    x, counts_E, weights = problem(counts, rows, 12, 8, torch.float32)
    a = blockwise(x.detach(), counts_E, *(w.detach() for w in weights), block_size)
    a = a._replace(
        gate_up_proj_weight=a.gate_up_proj_weight.requires_grad_(), down_proj_weight=a.down_proj_weight.requires_grad_()
    )
    y = documented(a, block_size)
    wanted = definition(reference.grouped_mlp, x, counts_E, *weights)
    torch.testing.assert_close(y.detach(), wanted["y"])
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7))
    gradients = weight_gradients(*torch.autograd.grad(y, [a.gate_up_proj_weight, a.down_proj_weight], dy))
    torch.testing.assert_close(gradients, tuple(wanted[name] for name in "bcd"))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.sampled_from([128, 256]))
def test_every_row_is_in_one_block_of_its_expert_and_the_worst_case_suffices(
    counts: list[int], block_size: int
) -> None:
    rows = max(1, sum(counts))
    x, counts_E, weights = problem(counts, rows, 4, 4, torch.float32)
    a = blockwise(x.detach(), counts_E, *(w.detach() for w in weights), block_size)
    assert len(a.block_to_expert) == blocks(rows, len(counts), block_size)
    ids = a.token_position_to_id.view(-1, block_size)
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts_E)
    for block, (e,) in zip(ids, a.block_to_expert.tolist(), strict=True):
        assert (owner[block[block < rows].long()] == e).all()
    assert sorted(i for i in a.token_position_to_id.tolist() if i < rows) == list(range(sum(counts)))
