"""config.json: what is read of it, and that it fits the tensors.

Sizes come from the tensors. What tensors cannot tell (theta, eps, top-k, tying, dtype) comes from config.json. Where
the two overlap and disagree, that is an error and never a choice made in silence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .formats.files import CONFIG, read_json, regular_file
from .formats.tensors import WEIGHT_DTYPES, dtype_named
from .names.read import Reading
from .names.table import ROUTER
from .sizes import Sizes

__all__ = [
    "check_config",
    "check_layers",
    "config_bytes",
    "fit_config",
    "load_config",
    "stored_dtype",
    "tied",
]

MAX_CONFIG = 4 << 20
# Facts without which a Qwen3 cannot be run and that no tensor holds.
_NEEDED = ("rms_norm_eps",)
_NEEDED_MOE = ("num_experts_per_tok", "norm_topk_prob")


def load_config(folder: Path, *, follow_symlinks: bool = False) -> dict[str, Any]:
    """Read config.json.

    Args:
        folder: the folder that has it.
        follow_symlinks: trust a link that leads out of the folder.

    Returns:
        Its content.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a JSON object, or says something twice.
    """
    try:
        path = regular_file(folder, CONFIG, follow_symlinks=follow_symlinks)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder} has no config.json. The tensors cannot tell rope theta, norm eps or top-k: put the "
            "model's config.json there, or name a folder that has it (assets=..., --assets)."
        ) from None
    config = read_json(path, MAX_CONFIG, "a config")
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, expected an object")
    return config


def tied(config: Mapping[str, Any]) -> bool:
    """Whether embedding and head are one matrix.

    Only the outermost setting counts. Absent means untied, as in transformers' Qwen3Config.

    Raises:
        ValueError: it is neither true nor false.
    """
    value = config.get("tie_word_embeddings")
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config.json says tie_word_embeddings {value!r}; expected true or false")
    return bool(value)


def stored_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype a config promises, under its new (`dtype`) or old (`torch_dtype`) name.

    Raises:
        ValueError: the two names are both there and differ, or the word is unknown.
    """
    names = [config[key] for key in ("dtype", "torch_dtype") if config.get(key)]
    found = {dtype_named(str(name)) for name in names}
    if len(found) > 1:
        raise ValueError(f"config.json says dtype {config['dtype']!r} and torch_dtype {config['torch_dtype']!r}")
    if found and not found <= set(WEIGHT_DTYPES):
        raise ValueError(f"config.json says dtype {names[0]!r}; weights can be {', '.join(map(str, WEIGHT_DTYPES))}")
    return found.pop() if found else None


def rope_theta(config: Mapping[str, Any]) -> float | None:
    """Theta, under `rope_theta`, in `rope_parameters` or in `rope_scaling`; None when it is nowhere.

    Raises:
        ValueError: two of them are there and differ.
    """
    places = {"rope_theta": config.get("rope_theta")}
    places |= {f"{name}.rope_theta": block.get("rope_theta") for name, block in _rope_blocks(config).items()}
    found = {place: theta for place, theta in places.items() if theta is not None}
    if len(set(map(str, found.values()))) > 1:
        said = " and ".join(f"{place} {theta!r}" for place, theta in found.items())
        raise ValueError(f"config.json says {said}; which one?")
    return next(iter(found.values()), None)


def _rope_blocks(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    blocks = {name: config.get(name) for name in ("rope_parameters", "rope_scaling")}
    return {name: block for name, block in blocks.items() if isinstance(block, Mapping)}


def _rope_kinds(config: Mapping[str, Any]) -> set[str]:
    """Every rope type that the config names, under its two spellings."""
    return {str(b[key]) for b in _rope_blocks(config).values() for key in ("rope_type", "type") if b.get(key)}


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, (int, str)) for v in value)


# What is read of a config beside sizes: each may be absent, and is of this kind when it is there.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_experts": (lambda v: v == 0 or _is_count(v), "a whole number"),
    "rope_theta": (_is_number, "a positive number"),
    "rms_norm_eps": (_is_number, "a positive number"),
    "num_experts_per_tok": (_is_count, "a positive whole number"),
    "norm_topk_prob": (lambda v: isinstance(v, bool), "true or false"),
    "decoder_sparse_step": (_is_count, "a positive whole number"),
    "mlp_only_layers": (_is_list, "a list of layers"),
    "layer_types": (_is_list, "a list with a word for each layer"),
    "model_type": (lambda v: v in ("qwen3", "qwen3_moe"), "qwen3 or qwen3_moe"),
    # What the tensors have none of.
    "attention_bias": (lambda v: v is False, "false: there are no biases among the tensors"),
    "quantization_config": (lambda v: False, "none: the tensors are not quantised. Remove it"),
}


