"""config.json in the forms that are about, to and from the fields of `Qwen3Config`.

Nothing is guessed that would change the model: what has no safe default has to be there, what is written
twice has to agree, and what is not a Qwen3 is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from qwen3_core.validation import agree, check, is_count
from qwen3_core.yarn import Yarn

__all__ = ["KNOWN", "SIZES", "Style", "load", "model_type", "read", "write"]

Style = Literal["transformers-4", "transformers-5"]

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_EXPERT_FIELDS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
)
# Fields that mean the same in config.json and in Qwen3Config.
_PLAIN = (*SIZES, *_EXPERT_FIELDS, "rms_norm_eps", "initializer_range", "tie_word_embeddings")
# Fields that have one value in every Qwen3; any other would be a model that is not defined here. The first
# ones are written to every config.json, the others stay in `extra` of those that have them.
_CONSTANTS: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "use_sliding_window": False,
}
_FIXED: dict[str, Any] = {
    **_CONSTANTS,
    "qkv_bias": False,
    "use_qk_norm": True,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": None,  # it would override the one of YaRN
    "shared_expert_intermediate_size": 0,
}
_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_ROPE_BLOCKS = ("rope_parameters", "rope_scaling")
# What `extra` must not hold: it is read, or derived, and a stale copy would contradict the config.
KNOWN = {
    *_PLAIN,
    *_ROPE_BLOCKS,
    *_CONSTANTS,
    *("rope_theta", "dtype", "torch_dtype", "mlp_only_layers", "num_local_experts"),
    *("model_type", "layer_types", "text_config"),
}


def load(path: Path) -> dict[str, Any]:
    """The parsed content of a config.json, or of the one in a folder."""
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise ValueError(f"no config.json to read at {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    check(str(path), type(content).__name__, "is a JSON object", isinstance(content, dict))
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} occurs twice")
    return dict(pairs)


def read(source: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of Qwen3Config for the content of a config.json, which stays as it is."""
    given = dict(source)
    nested = dict(given.pop("text_config", None) or {})
    nested.pop("tie_word_embeddings", None)  # only the outermost setting ties, as in Transformers
    given = {**nested, **given}

    model_type = given.pop("model_type", None)
    check("model_type", model_type, 'is "qwen3" or "qwen3_moe"', model_type in _ARCHITECTURES)
    for name, value in _FIXED.items():
        found = given.get(name, value)
        check(name, found, f"is {value!r}, as in every Qwen3", found in (value, None))
    if given.get("architectures") == [_ARCHITECTURES[model_type]]:
        del given["architectures"]

    experts = _one_of(given, "num_experts", "num_local_experts") or 0
    is_moe = model_type == "qwen3_moe"
    rule = '>= 1 for model_type "qwen3_moe", else absent or 0'
    check("num_experts", experts, rule, is_count(experts) if is_moe else experts == 0)

    rope = _read_rope(given)
    if rope.theta is None:
        raise ValueError(
            "rope_theta is missing: expected at top level, in rope_parameters or in rope_scaling. There is "
            "no safe default (published Qwen3 models use 1e6, 5e6 and 1e7): copy it from the model's own "
            "config.json."
        )
    required = [*SIZES, *(("num_experts_per_tok", "moe_intermediate_size") if is_moe else ())]
    missing = [name for name in required if given.get(name) is None]
    if missing:
        hint = " head_dim is 128 in published models; it is not hidden_size / num_attention_heads."
        raise ValueError(f"config.json lacks {', '.join(missing)}.{hint if 'head_dim' in missing else ''}")

    layer_types = given.pop("layer_types", None) or []
    other = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    check("layer_types", other, "holds only full_attention", not other)

    dtype = _one_of(given, "dtype", "torch_dtype")
    out = {"rope_theta": rope.theta, "rope_scaling": rope.yarn, "dtype": dtype}
    plain = {name: given.pop(name) for name in (*_PLAIN, "mlp_only_layers") if name in given}
    # null means absent; a dense config.json may carry expert fields, which say nothing about the model.
    skip = () if is_moe else (*_EXPERT_FIELDS, "mlp_only_layers")
    out |= {name: value for name, value in plain.items() if value is not None and name not in skip}
    extra = {name: value for name, value in given.items() if name not in _CONSTANTS}
    return {**out, "num_experts": experts, "extra": extra}


