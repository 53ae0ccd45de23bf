"""A run's config through neuron-parallel's eyes: checked before a rank starts, or rehearsed without a device.

`dry_run` needs no Neuron package: rank 0 of a fake process group of the plan's whole world builds TorchTitan's meshes and its
parallelised model under FakeTensorMode, and computes one step of shapes. Nothing is compiled and no collective moves a byte.
"""

import math
import re
import time
from pathlib import Path
from typing import Any

from neuron_parallel import INSTANCES, Cluster, ModelShape, ParallelPlan, Training, instance, memory, validate
from neuron_parallel.cli import memory_table
from neuron_parallel.hardware import Instance
from neuron_parallel.memory import device_allowance
from neuron_parallel.placement import local_shape, parameters
from neuron_parallel.plan import TORCHTITAN_NAMES

from ..errors import UserError
from ..logs import say

__all__ = ["INSTANCE", "check_plan", "dry_run", "plan_of"]

INSTANCE = "trn2.48xlarge"
_DISPATCHERS = {
    "GatherTokenDispatcher": "gather",
    "CapacityTokenDispatcher": "capacity",
    "AllToAllTokenDispatcher": "all-to-all",
}
_CHECKPOINTING = {"SaveLinears": "linears", "FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "selective"}
PRODUCT = Path("/sys/devices/virtual/dmi/id/product_name")
"""EC2 writes the instance type here."""


def plan_of(config: Any, world: int) -> tuple[ParallelPlan, ModelShape, Training] | None:
    """What a built config asks for, in planning's terms; None for a model that is not a Qwen3 of ours."""
    qwen3 = getattr(config.model_spec.model, "qwen3", None)
    if qwen3 is None:
        return None
    p, t = config.parallelism, config.training
    piped = p.pipeline_parallel_degree > 1
    plan = ParallelPlan(
        **{name: getattr(p, field) for name, field in TORCHTITAN_NAMES.items()},
        micro_batch=p.pipeline_parallel_microbatch_size if piped else t.local_batch_size,
        seq_len=t.seq_len,
    ).resolve(world)
    batch = t.global_batch_size if t.global_batch_size > 0 else t.local_batch_size * plan.dp
    plan = ParallelPlan(**{**vars(plan), "global_batch": batch})
    size = {"float32": 4, "bfloat16": 2}
    compute: Any = size[t.mixed_precision_param]
    how = Training(
        checkpointing=_checkpointing(config.activation_checkpoint),
        attention="masked" if config.model_spec.model.document_mask == "block" or plan.cp > 1 else "flash",
        param_bytes=size[t.dtype],
        compute_bytes=compute,
        reduce_bytes=size[t.mixed_precision_reduce],
        optimizer="foreach" if config.optimizer.implementation == "foreach" else "fused",
        loss_chunks=getattr(config.loss, "num_chunks", 1),
        expert_bytes=compute,
        reshard=p.fsdp_reshard_after_forward,
        **_dispatch(config.model_spec.model),
    )
    return plan, ModelShape.from_hf(qwen3.to_hf()), how


def _checkpointing(config: Any) -> Any:
    """Planning's word for an activation-checkpointing config; UserError for a kind of which nothing is known."""
    return "none" if config is None else _word(config, _CHECKPOINTING, "activation_checkpoint")


def _dispatch(model: Any) -> dict[str, Any]:
    """Planning's word for what brings tokens to a model's experts, and its capacity."""
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    for _, dispatcher, _, _ in model.traverse(LocalTokenDispatcher.Config):
        capacity = getattr(dispatcher, "capacity_factor", None)
        word = _word(dispatcher, _DISPATCHERS, "token_dispatcher")
        return {"dispatcher": word} | ({} if capacity is None else {"capacity_factor": capacity})
    return {}


def _word(config: Any, table: dict[str, str], field: str) -> str:
    """Planning's word for a config by its class; a subclass counts as what it derives from."""
    for kind in type(config)._owner.__mro__:
        if kind.__name__ in table:
            return table[kind.__name__]
    raise UserError(
        f"{field} is a {type(config)._owner.__name__}: its memory is not modelled. Known: {', '.join(table)}."
    )


def check_plan(config: Any, world: int, device: str, name: str | None = None) -> None:
    """Raise UserError with every rule that the plan breaks; on Neuron also when it cannot fit a core of instance `name`."""
    planned = plan_of(config, world)
    if planned is None:
        return
    plan, shape, how = planned
    _refuse(plan, shape, world, how)
    if device == "neuron":
        machine, source = _machine(name)
        say(f"memory is checked for {machine.name}, {source}")
        _refuse_too_large(plan, shape, how, Cluster(machine))


def _machine(name: str | None) -> tuple[Instance, str]:
    """The instance and who says so: the user, else the machine, else nobody."""
    try:
        if name:
            return instance(name), "as --instance says"
        if PRODUCT.is_file() and (called := PRODUCT.read_text().strip()) in INSTANCES:
            return instance(called), "as this machine calls itself"
    except ValueError as error:
        raise UserError(str(error)) from None
    return instance(INSTANCE), "which is assumed: this machine does not say what it is; --instance does"


def _refuse(plan: ParallelPlan, shape: ModelShape, cluster: Cluster | int, how: Training) -> None:
    wrong = [finding.message for finding in validate(plan, shape, cluster, how) if finding.severity == "error"]
    if wrong:
        raise UserError("The plan cannot work:\n" + "\n".join(f"  {message}" for message in wrong))


def _refuse_too_large(plan: ParallelPlan, shape: ModelShape, how: Training, cluster: Cluster) -> None:
    report = memory(plan, shape, how)
    if report.peak.bytes + device_allowance(cluster) > cluster.hbm_bytes:
        raise UserError(
            f"The plan does not fit a core:\n{memory_table(report, cluster)}\n"
            "apps/plan lists layouts that do; --activation-checkpoint:full or a chunked loss save most."
        )


def dry_run(config: Any, world: int | None, name: str | None) -> int:
    """Print mesh, memory and shapes of the run as planned for `name` (default trn2.48xlarge); returns the exit code.

    Without `world`, the degrees' product, or one whole instance when dp_shard is left open.
    """
    from ..moe.kernels import check_overrides
    from .checks import check_layout

    start = time.perf_counter()
    try:
        machine = instance(name or INSTANCE)
        per_node = machine.cores(2)
        p = config.parallelism
        fixed = math.prod(
            (
                p.data_parallel_replicate_degree,
                p.context_parallel_degree,
                p.tensor_parallel_degree,
                p.pipeline_parallel_degree,
            )
        )
        world = world or (per_node if p.data_parallel_shard_degree == -1 else fixed * p.data_parallel_shard_degree)
        nodes = -(-world // per_node)
        if nodes > 1 and world % per_node:
            raise ValueError(f"{world} ranks are no whole number of {machine.name} with {per_node} cores each")
        cluster = Cluster(machine, nodes, cores_per_node=None if nodes > 1 else world)
    except ValueError as error:
        raise UserError(str(error)) from None
    planned = plan_of(config, world)
    if planned is None:
        raise UserError("A dry run needs a model of titan_recipes.models.spec (native or transformers).")
    plan, shape, how = planned
    _refuse(plan, shape, cluster, how)  # first: it has every reason at once
    check_layout(config)
    say(f"planned for {cluster.nodes} x {machine.name}: {world} cores, {plan}; nothing runs on a device here")
    for finding in validate(plan, shape, cluster, how):
        say(str(finding))
    for line in check_overrides(config, "neuron", planned=True):
        say(f"override: {line}")
    report = memory(plan, shape, how)
    say(memory_table(report, cluster))
    for line in _rehearse(config, plan, shape, world):
        say(line)
    say(f"dry run: {time.perf_counter() - start:.0f} s; skipped: compilation, collectives, data, checkpoints")
    return 0 if report.peak.bytes + device_allowance(cluster) <= cluster.hbm_bytes else 1


def _rehearse(config: Any, plan: ParallelPlan, shape: ModelShape, world: int) -> list[str]:
    """TorchTitan's meshes, local parameters and one step's shapes on rank 0 of a fake world."""
    import torch
    import torch.distributed as dist
    from torch._subclasses import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.config import TORCH_DTYPE_MAP, apply_overrides
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.tools import utils

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        dims = ParallelDims.from_config(config.parallelism, world)
        dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
        spec = config.model_spec
        spec.model.update_from_config(config=config)
        apply_overrides(config.override, config)
        meshes = {
            axis: dims.get_optional_mesh(axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "efsdp")
        }
        lines = [
            "mesh: "
            + (", ".join(f"{axis} {mesh.size()}" for axis, mesh in meshes.items() if mesh is not None) or "one core")
        ]
        if plan.pp > 1:
            return [*lines, "shapes: a pipeline stage is not rehearsed; the figures above are of the largest stage"]
        with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
            model = spec.model.build()
        model = spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=type(config.compile)(),
            ac_config=config.activation_checkpoint,
            dump_folder=config.dump_folder,
        )
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            if spec.model.qwen3.tie_word_embeddings:  # materialising parts them; a run's initialisation ties them again
                model.lm_head.weight = model.tok_embeddings.weight
            lines += _local_parameters(model, plan, shape)
            tokens = torch.zeros(plan.micro_batch, plan.seq_len // plan.cp, dtype=torch.int64)
            positions = torch.arange(plan.seq_len // plan.cp).expand(plan.micro_batch, -1)
            with dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)():
                out = model(tokens, positions=positions)
                lines.append(
                    f"forward: tokens {tuple(tokens.shape)} -> logits {tuple(out.shape)} {str(out.dtype)[6:]} on each core"
                )
                out.float().sum().backward()
            gradients = sum(parameter.grad is not None for parameter in model.parameters())
            lines.append(
                f"backward: {gradients} of {len(list(model.parameters()))} parameters have a gradient of their own shape"
            )
        return lines
    finally:
        dist.destroy_process_group()


def _local_parameters(model: Any, plan: ParallelPlan, shape: ModelShape) -> list[str]:
    """TorchTitan's shards beside the planner's. AssertionError when they differ: then one of the two is wrong."""
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
