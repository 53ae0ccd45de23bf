"""TorchTitan model specs for any Qwen3, dense or mixture of experts, on any route.

    native("Qwen/Qwen3-8B")              TorchTitan's own model
    transformers("Qwen/Qwen3-8B")        the Transformers class, in TorchTitan's Transformers backend
    native(Qwen3Config(vocab_size=...))  sizes of your own, by the names of config.json

The third route, `kernels`, is the native one with the overrides of titan_recipes.moe.kernels. All compute what
qwen3-core computes from the same weights, and start from its initial distribution. docs/routes.md compares them.
"""

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from qwen3_core import Qwen3Config
from torchtitan.config import TORCH_DTYPE_MAP, Configurable
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from ..checkpoint.state_dict import BackendStateDictAdapter
from ..checkpoint.steps import ASSETS, is_step
from ..errors import UserError
from ..moe.layer import keep_choices
from .attention import Mask, MaskedQwen3Model
from .find import Model, ModelSource, find_model
from .native import native

if TYPE_CHECKING:
    from ..train.trainer import Trainer

__all__ = [
    "Route",
    "hf_config",
    "is_tied",
    "model_spec",
    "native",
    "published_dtype",
    "qwen3_of",
    "route_of",
    "swaps",
    "transformers",
    "use_model",
]

log = logging.getLogger(__name__)

Route = Literal["native", "transformers", "kernels"]


def transformers(model: Model, *, document_mask: Mask = "block", flavor: str | None = None) -> ModelSpec:
    """The Transformers class in TorchTitan's Transformers backend, with SDPA. `flavor` as for `native`."""
    from .transformers import transformers_model_spec  # Transformers' model code costs seconds

    source = find_model(model)
    return transformers_model_spec(source.config, document_mask, flavor or source.name, BackendStateDictAdapter)


def model_spec(
    model: Model, *, route: str = "native", document_mask: Mask = "block", flavor: str | None = None
) -> ModelSpec:
    """`native` (that of `kernels`, too) or `transformers`, by the route's name. Raises UserError for another route."""
    routes = {"native": native, "transformers": transformers, "kernels": native}
    if route not in routes:
        raise UserError(f"route {route!r} is unknown; choose one of {', '.join(routes)}.")
    return routes[route](model, document_mask=document_mask, flavor=flavor)


def qwen3_of(model: Any) -> Qwen3Config | None:
    """Return the Qwen3Config that a model's config was made from; None for a model that is not of this package's
    making.
    """
    return getattr(model, "qwen3", None)


def is_tied(model: Any) -> bool:
    """Return whether a model's config ties its head to its embedding, whoever made the model."""
    qwen3 = qwen3_of(model)
    return bool(qwen3.tie_word_embeddings if qwen3 is not None else getattr(model, "enable_weight_tying", False))


def route_of(spec: ModelSpec) -> Route:
    """The route whose model a spec of this module is (`kernels` has the native one).

    UserError for a spec of another's making.
    """
    if qwen3_of(spec.model) is None:
        raise UserError(
            f"The recipe's model spec ({spec.name} {spec.flavor}) is not one of titan_recipes: it has no route to "
            "change. Build it with native(...) or transformers(...)."
        )
    return "native" if isinstance(spec.model, MaskedQwen3Model.Config) else "transformers"


def swaps(spec: ModelSpec) -> list[str]:
    """A line for each class of this toolkit that stands in a spec where TorchTitan has one of its own."""
    found: Counter[str] = Counter()
    for _, config, _, _ in spec.model.traverse(Module.Config, recurse=True):
        owner = config._owner
        if owner is not None and owner.__module__.startswith("titan_recipes."):
            stock = next(base for base in owner.__mro__ if not base.__module__.startswith("titan_recipes."))
            found[f"{owner.__module__}.{owner.__name__} for {stock.__module__}.{stock.__name__}"] += 1
    return [f"{line} ({count} x)" for line, count in found.items()]