def write(values: Mapping[str, Any], style: Style) -> dict[str, Any]:
    """The content of config.json for the field values of a Qwen3Config, keys sorted.

    Raises:
        ValueError: an unknown style.
    """
    styles = ("transformers-4", "transformers-5")
    check("style", style, f"is one of {styles}", style in styles)
    moe = values["num_experts"] > 0
    names = _PLAIN if moe else [name for name in _PLAIN if name not in _EXPERT_FIELDS]
    out: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model_type(values["num_experts"])]],
        **values["extra"],
        **_CONSTANTS,
        "model_type": model_type(values["num_experts"]),
    }
    out |= {name: values[name] for name in names}
    if moe:
        out["mlp_only_layers"] = list(values["mlp_only_layers"])
    theta, scaling = values["rope_theta"], values["rope_scaling"]
    yarn = None
    if scaling is not None:
        given = {f.name: getattr(scaling, f.name) for f in fields(Yarn)}
        yarn = {"rope_type": "yarn"} | {name: value for name, value in given.items() if value is not None}
    if style == "transformers-4":
        out |= {"rope_theta": theta, "rope_scaling": yarn}
    else:
        out["rope_parameters"] = {"rope_theta": theta, **(yarn or {"rope_type": "default"})}
    if values["dtype"] is not None:
        out["torch_dtype" if style == "transformers-4" else "dtype"] = values["dtype"]
    return dict(sorted(out.items()))


def model_type(num_experts: int) -> str:
    """Transformers' name of the architecture: "qwen3" or "qwen3_moe"."""
    return "qwen3_moe" if num_experts else "qwen3"


class _Rope(NamedTuple):
    theta: float | None
    yarn: Yarn | None


def _read_rope(given: dict[str, Any]) -> _Rope:
    """Take rope theta and scaling out of all the places that they are written in, which must agree."""
    thetas = {} if given.get("rope_theta") is None else {"rope_theta": given["rope_theta"]}
    scalings: dict[str, Yarn | None] = {}
    given.pop("rope_theta", None)
    for place in _ROPE_BLOCKS:
        block = given.pop(place, None)
        if not block:
            continue
        check(place, block, "is an object", isinstance(block, Mapping))
        rope = _read_rope_block(place, dict(block))
        if rope.theta is not None:
            thetas[f"{place}.rope_theta"] = rope.theta
        scalings[place] = rope.yarn
    check("rope theta", thetas, "is the same wherever it is written", agree(thetas.values()))
    check("rope scaling", scalings, "is the same wherever it is written", agree(scalings.values()))
    return _Rope(next(iter(thetas.values()), None), next(iter(scalings.values()), None))


def _read_rope_block(place: str, block: dict[str, Any]) -> _Rope:
    theta = block.pop("rope_theta", None)
    partial = block.pop("partial_rotary_factor", None)
    check(f"{place}.partial_rotary_factor", partial, "is 1, as in every Qwen3", partial in (None, 1))
    kind = _one_of(block, "rope_type", "type", place=f"{place}.")
    if kind not in ("default", "yarn") and not (kind is None and not block):
        raise ValueError(
            f'{place} has rope type {kind!r}: expected "default" or "yarn". Read as plain RoPE it would be '
            "another model, so it is refused."
        )
    allowed = {f.name for f in fields(Yarn)} if kind == "yarn" else set()
    unknown = sorted(set(block) - allowed)
    check(place, unknown, f'holds only fields that rope type "{kind}" has', not unknown)
    if kind != "yarn":
        return _Rope(theta, None)
    missing = [name for name in ("factor", "original_max_position_embeddings") if block.get(name) is None]
    check(place, missing, "states factor and original_max_position_embeddings for YaRN; lacking", not missing)
    return _Rope(theta, Yarn(**{name: value for name, value in block.items() if value is not None}))


def _one_of(given: dict[str, Any], name: str, other: str, place: str = "") -> Any:
    """Take out a field that has two spellings; both may be there if they agree."""
    values = [value for value in (given.pop(name, None), given.pop(other, None)) if value is not None]
    check(f"{place}{name} and {other}", values, "agree", agree(values))
    return values[0] if values else None
