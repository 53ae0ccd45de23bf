"""What a Qwen3 is, as numbers: `Qwen3Config`, with the field names of Hugging Face's config.json.

    config = Qwen3Config.from_hf("path/to/config.json")     # or the folder, or a dict
    json.dump(config.to_hf(), file)

Needs no torch, so planners and command lines can use it. Reading is strict where a silent default would train
a different model: a missing rope theta, a missing head_dim and any rope type but default and YaRN are errors.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

__all__ = ["Qwen3Config", "Yarn"]

Style = Literal["transformers-4", "transformers-5"]


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension (Peng et al. 2023, https://arxiv.org/abs/2309.00071), as config.json states it.

    Frequencies that turn more than `beta_fast` times within the original length stay, those that turn less
    than `beta_slow` times are divided by `factor`, a ramp between.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check(
            "factor of YaRN", self.factor, "is a number >= 1", _is_number(self.factor) and self.factor >= 1
        )
        original = self.original_max_position_embeddings
        _check(
            "original_max_position_embeddings of YaRN", original, "is an integer >= 1", _is_count(original)
        )
        fast, slow = self.beta_fast, self.beta_slow
        ordered = _is_number(fast) and _is_number(slow) and fast >= slow > 0
        _check(
            "beta_fast, beta_slow of YaRN",
            (fast, slow),
            "are numbers with beta_fast >= beta_slow > 0",
            ordered,
        )
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            _check(
                f"{name} of YaRN",
                value,
                "is absent or a number > 0",
                value is None or (_is_number(value) and value > 0),
            )
        _check("truncate of YaRN", self.truncate, "is true or false", isinstance(self.truncate, bool))

    @property
    def attention_scale(self) -> float:
        """The factor on cos and sin (paper, eq. 22): as given, else 0.1 ln(factor) + 1 or a ratio of two."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class Qwen3Config:
    """Sizes and constants of one Qwen3, dense (`num_experts == 0`) or mixture of experts.

    `head_dim` is a size of its own: hidden_size / num_attention_heads differs from it in most published
    models. `extra` holds the fields of config.json that do not change the model (token ids, versions, ...);
    `to_hf` writes them back. Raises ValueError naming field, value and rule.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Yarn | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    dtype: str | None = None

    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mlp_only_layers", tuple(self.mlp_only_layers))
        for name in _SIZES:
            value = getattr(self, name)
            _check(name, value, "is an integer >= 1", _is_count(value))
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            value = getattr(self, name)
            _check(name, value, "is a number > 0", _is_number(value) and value > 0)
        for name in ("tie_word_embeddings", "norm_topk_prob"):
            value = getattr(self, name)
            _check(name, value, "is true or false", isinstance(value, bool))
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        rule = f"divides num_attention_heads ({heads})"
        _check("num_key_value_heads", kv_heads, rule, heads % kv_heads == 0)
        _check("head_dim", self.head_dim, "is even (RoPE turns pairs)", self.head_dim % 2 == 0)
        if self.num_experts:
            self._check_experts()
        else:
            unused = {"num_experts_per_tok": 0, "moe_intermediate_size": 0, "mlp_only_layers": ()}
            for name, nothing in unused.items():
                value = getattr(self, name)
                _check(name, value, f"is {nothing!r} in a dense model (num_experts is 0)", value == nothing)
        known = sorted(_KNOWN & set(self.extra))
        _check("extra", known, "holds only fields that Qwen3Config does not have", not known)

    def _check_experts(self) -> None:
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"):
            value = getattr(self, name)
            _check(name, value, "is an integer >= 1 in a mixture of experts", _is_count(value))
        top_k = self.num_experts_per_tok
        _check(
            "num_experts_per_tok", top_k, f"is <= num_experts ({self.num_experts})", top_k <= self.num_experts
        )
        layers = range(self.num_hidden_layers)
        rule = f"lists layers 0 to {self.num_hidden_layers - 1}, each once"
        once = len(set(self.mlp_only_layers)) == len(self.mlp_only_layers)
        ok = once and all(isinstance(i, int) and i in layers for i in self.mlp_only_layers)
        _check("mlp_only_layers", self.mlp_only_layers, rule, ok)

    @property
    def model_type(self) -> str:
        """Transformers' name of the architecture: "qwen3" or "qwen3_moe"."""
        return "qwen3_moe" if self.num_experts else "qwen3"

    @property
    def max_sequence_length(self) -> int:
        """The longest sequence, in tokens: the published length, or what YaRN extends it to."""
        if self.rope_scaling is None:
            return self.max_position_embeddings
        extended = int(self.rope_scaling.factor * self.rope_scaling.original_max_position_embeddings)
        return max(self.max_position_embeddings, extended)

    def is_moe_layer(self, layer: int) -> bool:
        """True if `layer` (from 0) has experts: each decoder_sparse_step-th, unless in mlp_only_layers."""
        sparse = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        return sparse and layer not in self.mlp_only_layers

    def check_sequence_length(self, length: int) -> None:
        """Raise ValueError if `length` tokens are more than the rotary embedding was made for."""
        if length > self.max_sequence_length:
            raise ValueError(
                f"sequence length {length} is above max_position_embeddings: {self.max_sequence_length}. "
                "Shorten the sequences, or extend the model by rope_scaling (YaRN)."
            )

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> "Qwen3Config":
        """Read config.json: its path, the folder it lies in, or its parsed content.

        Understood are the forms that Transformers 4 and 5 and the Hub use: rope theta at top level, in
        `rope_parameters` or in `rope_scaling`; `type` or `rope_type`; `torch_dtype` or `dtype`; `num_experts`
        or `num_local_experts`; a nested `text_config`, over which the outer fields win. A field that is
        absent has Transformers' default (`norm_topk_prob` and `tie_word_embeddings`: false), except that
        sizes, head_dim and rope theta have to be there.
        """
        return cls(**_read_hf(dict(source) if isinstance(source, Mapping) else _load(Path(source))))

    def to_hf(self, style: Style = "transformers-4") -> dict[str, Any]:
        """The content of config.json, ready for `json.dump`; `from_hf` reads it back to an equal config.

        "transformers-4" is the spelling of the published files (rope_theta at top level, torch_dtype), which
        Transformers 4 and 5 both read; "transformers-5" is what Transformers 5 itself writes
        (rope_parameters, dtype).
        """
        styles = ("transformers-4", "transformers-5")
        _check("style", style, f"is one of {styles}", style in styles)
        moe = self.num_experts > 0
        out: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.model_type]],
            **self.extra,
            **_CONSTANTS,
            "model_type": self.model_type,
        }
        for name in _PLAIN if moe else [n for n in _PLAIN if n not in _EXPERT_FIELDS]:
            out[name] = getattr(self, name)
        if moe:
            out["mlp_only_layers"] = list(self.mlp_only_layers)
        yarn = None
        if self.rope_scaling is not None:
            given = {f.name: getattr(self.rope_scaling, f.name) for f in fields(Yarn)}
            yarn = {
                "rope_type": "yarn",
                **{name: value for name, value in given.items() if value is not None},
            }
        if style == "transformers-4":
            out |= {"rope_theta": self.rope_theta, "rope_scaling": yarn}
        else:
            out["rope_parameters"] = {"rope_theta": self.rope_theta, **(yarn or {"rope_type": "default"})}
        if self.dtype is not None:
            out["torch_dtype" if style == "transformers-4" else "dtype"] = self.dtype
        return dict(sorted(out.items()))


