"""Contract: a query sees the keys of its document that are not later, whatever rank holds it; ranks hold what
TorchTitan's sharding gives them, balanced or not."""

import numpy as np
import pytest
import torch
from ranks import run_ranks
from titan_recipes.models.attention import attention_mask_B1LK

LENGTH = 16
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], [*range(15), 0]])


def allowed(mask: str) -> np.ndarray:
    """What each query may see by the definition, query by query."""
    seen = np.zeros((2, LENGTH, LENGTH), bool)
    for row, positions in enumerate(POSITIONS.tolist()):
        for query in range(LENGTH):
            begin = query - positions[query] if mask == "block" else 0
            seen[row, query, begin : query + 1] = True
    return seen


def test_one_rank_has_the_whole_mask_and_needs_none_for_causal():
    assert attention_mask_B1LK(POSITIONS, "causal", "headtail") is None
    found = attention_mask_B1LK(POSITIONS, "block", "headtail")
    assert found.shape == (2, 1, LENGTH, LENGTH)
    np.testing.assert_array_equal(found[:, 0], allowed("block"))


def rows_of_rank(rank, mask):
    """Yield, for each way to split, this rank's places in the sequence, and its mask."""
    from titan_recipes.device.select import set_device

    set_device("cpu")
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.context_parallel import cp_shard
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("spmd_types")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    found = []
    for balancer in (None, "headtail"):
        places = torch.arange(LENGTH).expand(2, -1)
        (positions, places), _ = cp_shard(mesh["cp"], (POSITIONS, places), None, balancer)
        with set_current_spmd_mesh(mesh):
            seen = attention_mask_B1LK(positions, mask, balancer)
        found.append((places[0].numpy(), np.broadcast_to(seen[:, 0].numpy(), (2, LENGTH // 2, LENGTH))))
    return found


@pytest.mark.parametrize("mask", ["block", "causal"])
def test_context_parallel_ranks_have_their_rows_over_the_keys_of_all(mask):
    ranks = run_ranks(rows_of_rank, 2, mask)
    for split in range(2):
        keys = np.concatenate([rank[split][0] for rank in ranks])
        assert sorted(keys) == list(range(LENGTH))
        for rank in ranks:
            queries, seen = rank[split]
            np.testing.assert_array_equal(seen, allowed(mask)[:, queries][:, :, keys])
    assert list(ranks[0][0][0]) != list(ranks[0][1][0])  # the two ways are two
