"""Modules that version 0.1.0 put into folders: importing one by its old name says the new one.

Only names of this package that no other finder knows come by here, so nothing else is slower or different.
"""

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

__all__ = ["MOVED", "MovedModules", "message"]

_PACKAGE = "titan_recipes"

MOVED = {
    "assets": "checkpoint.assets",
    "attention": "models.attention",
    "balance": "moe.router",
    "baselines": "publish.baselines",
    "catalog": "recipes",
    "chat": "data.chat",
    "checkpointing": "models.activation_checkpoint",
    "defaults": "config.device_defaults",
    "dispatch": "moe.dispatchers",
    "dispatch_rows": "moe.permute",
    "documents": "data.documents",
    "experts_registry": "moe.transformers_experts",
    "first_loss": "train.first_loss",
    "guard": "checkpoint.completeness",
    "initialization": "models.initialization",
    "kernels": "moe.kernels",
    "memory": "train.device_memory",
    "metrics": "train.metrics",
    "mixture": "data.mixture",
    "modes": "launch.compare_modes",
    "packing": "data.packing",
    "planning": "preflight.plan",
    "profiling": "train.profiler",
    "rehearsal": "preflight.rehearsal",
    "reload": "publish.reload",
    "report": "publish.loss_curve",
    "rows": "data.source",
    "run": "launch.rank",
    "simple_fsdp": "models.simple_fsdp",
    "source": "models.find",
    "spec": "models.spec",
    "stages": "models.pipeline_stages",
    "state_dict": "checkpoint.state_dict",
    "stop": "train.stop",
    "tokens": "data.tokens",
    "trainer": "train.trainer",
    "transformers_route": "models.transformers",
}
"""Old module -> new module, without the package's name."""


def message(name: str) -> str | None:
    """Return where the module `name` is now, or None when it is not one that moved."""
    package, _, module = name.partition(".")
    if package != _PACKAGE or module not in MOVED:
        return None
    return f"{name} is now {_PACKAGE}.{MOVED[module]}. Recipes import what they use from {_PACKAGE} itself."


class MovedModules(MetaPathFinder):
    """The last finder to be asked: it finds nothing, and says where a module of this package went."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise ModuleNotFoundError, naming the new module, for an old name of this package."""
        if text := message(name):
            raise ModuleNotFoundError(text, name=name)