_SIZES = (
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
_PLAIN = (*_SIZES, *_EXPERT_FIELDS, "rms_norm_eps", "initializer_range", "tie_word_embeddings")
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
    "shared_expert_intermediate_size": 0,
}
_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_ROPE_BLOCKS = ("rope_parameters", "rope_scaling")
# What `extra` must not hold: it is read, or derived, and a stale copy would contradict the config.
_KNOWN = {
    *_PLAIN,
    *_ROPE_BLOCKS,
    *_CONSTANTS,
    *("rope_theta", "dtype", "torch_dtype", "mlp_only_layers", "num_local_experts"),
    *("model_type", "layer_types", "text_config"),
}


class _Rope(NamedTuple):
    theta: float | None
    yarn: Yarn | None


def _load(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"no config.json to read at {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    _check(str(path), type(content).__name__, "is a JSON object", isinstance(content, dict))
    return content


def _read_hf(given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of Qwen3Config for the content of a config.json."""
    nested = given.pop("text_config", None) or {}
    given = {**nested, **given}

    model_type = given.pop("model_type", None)
    _check("model_type", model_type, 'is "qwen3" or "qwen3_moe"', model_type in _ARCHITECTURES)
    for name, value in _FIXED.items():
        _check(
            name,
            given.get(name, value),
            f"is {value!r}, as in every Qwen3",
            given.get(name, value) in (value, None),
        )
    if given.get("architectures") == [_ARCHITECTURES[model_type]]:
        del given["architectures"]

    out: dict[str, Any] = {}
    experts = _one_of(given, "num_experts", "num_local_experts") or 0
    is_moe = model_type == "qwen3_moe"
    rule = '>= 1 for model_type "qwen3_moe", else absent or 0'
    _check("num_experts", experts, rule, _is_count(experts) if is_moe else experts == 0)

    rope = _read_rope(given)
    if rope.theta is None:
        raise ValueError(
            "rope_theta is missing: expected at top level, in rope_parameters or in rope_scaling. There is no "
            "safe default (published Qwen3 models use 1e6, 5e6 and 1e7): copy it from the model's original "
            "config.json."
        )
    required = [*_SIZES, *(("num_experts_per_tok", "moe_intermediate_size") if is_moe else ())]
    missing = [name for name in required if given.get(name) is None]
    if missing:
        hint = " head_dim is 128 in published models; it is not hidden_size / num_attention_heads."
        raise ValueError(f"config.json lacks {', '.join(missing)}.{hint if 'head_dim' in missing else ''}")

    layer_types = given.pop("layer_types", None) or []
    other = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    _check("layer_types", other, "holds only full_attention", not other)

    dtype = _one_of(given, "dtype", "torch_dtype")
    out |= {"rope_theta": rope.theta, "rope_scaling": rope.yarn, "dtype": dtype}
    plain = {name: given.pop(name) for name in (*_PLAIN, "mlp_only_layers") if name in given}
    # null means absent; a dense config.json may carry expert fields, which say nothing about the model.
    skip = () if is_moe else (*_EXPERT_FIELDS, "mlp_only_layers")
    out |= {name: value for name, value in plain.items() if value is not None and name not in skip}
    extra = {name: value for name, value in given.items() if name not in _CONSTANTS}
    return {**out, "num_experts": experts, "extra": extra}


def _read_rope(given: dict[str, Any]) -> _Rope:
    """Take rope theta and scaling out of all the places that they are written in, which must agree."""
    thetas = {} if given.get("rope_theta") is None else {"rope_theta": given["rope_theta"]}
    scalings: dict[str, Yarn | None] = {}
    given.pop("rope_theta", None)
    for place in _ROPE_BLOCKS:
        block = given.pop(place, None)
        if not block:
            continue
        _check(place, block, "is an object", isinstance(block, Mapping))
        rope = _read_rope_block(place, dict(block))
        if rope.theta is not None:
            thetas[f"{place}.rope_theta"] = rope.theta
        scalings[place] = rope.yarn
    _check("rope theta", thetas, "is the same wherever it is written", _agree(thetas.values()))
    _check("rope scaling", scalings, "is the same wherever it is written", _agree(scalings.values()))
    return _Rope(next(iter(thetas.values()), None), next(iter(scalings.values()), None))


def _read_rope_block(place: str, block: dict[str, Any]) -> _Rope:
    theta = block.pop("rope_theta", None)
    partial = block.pop("partial_rotary_factor", None)
    _check(f"{place}.partial_rotary_factor", partial, "is 1, as in every Qwen3", partial in (None, 1))
    kind = _one_of(block, "rope_type", "type", place=f"{place}.")
    if kind not in ("default", "yarn") and not (kind is None and not block):
        raise ValueError(
            f'{place} has rope type {kind!r}: expected "default" or "yarn". Read as plain RoPE it would be '
            "another model, so it is refused."
        )
    allowed = {f.name for f in fields(Yarn)} if kind == "yarn" else set()
    unknown = sorted(set(block) - allowed)
    _check(place, unknown, f'holds only fields that rope type "{kind}" has', not unknown)
    if kind != "yarn":
        return _Rope(theta, None)
    missing = [name for name in ("factor", "original_max_position_embeddings") if block.get(name) is None]
    _check(
        place, missing, "states factor and original_max_position_embeddings for YaRN; lacking", not missing
    )
    return _Rope(theta, Yarn(**{name: value for name, value in block.items() if value is not None}))


def _one_of(given: dict[str, Any], name: str, other: str, place: str = "") -> Any:
    """Take out a field that has two spellings; both may be there if they agree."""
    values = [value for value in (given.pop(name, None), given.pop(other, None)) if value is not None]
    _check(f"{place}{name} and {other}", values, "agree", _agree(values))
    return values[0] if values else None


def _agree(values: Iterable[object]) -> bool:
    values = list(values)
    return all(value == values[0] for value in values)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check(name: str, value: object, rule: str, ok: bool) -> None:
    if not ok:
        raise ValueError(f"Qwen3 config: {name} = {value!r} breaks the rule: {name} {rule}")
