"""SimpleFSDP for a native spec: sharded parameters as a parametrisation, so that a compiled graph holds the
collectives.

TorchTitan 0.3.0 has it in experiments/graph_trainer, with a trainer and compiler passes of its own; this takes the
sharding alone and compiles the whole model with the recipe's backend. FSDP2's hooks break graphs, which is why AWS
recommends SimpleFSDP with compile.

    config.model_spec = simple_fsdp(config.model_spec)
    config.parallelism.spmd_backend = "partial_dtensor"
"""

from dataclasses import replace
from typing import Any

from torch import nn
from torchtitan.protocols.model_spec import ModelSpec

from ..errors import UserError

__all__ = ["refuse_unfit", "simple_fsdp"]


def simple_fsdp(spec: ModelSpec) -> ModelSpec:
    """`spec` sharded by SimpleFSDP in FSDP2's place."""
    return replace(spec, parallelize_fn=_parallelize)


def refuse_unfit(spec: ModelSpec, parallelism: Any) -> None:
    """Raise UserError if `spec` is sharded by SimpleFSDP and `parallelism` asks for what that cannot do."""
    p = parallelism
    if spec.parallelize_fn is not _parallelize:
        return
    if p.spmd_backend != "partial_dtensor" or p.context_parallel_degree > 1 or p.pipeline_parallel_degree > 1:
        raise UserError(
            "SimpleFSDP runs with parallelism.spmd_backend partial_dtensor and without context or pipeline parallel; "
            f"found {p.spmd_backend}, context_parallel {p.context_parallel_degree}, pipeline_parallel "
            f"{p.pipeline_parallel_degree}.\n"
            "Change these, or leave simple_fsdp(...) out of the recipe."
        )


def _parallelize(
    model: Any,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    """Tensor parallel, checkpointing, SimpleFSDP, compile: in that order."""
    from torchtitan.experiments.graph_trainer.common_utils import apply_simple_fsdp

    from ..upstream import disable_active_parametrization, wrap_class_cache

    if parallel_dims.tp_enabled:
        model.parallelize(parallel_dims)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    wrap_class_cache.clear()  # its classes hold the mesh of the model that this process sharded before
    model = apply_simple_fsdp(model, parallel_dims=parallel_dims, training=training)
    init_weights = model.init_weights

    def init_sharded(**options: Any) -> None:
        with disable_active_parametrization():  # initialise what is stored, not what a forward gathers
            init_weights(**options)

    model.init_weights = init_sharded
    if compile_config.enable and "model" in compile_config.components:
        model.compile(backend=compile_config.backend, fullgraph=True)
    sharded: nn.Module = model
    return sharded
