"""Contract: random weights are those of one process in every sharding: no shard is a copy of another.

Whole models are compared in tests/integration/test_parallel.py.
"""

import torch
from ranks import run_ranks
from titan_recipes.models.initialization import normal_
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

PLACEMENTS = [
    (Shard(0), Replicate()),
    (Shard(0), Shard(1)),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (Replicate(), Shard(1)),
]


def drawn(rank: int) -> list[list[list[float]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for placements in PLACEMENTS:
        rows = 9 if placements[1] != Shard(0) else 8  # uneven, where DTensor can
        x = distribute_tensor(torch.zeros(rows, 6), mesh, placements, src_data_rank=None)
        torch.manual_seed(3)
        found.append(normal_(x, std=0.5).full_tensor().tolist())
    return found


def test_every_sharding_has_the_weights_of_one_process():
    ranks = run_ranks(drawn, 4)
    for i, placements in enumerate(PLACEMENTS):
        for rank in ranks:
            found = torch.tensor(rank[i])
            torch.manual_seed(3)
            assert torch.equal(found, normal_(torch.empty(found.shape), std=0.5)), placements
