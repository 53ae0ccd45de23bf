"""Contract: a plan's meshes have TorchTitan's axes, each of them, at every size; placements divide what the
table says.
"""

import pytest
import torch
from neuron_parallel.mesh import build_meshes, mesh_shapes, placements
from neuron_parallel.parameters import local_shape, parameters
from plan_shapes import QWEN3_30B, plan
from ranks import run_ranks

LAYOUTS = [{}, {"tp": 2}, {"cp": 2}, {"pp": 2, "dp_shard": 1}, {"dp_replicate": 2, "dp_shard": 1}, {"ep": 2}]


def axes(rank, layouts):
    """Members of each axis of each layout, counted by an all-reduce."""
    return [
        {
            f"{name} {axis}": count(mesh[axis].get_group())
            for name, mesh in build_meshes(layout, "cpu").items()
            for axis in mesh.mesh_dim_names
        }
        for layout in layouts
    ]


def count(group):
    one = torch.ones(1)
    torch.distributed.all_reduce(one, group=group)
    return int(one)


def test_every_axis_exists_with_all_degrees_1():
    found = run_ranks(axes, 1, [plan(1)])[0][0]
    assert set(found.values()) == {1} and len(found) == 9


def test_each_degree_alone_on_two_ranks_makes_a_group_of_two():
    layouts = [plan(2, **degrees) for degrees in LAYOUTS]
    sizes = [
        {f"{name} {axis}": size for name, mesh in mesh_shapes(layout).items() for axis, size in mesh.items()}
        for layout in layouts
    ]
    assert run_ranks(axes, 2, layouts) == [sizes, sizes]


def test_a_plan_of_another_size_is_refused():
    with pytest.raises(AssertionError, match="the plan is for 2 ranks, the process group has 1"):
        run_ranks(axes, 1, [plan(2)])


def test_placements_divide_as_the_local_shapes_do():
    layout = plan(64, tp=4, ep=16)
    for row in parameters(QWEN3_30B):
        where = placements(row, layout)
        shapes = mesh_shapes(layout)
        sizes = shapes["sparse" if "ep" in where else "dense"]
        expected = list(row.shape)
        for axis in reversed(list(where)):  # tp or ep first, then FSDP's axes together
            dim = where[axis]
            if dim is not None:
                expected[dim] = -(-expected[dim] // sizes[axis])
        assert local_shape(row, layout) == tuple(expected), row.name