def _check_kinds(config: Mapping[str, Any]) -> None:
    found = {**config, "rope_theta": rope_theta(config)}
    wrong = [
        f"{name} is {str(found[name])[:80]!r}, expected {expected}"
        for name, (fits, expected) in _KINDS.items()
        if found.get(name) is not None and not fits(found[name])
    ]
    strange = _rope_kinds(config) - {"default", "yarn"}
    if strange:
        wrong.append(f"rope type is {', '.join(sorted(strange))!r}, expected default or yarn")
    if wrong:
        raise ValueError("config.json is not of this model: " + "; ".join(wrong))


def check_config(config: Mapping[str, Any], sizes: Sizes, *, vocab_size: int) -> dict[str, Any]:
    """The config to publish: `config` with every size filled in from the tensors.

    Args:
        config: as loaded.
        sizes: from `sizes_of`.
        vocab_size: rows of the embedding that will be written, without padding.

    Returns:
        `config` with every size.

    Raises:
        ValueError: a size that the config states and the tensors deny, a fact that is in neither, or one that
            means nothing.
    """
    told: dict[str, int] = {
        "vocab_size": vocab_size,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_hidden_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
    }
    if sizes.intermediate_size:
        told["intermediate_size"] = sizes.intermediate_size
    if sizes.num_experts:
        told["num_experts"] = sizes.num_experts
        if "num_local_experts" in config:  # transformers' second name for it
            told["num_local_experts"] = sizes.num_experts
        told["moe_intermediate_size"] = sizes.moe_intermediate_size
    _check_kinds(config)
    wrong = [
        f"{name}: config.json says {config[name]!r}, the tensors {value}"
        for name, value in told.items()
        if config.get(name, value) != value
    ]
    if wrong:
        raise ValueError("config.json does not describe these tensors: " + "; ".join(wrong))
    needed = _NEEDED + (_NEEDED_MOE if sizes.num_experts else ())
    absent = [name for name in needed if config.get(name) is None]
    if rope_theta(config) is None:
        absent.append("rope_theta (or rope_parameters.rope_theta)")
    if absent:
        raise ValueError(
            f"config.json lacks {', '.join(absent)}, which the tensors cannot tell and which has no safe default"
        )
    return {**config, **told}


def config_bytes(config: Mapping[str, Any], *, dtype: torch.dtype | None, tie: bool) -> bytes:
    """config.json as it is published.

    Args:
        config: as `check_config` returned it.
        dtype: dtype of the tensors, written under the names that the config used; None leaves it as it is.
        tie: whether embedding and head are one matrix.

    Returns:
        The bytes of the file.
    """
    result = dict(config)
    if dtype is not None:
        word = str(dtype).removeprefix("torch.")
        for key in [k for k in ("dtype", "torch_dtype") if k in config] or ["dtype"]:
            result[key] = word
    result["tie_word_embeddings"] = tie
    return (json.dumps(result, indent=2, sort_keys=True) + "\n").encode()


def check_layers(config: Mapping[str, Any], reading: Reading) -> None:
    """ValueError unless the config's rule and the tensors agree on which layers are mixtures of experts."""
    count = config.get("num_experts") or 0
    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    moe = config.get("model_type", "qwen3_moe" if count else "qwen3") == "qwen3_moe" and count > 0
    for layer in range(reading.layers):
        by_config = moe and layer not in dense and (layer + 1) % step == 0
        by_tensors = ROUTER.format(layer) in reading.parts or layer in reading.experts
        if by_config != by_tensors:
            words = ("dense", "mixture-of-experts")
            raise ValueError(
                f"layer {layer} is {words[by_tensors]} by its tensors and {words[by_config]} by "
                f"config.json (model_type {config.get('model_type')!r}, num_experts {count})"
            )
    types = config.get("layer_types")
    if types is not None and len(types) != reading.layers:
        raise ValueError(f"config.json lists {len(types)} layer_types for {reading.layers} layers")


def fit_config(config: Mapping[str, Any], sizes: Sizes, vocab_size: int) -> dict[str, Any]:
    """`config` with every size replaced by what the tensors say, and `layer_types` repeated when all are of one
    kind.
    """
    told = {name: value for name, value in vars(sizes).items() if value}
    kind = "qwen3_moe" if sizes.num_experts else "qwen3"
    result = {**config, **told, "vocab_size": vocab_size, "model_type": kind}
    types = config.get("layer_types")
    if isinstance(types, list) and types and all(t == types[0] for t in types):
        result["layer_types"] = [types[0]] * sizes.num_hidden_layers
    return result
