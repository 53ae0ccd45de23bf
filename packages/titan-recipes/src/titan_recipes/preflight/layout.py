"""A parallel layout that cannot work is refused before a rank starts.

The rules of layouts are neuron_parallel.plan's; here its findings get the names of TorchTitan's options. What stands
here besides are rules of TorchTitan's configuration itself: spmd backends, schedules, load balancers.
"""

from types import SimpleNamespace
from typing import Any

from neuron_parallel.plan import Finding, Training, errors

from ..errors import UserError
from ..models.simple_fsdp import refuse_unfit
from ..models.spec import qwen3_of, route_of
from ..moe.router import refuse_balance
from .plan import degrees_of, shape_of

__all__ = ["check_layout", "refuse_findings", "world_size_of"]

_OPTIONS = {
    "world": "--nproc (or torchrun's number of ranks), or the --parallelism.*_degree options",
    "num_attention_heads": "--parallelism.tensor_parallel_degree",
    "num_key_value_heads": "--parallelism.tensor_parallel_degree",
    "vocab_size": "--parallelism.tensor_parallel_degree",
    "intermediate_size": "--parallelism.tensor_parallel_degree",
    "moe_intermediate_size": "--parallelism.tensor_parallel_degree",
    "positions": "--training.seq_len, or max_position_embeddings in the recipe",
    "seq_len": "--training.seq_len",
    "moe_seq_len": "--training.seq_len",
    "loss_chunks": "loss.num_chunks in the recipe",
    "ep": "--parallelism.expert_parallel_degree",
    "sparse_mesh": "--parallelism.expert_parallel_degree",
    "num_experts": "--parallelism.expert_parallel_degree",
    "expert_shards": "--parallelism.expert_parallel_degree",
    "tied_pp": "--parallelism.pipeline_parallel_degree 1, or tie_word_embeddings=False in the recipe",
    "layers": "--parallelism.pipeline_parallel_degree",
    "global_batch": "--training.global_batch_size",
}
"""Rules of neuron_parallel.plan, and the options that put them right."""

_FOREIGN = (
    "degree",
    "world",
    "num_attention_heads",
    "num_key_value_heads",
    "positions",
    "seq_len",
    "global_batch",
    "tied_pp",
)
"""Rules that hold for a model of another's making: its config says what they ask for."""


def world_size_of(config: Any) -> int:
    """Return the ranks that a recipe's degrees ask for: their product, an unset (-1) dp_shard counting as 1."""
    return degrees_of(config).resolve(1).world


def check_layout(config: Any, world_size: int | None = None) -> None:
    """Refuse a parallel layout that does not work, or would mean something else.

    Args:
        config: a built Trainer.Config.
        world_size: ranks that will run; None for those that the degrees ask for.

    Raises:
        UserError: with every rule that the plan breaks, or the first of TorchTitan's configuration.
    """
    _check_backend(config)
    _check_context_parallel(config)
    _check_plan(config, world_size or world_size_of(config))
    _check_schedule(config)


def _check_plan(config: Any, world_size: int) -> None:
    model = config.model_spec.model
    plan = degrees_of(config).resolve(world_size)
    how = Training(loss_chunks=getattr(config.loss, "num_chunks", 1))
    found = errors(plan, shape_of(model), world_size, how)
    refuse_findings(found if qwen3_of(model) is not None else [f for f in found if f.rule in _FOREIGN])


def refuse_findings(found: list[Finding]) -> None:
    """Raise UserError with every error of a plan and the options that put it right, if there is one."""
    wrong = [finding for finding in found if finding.severity == "error"]
    if not wrong:
        return
    lines = [f"  {finding.message}" for finding in wrong]
    options = dict.fromkeys(_OPTIONS[finding.rule] for finding in wrong if finding.rule in _OPTIONS)
    change = f"\nChange {'; '.join(options)}." if options else ""
    raise UserError("The plan cannot work:\n" + "\n".join(lines) + change)


def _check_backend(config: Any) -> None:
    p, spec = config.parallelism, config.model_spec
    refuse_unfit(spec, p)
    refuse_balance(spec, p)
    if qwen3_of(spec.model) is None or route_of(spec) != "transformers":
        return
    if p.spmd_backend != "spmd_types":
        raise UserError(
            f"parallelism.spmd_backend is {p.spmd_backend!r}; TorchTitan's Transformers backend knows 'spmd_types' "
            "alone.\n"
            "Use --parallelism.spmd_backend spmd_types, or --route native."
        )
    if p.tensor_parallel_degree > 1 and not p.enable_sequence_parallel:
        raise UserError(
            "parallelism.enable_sequence_parallel is off, but TorchTitan's Transformers backend always splits the "
            "sequence with tensor parallel.\nLeave it on, or use --route native."
        )


def _check_context_parallel(config: Any) -> None:
    p = config.parallelism
    if p.context_parallel_degree == 1 or qwen3_of(config.model_spec.model) is None:
        return
    if p.spmd_backend != "spmd_types":
        raise UserError(
            f"Context parallel under parallelism.spmd_backend {p.spmd_backend!r} is not supported: TorchTitan gathers "
            "the keys of all ranks for an attention of ours under 'spmd_types' alone.\n"
            "Use --parallelism.spmd_backend spmd_types, or --parallelism.context_parallel_degree 1."
        )
    if p.context_parallel_load_balancer not in (None, "headtail"):
        raise UserError(
            f"context_parallel_load_balancer {p.context_parallel_load_balancer!r} balances FlexAttention's block "
            "masks, which this toolkit's attention does not have.\nUse headtail or None: a dense mask gives every "
            "rank the same work."
        )


def _check_schedule(config: Any) -> None:
    model, p = config.model_spec.model, config.parallelism
    if p.pipeline_parallel_degree == 1:
        return
    if p.pipeline_parallel_schedule == "DualPipeV":
        raise UserError(
            "The DualPipeV schedule has the loss on the first rank, but TorchTitan's metrics are kept on the last.\n"
            "Use --parallelism.pipeline_parallel_schedule ZBVZeroBubble, whose loss they find, or Interleaved1F1B."
        )
    if p.pipeline_parallel_schedule == "ZBVZeroBubble" and config.validator.enable:
        raise UserError(
            "torch's pipelines cannot run the ZBVZeroBubble schedule without a backward pass, as validation does.\n"
            "Use --validator.no-enable, or another schedule, such as Interleaved1F1B."
        )
    try:
        _split_layers(p, model)
    except ValueError as error:
        raise UserError(
            f"{p.pipeline_parallel_degree} pipeline stages with the {p.pipeline_parallel_schedule} schedule do not fit "
            f"the model: {error}\n"
            "Change pipeline_parallel_degree, pipeline_parallel_layers_per_stage or the stages' *_less_layers."
        ) from None


def _split_layers(parallelism: Any, model: Any) -> None:
    """TorchTitan's split into stages. Raises ValueError where the ranks would."""
    from ..upstream import pipeline_metadata, stage_module_names

    degree: Any = SimpleNamespace(pp=parallelism.pipeline_parallel_degree)
    qwen3 = qwen3_of(model)
    layers = SimpleNamespace(layers=range(qwen3.num_hidden_layers)) if qwen3 is not None else model
    split = pipeline_metadata(degree, parallelism, layers)
    if parallelism.module_fqns_per_model_part is None:
        stage_module_names(*split)
