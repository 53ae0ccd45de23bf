"""Meshes of a plan, with TorchTitan's axis names (needs torch: the `mesh` extra).

    meshes = build_meshes(plan, "cpu")             # in a process group of plan.world ranks
    meshes["dense"]["tp"], meshes["sparse"]["ep"]

Two views of the same ranks, the last axis fastest:
    dense    pp, dp_replicate, dp_shard, cp, tp     parameters but the experts'
    sparse   pp, dp_replicate, efsdp, ep            experts
Axes of one rank exist like any other, so nobody has to ask first.
"""

from typing import TYPE_CHECKING

from neuron_parallel.parameters import Parameter
from neuron_parallel.plan import ParallelPlan, expert_shard_dim

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["build_meshes", "mesh_shapes", "placements"]


def mesh_shapes(plan: ParallelPlan) -> dict[str, dict[str, int]]:
    """Axis names and sizes of both views. `plan` resolved; ValueError when ep does not divide dp_shard * cp * tp."""
    if plan.inner % plan.ep:
        raise ValueError(
            f"ep {plan.ep} does not divide dp_shard {plan.dp_shard} * cp {plan.cp} * tp {plan.tp} = {plan.inner}"
        )
    outer = {"pp": plan.pp, "dp_replicate": plan.dp_replicate}
    return {
        "dense": {**outer, "dp_shard": plan.dp_shard, "cp": plan.cp, "tp": plan.tp},
        "sparse": {**outer, "efsdp": plan.efsdp, "ep": plan.ep},
    }


def build_meshes(plan: ParallelPlan, device_type: str) -> "dict[str, DeviceMesh]":
    """Both views as DeviceMeshes over all ranks.

    Raises ValueError when the process group has another size than the plan.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if dist.get_world_size() != plan.world:
        raise ValueError(f"the plan is for {plan.world} ranks, the process group has {dist.get_world_size()}")
    return {
        name: init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        for name, axes in mesh_shapes(plan).items()
    }


def placements(parameter: Parameter, plan: ParallelPlan) -> dict[str, int | None]:
    """Axis -> dimension of the tensor that it divides (None: replicated), in the order of the parameter's mesh."""
    sparse = parameter.expert and plan.ep > 1
    found: dict[str, int | None] = dict.fromkeys(mesh_shapes(plan)["sparse" if sparse else "dense"])
    fsdp_dim = expert_shard_dim(plan, parameter.shape[0]) if parameter.expert else 0
    if sparse:
        return found | {"efsdp": fsdp_dim, "ep": 0}
    return found | {"dp_shard": fsdp_dim, "cp": fsdp_dim, "tp": parameter.tp_dim}
