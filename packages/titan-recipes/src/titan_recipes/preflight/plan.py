"""A run's config in neuron-parallel's terms, and whether its plan fits the machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from neuron_parallel import INSTANCES, Cluster, ModelShape, ParallelPlan, Training, core_memory, instance
from neuron_parallel.cli import memory_table
from neuron_parallel.hardware import Instance
from neuron_parallel.memory import device_allowance
from neuron_parallel.plan import TORCHTITAN_NAMES

from ..errors import UserError
from ..logs import say
from ..models.spec import is_tied, qwen3_of

__all__ = ["INSTANCE", "check_memory", "degrees_of", "plan_of", "shape_of"]

INSTANCE = "trn2.48xlarge"
_DISPATCHERS = {
    "GatherTokenDispatcher": "gather",
    "CapacityTokenDispatcher": "capacity",
    "AllToAllTokenDispatcher": "all-to-all",
}
_CHECKPOINTING = {"SaveLinears": "linears", "FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "selective"}
PRODUCT = Path("/sys/devices/virtual/dmi/id/product_name")
"""EC2 writes the instance type here."""


def degrees_of(config: Any) -> ParallelPlan:
    """Return the degrees, batch and length of a built config as a plan whose dp_shard may still be open (-1)."""
    p, t = config.parallelism, config.training
    return ParallelPlan(
        **{name: getattr(p, field) for name, field in TORCHTITAN_NAMES.items()},
        micro_batch=t.local_batch_size,
        global_batch=t.global_batch_size if t.global_batch_size > 0 else -1,
        seq_len=t.seq_len,
    )


def shape_of(model: Any) -> ModelShape:
    """Return the sizes of a model's config; of a model of another's making only those that its config says.

    The others are 1, or what every degree divides: rules about them say nothing (see layout.py).
    """
    qwen3 = qwen3_of(model)
    if qwen3 is not None:
        return ModelShape.from_hf(qwen3.to_hf())
    attention = model.first_attention
    return ModelShape(
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        num_hidden_layers=max(1, len(getattr(model, "layers", ()))),
        num_attention_heads=attention.n_heads,
        num_key_value_heads=attention.n_kv_heads or attention.n_heads,
        head_dim=1,
        tie_word_embeddings=is_tied(model),
        max_position_embeddings=model.max_seq_len,
    )


def plan_of(config: Any, world: int) -> tuple[ParallelPlan, ModelShape, Training] | None:
    """Return what a built config asks for, in planning's terms; None for a model that is not a Qwen3 of ours."""
    if qwen3_of(config.model_spec.model) is None:
        return None
    p, t = config.parallelism, config.training
    plan = degrees_of(config).resolve(world)
    if plan.pp > 1:
        plan = replace(plan, micro_batch=p.pipeline_parallel_microbatch_size)
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
    return plan, shape_of(config.model_spec.model), how


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


def check_memory(config: Any, world: int, name: str | None = None) -> None:
    """Raise UserError when a core of instance `name` cannot hold a run on Neuron."""
    planned = plan_of(config, world)
    if planned is None:
        return
    plan, shape, how = planned
    machine, source = _machine(name)
    say(f"memory is checked for {machine.name}, {source}")
    report = core_memory(plan, shape, how)
    cluster = Cluster(machine)
    if report.peak.bytes + device_allowance(cluster) > cluster.hbm_bytes:
        raise UserError(
            f"The plan does not fit a core:\n{memory_table(report, cluster)}\n"
            "apps/plan lists layouts that do; --activation-checkpoint:full or a chunked loss save most."
        )


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