def use_model(
    config: "Trainer.Config", model: Model | None = None, *, route: str | None = None, weights: bool | None = None
) -> None:
    """Set every field of a recipe's config that depends on the model; what is None stays as the recipe has it.

    A folder's tokenizer becomes hf_assets_path, and its weights are what a fresh run starts from (`weights=False`: only
    its sizes; True: they have to be there). `kernels` keeps a recipe's choice of kernels, or takes nki-moe's experts in
    every layer; another route takes none.
    """
    assert config.model_spec is not None
    own, old = route_of(config.model_spec), config.model_spec.model
    if route is not None:
        _use_kernels(config, route == "kernels")
    route = route or own
    if model is None:
        config.model_spec = _respecified(config.model_spec, old.qwen3, route, config.model_spec.flavor)
        return
    source = find_model(model)
    config.model_spec = _respecified(config.model_spec, source.config, route, source.name)
    config.expected_trainable = None  # it was another model's
    for _, loss, _, _ in config.loss.traverse(Configurable.Config, recurse=True):  # one may wrap another
        if hasattr(loss, "global_vocab_size"):
            loss.global_vocab_size = source.config.vocab_size
    if source.tokenizer is not None:
        config.hf_assets_path = str(source.tokenizer)
    elif source.weights is not None:
        log.warning(
            "%s has no tokenizer.json, so the recipe's tokenizer is used (%s): make sure that the weights were trained "
            "with its ids",
            model,
            config.hf_assets_path,
        )
    _refuse_missing_weights(config, source, weights)
    if source.weights is not None and weights is not False:
        config.checkpoint.initial_load_path = str(source.weights)
        config.checkpoint.initial_load_in_hf = True  # a step too: read through the same table, it starts any route
    elif config.checkpoint.initial_load_path and (weights is False or source.config != old.qwen3):
        log.warning(
            "%s gives sizes alone: the recipe's weights (%s) are another model's and will not be read",
            source.name,
            config.checkpoint.initial_load_path,
        )
        config.checkpoint.initial_load_path, config.checkpoint.initial_load_in_hf = None, False


def _refuse_missing_weights(config: "Trainer.Config", source: ModelSource, weights: bool | None) -> None:
    """UserError where weights were wanted and none were found; a folder of sizes alone is one with nothing that says
    otherwise.
    """
    if weights is False or source.weights is not None:
        return
    found = "".join(f"\n  {line}" for line in source.unreadable)
    none = (
        f"{source.folder or source.name} has no weights that can be read: neither *.safetensors nor a TorchTitan step."
    )
    if found:
        raise UserError(f"{none} There:{found}\nFor its sizes alone, name a folder with config.json and no more.")
    if weights:
        raise UserError(none)
    if source.folder is not None and config.checkpoint.initial_load_path:
        raise UserError(
            f"{none}\nThe recipe starts from weights ({config.checkpoint.initial_load_path}); those are another "
            "model's. Name a folder "
            "with weights, or a recipe that starts from random ones."
        )


def _respecified(old: ModelSpec, qwen3: Qwen3Config, route: str, flavor: str) -> ModelSpec:
    """A spec of `qwen3` on `route` with what a recipe chose on `old`.

    UserError for a choice that the other model code lacks.
    """
    new = model_spec(qwen3, route=route, document_mask=old.model.document_mask, flavor=flavor)
    keep_choices(old.model, new.model)
    if route_of(new) == route_of(old):
        return replace(old, model=new.model, flavor=flavor)
    stock = model_spec(old.model.qwen3, route=route_of(old), document_mask=old.model.document_mask)
    if old.parallelize_fn is not stock.parallelize_fn:
        chosen = getattr(old.parallelize_fn, "__module__", "")
        raise UserError(
            f"The recipe parallelises its model by a function of its own ({chosen}), made for {route_of(old)}'s model "
            f"code: the route {route} would run without it.\nKeep the route, or take that choice out of the recipe."
        )
    return new


def _use_kernels(config: "Trainer.Config", wanted: bool) -> None:
    from ..moe.kernels import is_kernel, kernel

    imports = config.override.imports
    if not wanted:
        config.override.imports = [entry for entry in imports if not is_kernel(entry)]
    elif not any(is_kernel(entry) for entry in imports):
        config.override.imports = [*imports, kernel("experts")]


def hf_config(model: Any, *, dtype: torch.dtype) -> dict[str, Any] | None:
    """The config.json that Transformers needs to rebuild a model of these specs (`dtype`: of the weights),
    else None.
    """
    config = qwen3_of(model)
    if config is None:
        return None
    written: dict[str, Any] = replace(config, dtype=str(dtype).removeprefix("torch.")).to_hf()
    return written


def published_dtype(config: "Trainer.Config") -> torch.dtype:
    """Return the dtype that a run's weights are published in.

    It is that of the folder which training starts from, so that a fine-tuned bfloat16 model is no larger than it was;
    without one, that of the trained weights. The checkpoint keeps those as they are.
    """
    path = config.checkpoint.initial_load_path if config.checkpoint.enable else None
    folder = Path(path) if path else None
    if folder is not None and folder.is_dir():
        described = folder / ASSETS if is_step(folder) else folder
        if (described / "config.json").is_file():
            named = Qwen3Config.from_hf(described).dtype
            if named in ("float32", "bfloat16", "float16"):
                return getattr(torch, named)
    return TORCH_DTYPE_MAP[config.training.dtype]
