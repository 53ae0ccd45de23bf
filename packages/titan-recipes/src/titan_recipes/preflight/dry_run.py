"""`--dry-run`: a run planned for a machine that is not here. Mesh, memory and one step's shapes; no Neuron package
needed.

Rank 0 of a fake process group of the plan's whole world builds TorchTitan's meshes and its parallelised model under
FakeTensorMode, and computes one step of shapes. Nothing is compiled and no collective moves a byte.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from neuron_parallel import Cluster, ModelShape, ParallelPlan, core_memory, instance, validate
from neuron_parallel.cli import memory_table
from neuron_parallel.memory import device_allowance
from neuron_parallel.parameters import local_shape, parameters

from ..errors import UserError
from ..logs import say
from .layout import check_layout, refuse_findings, world_size_of
from .plan import INSTANCE, plan_of

__all__ = ["dry_run"]

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "efsdp")


def dry_run(config: Any, world: int | None, name: str | None) -> int:
    """Print mesh, memory and shapes of the run as planned.

    Args:
        config: a built Trainer.Config.
        world: ranks; None for the degrees' product, or one whole instance when dp_shard is left open.
        name: the instance, by default trn2.48xlarge.

    Returns:
        The exit code: 1 when a core cannot hold the run.

    Raises:
        UserError: the plan cannot work.
    """
    from ..moe.kernels import check_overrides

    start = time.perf_counter()
    cluster = _cluster(config, world, name)
    world = cluster.cores
    planned = plan_of(config, world)
    if planned is None:
        raise UserError("A dry run needs a model of titan_recipes (native or transformers).")
    plan, shape, how = planned
    findings = validate(plan, shape, cluster, how)
    refuse_findings(findings)  # first: they have every reason at once
    check_layout(config, world)
    say(f"planned for {cluster.nodes} x {cluster.instance.name}: {world} cores, {plan}; nothing runs on a device here")
    for finding in findings:
        say(str(finding))
    for line in check_overrides(config, "neuron", planned=True):
        say(f"override: {line}")
    report = core_memory(plan, shape, how)
    say(memory_table(report, cluster))
    for line in _rehearse(config, plan, shape):
        say(line)
    say(f"dry run: {time.perf_counter() - start:.0f} s; skipped: compilation, collectives, data, checkpoints")
    return 0 if report.peak.bytes + device_allowance(cluster) <= cluster.hbm_bytes else 1


def _cluster(config: Any, world: int | None, name: str | None) -> Cluster:
    """The machines that `world` ranks fill. UserError for an unknown instance or a part of a second node."""
    try:
        machine = instance(name or INSTANCE)
        per_node = machine.cores(2)
        is_open = config.parallelism.data_parallel_shard_degree == -1
        world = world or (per_node if is_open else world_size_of(config))
        nodes = -(-world // per_node)
        if nodes > 1 and world % per_node:
            raise ValueError(f"{world} ranks are no whole number of {machine.name} with {per_node} cores each")
        return Cluster(machine, nodes, cores_per_node=None if nodes > 1 else world)
    except ValueError as error:
        raise UserError(str(error)) from None


def _rehearse(config: Any, plan: ParallelPlan, shape: ModelShape) -> list[str]:
    """TorchTitan's meshes, local parameters and one step's shapes on rank 0 of a fake world."""
    from torchtitan.config import apply_overrides
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils

    with _fake_world(plan.world):
        dims = ParallelDims.from_config(config.parallelism, plan.world)
        dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
        config.model_spec.model.update_from_config(config=config)
        apply_overrides(config.override, config)
        sizes = [f"{axis} {mesh.size()}" for axis in _AXES if (mesh := dims.get_optional_mesh(axis)) is not None]
        mesh = f"mesh: {', '.join(sizes) or 'one core'}"
        if plan.pp > 1:
            return [mesh, "shapes: a pipeline stage is not rehearsed; the figures above are of the largest stage"]
        model = _parallelised(config, dims)
        return [mesh, *_step_of_shapes(config, model, dims, plan, shape)]


@contextmanager
def _fake_world(size: int) -> Iterator[None]:
    import torch.distributed as dist

    from ..upstream import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _parallelised(config: Any, dims: Any) -> Any:
    """The model on the meta device, as TorchTitan divides it."""
    import torch
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.tools import utils

    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model = config.model_spec.model.build()
    return config.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=type(config.compile)(),
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
    )


def _step_of_shapes(config: Any, model: Any, dims: Any, plan: ParallelPlan, shape: ModelShape) -> list[str]:
    """A line for parameters, forward and backward of one core."""
    import torch
    from torchtitan.distributed import utils as dist_utils

    from ..models.spec import is_tied
    from ..upstream import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        if is_tied(config.model_spec.model):  # materialising parts them; a run's initialisation ties them again
            model.lm_head.weight = model.tok_embeddings.weight
        lines = _local_parameters(model, plan, shape)
        tokens = torch.zeros(plan.micro_batch, plan.seq_len // plan.cp, dtype=torch.int64)
        positions = torch.arange(plan.seq_len // plan.cp).expand(plan.micro_batch, -1)
        with dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)():
            out = model(tokens, positions=positions)
            out.float().sum().backward()
    found = f"logits {tuple(out.shape)} {str(out.dtype)[6:]}"
    with_gradient = sum(parameter.grad is not None for parameter in model.parameters())
    return [
        *lines,
        f"forward: tokens {tuple(tokens.shape)} -> {found} on each core",
        f"backward: {with_gradient} of {len(list(model.parameters()))} parameters have a gradient of their own shape",
    ]


def _local_parameters(model: Any, plan: ParallelPlan, shape: ModelShape) -> list[str]:
    """TorchTitan's shards beside the planner's.

    AssertionError when they differ, because one of the two is then wrong.
    """
    from torch.distributed.tensor import DTensor

    rows = {
        row.name: row for moe in ({True, False} if shape.num_experts else {False}) for row in parameters(shape, moe)
    }
    shown, count = [], 0
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        count += local.numel()
        layer, rest = _place(name)
        row = rows.get(rest)
        if row is not None and plan.world > 1:
            assert tuple(local.shape) == local_shape(row, plan), (name, tuple(local.shape), local_shape(row, plan))
        if layer == "0":
            shown.append(f"  {rest:<45} {tuple(parameter.shape)!s:<20} -> {tuple(local.shape)} a core")
    return [f"parameters: {count:,} a core; embedding, head and the first layer:", *shown]


def _place(name: str) -> tuple[str, str]:
    """(layer, name in it) of a parameter of either model code; what is in no layer counts to the first."""
    short = ".".join(part for part in name.split(".") if not part.startswith("_"))
    found = re.fullmatch(r"(?:model\.)*(?:layers\.(\d+)\.)?(.+)", short)  # Transformers' are inside model.model
    assert found is not None, name
    return found[1] or "0", found[2]
