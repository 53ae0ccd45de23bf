"""Every private name of torch and TorchTitan that this package uses, once, with its reason; loaded when used.

    from ..upstream import get_metrics_rank

A private name may go with any release. `lost()` says which of them the installed releases no longer have; a test holds
that it is none. Names lose their underscore here. Nothing is replaced or patched through this table.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    pass

__all__ = ["MEMBERS", "NAMES", "Upstream", "graph_task_id", "lost"]


class Upstream(NamedTuple):
    """Where a name lives and why no public one does."""

    module: str
    name: str
    reason: str


_OVERRIDES = "torchtitan.config.override"
_COLLECTIVES = "torch.distributed._functional_collectives"
_NO_RANKS = "a rehearsal has one process and no memory, and no public name makes that"
_TRACEABLE = "the public collectives write into their arguments, which autograd and a compiled graph do not follow"

NAMES: dict[str, Upstream] = {
    "get_metrics_rank": Upstream("torchtitan.components.metrics", "_get_metrics_rank", "which rank has the loss"),
    "OVERRIDES": Upstream(_OVERRIDES, "_REGISTRY", "an override that is registered twice is an error"),
    "resolve_active": Upstream(_OVERRIDES, "_resolve_active", "overrides are checked before a rank starts"),
    "resolve_target": Upstream(_OVERRIDES, "_resolve_target", "overrides are checked before a rank starts"),
    "collect_claims": Upstream(_OVERRIDES, "_collect_claims", "an override that matches nothing only warns there"),
    "check_node_conflicts": Upstream(
        _OVERRIDES, "_check_node_conflicts", "two overrides of one node are refused early"
    ),
    "Claim": Upstream(_OVERRIDES, "_Claim", "the type of what collect_claims returns"),
    "pipeline_metadata": Upstream(
        "torchtitan.distributed.pipeline_parallel", "_get_pipeline_metadata", "a split is refused before a rank starts"
    ),
    "stage_module_names": Upstream(
        "torchtitan.distributed.pipeline_parallel",
        "_generate_llm_fqn_per_model_part",
        "a split is refused before a rank starts",
    ),
    "wrap_class_cache": Upstream(
        "torchtitan.experiments.graph_trainer.simple_fsdp",
        "_wrap_class_cache",
        "its classes hold the mesh of the model that this process sharded before",
    ),
    "disable_active_parametrization": Upstream(
        "torchtitan.experiments.graph_trainer.simple_fsdp",
        "disable_active_parametrization",
        "initialisation writes what is stored, not what a forward pass gathers",
    ),
    "graph_counters": Upstream("torch._dynamo.utils", "counters", "the number of graphs that torch.compile made"),
    "flatten_state_dict": Upstream(
        "torch.distributed.checkpoint._nested_dict", "flatten_state_dict", "DCP's own names of nested keys"
    ),
    "checkpoint_wrapper": Upstream(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "checkpoint_wrapper",
        "the wrapper that TorchTitan's own policies use",
    ),
    "compute_local_shape_and_global_offset": Upstream(
        "torch.distributed.tensor._utils", "compute_local_shape_and_global_offset", "which experts a rank holds"
    ),
    "StridedShard": Upstream(
        "torch.distributed.tensor.placement_types", "_StridedShard", "FSDP over TP shards so, and no public name tells"
    ),
    "all_gather_single": Upstream(_COLLECTIVES, "all_gather_single", _TRACEABLE),
    "all_gather_single_autograd": Upstream(_COLLECTIVES, "all_gather_single_autograd", _TRACEABLE),
    "all_to_all_single": Upstream(_COLLECTIVES, "all_to_all_single", _TRACEABLE),
    "reduce_scatter_single_autograd": Upstream(_COLLECTIVES, "reduce_scatter_single_autograd", _TRACEABLE),
    "FakeTensorMode": Upstream("torch._subclasses.fake_tensor", "FakeTensorMode", _NO_RANKS),
    "unset_fake_temporarily": Upstream("torch._subclasses.fake_tensor", "unset_fake_temporarily", _NO_RANKS),
    "FakeStore": Upstream("torch.testing._internal.distributed.fake_pg", "FakeStore", _NO_RANKS),
    "TorchDispatchMode": Upstream(
        "torch.utils._python_dispatch", "TorchDispatchMode", "it sees what operators allocate"
    ),
    "tree_leaves": Upstream("torch.utils._pytree", "tree_leaves", "operators return nested results"),
    "ShardingPropagator": Upstream(
        "torch.distributed.tensor._sharding_prop",
        "ShardingPropagator",
        "it works out shapes on tensors of the whole's size, which a rehearsal must not count",
    ),
    "clear_sharding_prop_cache": Upstream(
        "torch.distributed.tensor.debug",
        "_clear_sharding_prop_cache",
        "it would hand one rehearsal's meshes to the next one's equal ones",
    ),
}


_DCP = "torchtitan.components.checkpointer.dcp"
_DISPATCHER = "torchtitan.models.common.token_dispatcher"
_BACKEND = "torchtitan.experiments.transformers_modeling_backend"
_STEPS = "a step is written, found and removed as this package says"
_EXCHANGE = "the functional exchange runs on every backend; the list form of it does not run on gloo"

MEMBERS: tuple[Upstream, ...] = (
    Upstream(_DCP, "CheckpointManager._save", _STEPS),
    Upstream(_DCP, "CheckpointManager._load", _STEPS),
    Upstream(_DCP, "CheckpointManager._should_save", _STEPS),
    Upstream(_DCP, "CheckpointManager._find_load_step", _STEPS),
    Upstream(_DCP, "CheckpointManager._purge_stale_checkpoints", _STEPS),
    Upstream(_DCP, "CheckpointManager._create_checkpoint_id", _STEPS),
    Upstream(_DCP, "CheckpointManager._wait_for_saving", _STEPS),
    Upstream(_DISPATCHER, "AllToAllTokenDispatcher._token_count_exchange", _EXCHANGE),
    Upstream(_DISPATCHER, "AllToAllTokenDispatcher._dispatch_token_exchange", _EXCHANGE),
    Upstream(_DISPATCHER, "AllToAllTokenDispatcher._combine_token_exchange", _EXCHANGE),
    Upstream(
        "torchtitan.distributed.activation_checkpoint", "SelectiveAC._wrap_block", "every linear is kept, each time"
    ),
    Upstream("torchtitan.config", "Configurable.Config._owner", "the class that a config builds"),
    Upstream("torchtitan.protocols.module", "Module._init_self_buffers", "buffers of experts that are built on meta"),
    Upstream("torchtitan.protocols.module", "Module._preserve_buffer_spmd_types", "the same buffers, sharded"),
    Upstream(
        "torchtitan.models.common.moe",
        "TokenChoiceTopKRouter.Config._debug_force_load_balance",
        "debug.moe_force_load_balance reaches the router through it",
    ),
    Upstream(_BACKEND, "HFTransformerModel._patch_hf_llama_like", "the process-wide patch of Transformers is left out"),
    Upstream(
        "torch.distributed.tensor._sharding_prop", "ShardingPropagator._fake_mode_lock", "what a rehearsal counts"
    ),
)
"""Private members of upstream classes that ours override, call or read."""


def __getattr__(name: str) -> Any:
    """Load one of NAMES at first use: some of their modules cost seconds."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute, _ = NAMES[name]
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *NAMES})


def lost() -> list[str]:
    """Return a line for each name that the installed torch or TorchTitan no longer has, with the reason it is used."""
    lines = []
    for module, path, reason in (*NAMES.values(), *MEMBERS):
        try:
            found: Any = import_module(module)
            for name in path.split("."):
                found = _member(found, name)
        except (ImportError, AttributeError) as error:
            lines.append(f"{module}.{path} ({reason}): {error}")
    return lines


def _member(owner: Any, name: str) -> Any:
    """`owner.name`, or the field of that name when `owner` is a dataclass.

    Raises AttributeError when it has neither.
    """
    fields = getattr(owner, "__dataclass_fields__", {})
    return fields[name] if name in fields else getattr(owner, name)


def graph_task_id() -> int:
    """Return the number of autograd's running backward pass, -1 outside one: how recomputation is told from a first
    pass.
    """
    import torch

    return torch._C._current_graph_task_id()
