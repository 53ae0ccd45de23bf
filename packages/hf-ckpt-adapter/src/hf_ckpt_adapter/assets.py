"""The files beside the weights: config, generation config, tokenizer. What they say must fit the tensors.

Sizes come from the tensors. What tensors cannot tell (theta, eps, top-k, tying, dtype) comes from
`config.json`; where the two overlap and disagree, that is an error and never a choice made in silence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .formats.files import CONFIG, COPIED_FILES, read_json, regular_file
from .formats.tensors import WEIGHT_DTYPES, dtype_named
from .names.read import Reading

__all__ = [
    "Sizes",
    "asset_files",
    "check_config",
    "config_bytes",
    "load_config",
    "sizes_of",
    "stored_dtype",
    "tied",
]

MAX_CONFIG = 4 << 20
# Facts without which a Qwen3 cannot be run and that no tensor holds.
_NEEDED = ("rms_norm_eps",)
_NEEDED_MOE = ("num_experts_per_tok", "norm_topk_prob")


def load_config(folder: Path, *, follow_symlinks: bool = False) -> dict[str, Any]:
    """`config.json` of a folder.

    Raises:
        FileNotFoundError: there is none. ValueError: it is not a JSON object.
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
    """Whether embedding and head are one matrix. Only the outermost setting counts; absent means untied,
    as in transformers' Qwen3Config.

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


@dataclass(frozen=True)
class Sizes:
    """What the tensors say about the architecture; 0 where a model has no such thing."""

    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    num_experts: int = 0
    moe_intermediate_size: int = 0


def sizes_of(reading: Reading) -> Sizes:
    """Sizes from the shapes of the parts.

    Raises:
        ValueError: two layers disagree, naming both tensors, or a layer lacks the tensors that tell.
    """
    found: dict[str, tuple[int, str]] = {}

    def note(size: str, value: int, part: str) -> None:
        before = found.setdefault(size, (value, part))
        if before[0] != value:
            raise ValueError(f"{size} is {before[0]} by {before[1]!r} and {value} by {part!r}")

    for part, shape in reading.parts.items():
        leaf = part.rsplit(".", 2)[-2]
        if leaf in ("embed_tokens", "lm_head"):
            note("vocab_size", shape[0], part)
            note("hidden_size", shape[1], part)
        elif leaf in ("input_layernorm", "post_attention_layernorm", "norm"):
            note("hidden_size", shape[0], part)
        elif leaf in ("q_norm", "k_norm"):
            note("head_dim", shape[0], part)
        elif leaf in ("q_proj", "k_proj", "v_proj"):
            note("query rows" if leaf == "q_proj" else "key rows", shape[0], part)
            note("hidden_size", shape[1], part)
        elif leaf == "o_proj":
            note("hidden_size", shape[0], part)
            note("query rows", shape[1], part)
        elif leaf == "gate" and part.endswith(".mlp.gate.weight"):
            note("num_experts", shape[0], part)
            note("hidden_size", shape[1], part)
        elif leaf in ("gate_proj", "up_proj", "down_proj"):
            width = "moe_intermediate_size" if ".experts." in part else "intermediate_size"
            wide, model = (shape[1], shape[0]) if leaf == "down_proj" else shape
            note(width, wide, part)
            note("hidden_size", model, part)
    sizes = {name: value for name, (value, _) in found.items()}
    head_dim = sizes.get("head_dim", 0)
    for rows in ("query rows", "key rows"):
        if head_dim == 0 or not sizes.get(rows) or sizes[rows] % head_dim:
            raise ValueError(f"{sizes.get(rows, 0)} {rows} are not a whole number of heads of {head_dim} (from q_norm)")
    return Sizes(
        vocab_size=sizes.get("vocab_size", 0),
        hidden_size=sizes["hidden_size"],
        num_hidden_layers=reading.layers,
        num_attention_heads=sizes["query rows"] // head_dim,
        num_key_value_heads=sizes["key rows"] // head_dim,
        head_dim=head_dim,
        intermediate_size=sizes.get("intermediate_size", 0),
        num_experts=sizes.get("num_experts", 0),
        moe_intermediate_size=sizes.get("moe_intermediate_size", 0),
    )


def rope_theta(config: Mapping[str, Any]) -> float | None:
    """Theta under its old place (`rope_theta`) or its new one (`rope_parameters.rope_theta`).

    Raises:
        ValueError: the two are both there and differ.
    """
    nested = config.get("rope_parameters")
    new, old = nested.get("rope_theta") if isinstance(nested, Mapping) else None, config.get("rope_theta")
    if None not in (new, old) and new != old:
        raise ValueError(f"config.json says rope_theta {old!r} and rope_parameters.rope_theta {new!r}; which one?")
    return old if new is None else new


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
    if wrong:
        raise ValueError("config.json is not of this model: " + "; ".join(wrong))


def check_config(config: Mapping[str, Any], sizes: Sizes, *, vocab_size: int) -> dict[str, Any]:
    """The config to publish: `config` with every size filled in from the tensors.

    Args:
        config: as loaded.
        sizes: from `sizes_of`.
        vocab_size: rows of the embedding that will be written (padding already trimmed).

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
    """`config.json` as published, its dtype (under the names it used) and tying as the tensors now are."""
    result = dict(config)
    if dtype is not None:
        word = str(dtype).removeprefix("torch.")
        for key in [k for k in ("dtype", "torch_dtype") if k in config] or ["dtype"]:
            result[key] = word
    result["tie_word_embeddings"] = tie
    return (json.dumps(result, indent=2, sort_keys=True) + "\n").encode()


def asset_files(source: Path, *, follow_symlinks: bool = False) -> list[tuple[str, Path]]:
    """Generation config and tokenizer files that `source` has: name and checked path of each."""
    found = []
    for name in COPIED_FILES:
        with suppress(FileNotFoundError):
            found.append((name, regular_file(source, name, follow_symlinks=follow_symlinks)))
    return found
