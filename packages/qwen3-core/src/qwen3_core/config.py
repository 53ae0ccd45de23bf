"""What a Qwen3 is, as numbers: `Qwen3Config`, with the field names of Hugging Face's config.json.

    config = Qwen3Config.from_hf("path/to/config.json")     # or the folder, or a dict
    json.dump(config.to_hf(), file)

Needs no torch, so planners and command lines can use it. Reading is strict where a silent default would train
a different model: a missing rope theta, a missing head_dim and any rope type but default and YaRN are errors.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen3_core.config_json import KNOWN, SIZES, Style, load, model_type, read, write
from qwen3_core.validation import check, is_count, is_number
from qwen3_core.yarn import Yarn

__all__ = ["Qwen3Config", "Yarn"]


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
        object.__setattr__(self, "extra", dict(self.extra))
        for name in SIZES:
            value = getattr(self, name)
            check(name, value, "is an integer >= 1", is_count(value))
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            value = getattr(self, name)
            check(name, value, "is a number > 0", is_number(value) and value > 0)
        for name in ("tie_word_embeddings", "norm_topk_prob"):
            value = getattr(self, name)
            check(name, value, "is true or false", isinstance(value, bool))
        check("dtype", self.dtype, "is absent or a name", self.dtype is None or isinstance(self.dtype, str))
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        rule = f"divides num_attention_heads ({heads})"
        check("num_key_value_heads", kv_heads, rule, heads % kv_heads == 0)
        check("head_dim", self.head_dim, "is even (RoPE turns pairs)", self.head_dim % 2 == 0)
        if self.num_experts:
            self._check_experts()
        else:
            unused = {
                "num_experts": 0,
                "num_experts_per_tok": 0,
                "moe_intermediate_size": 0,
                "mlp_only_layers": (),
            }
            for name, nothing in unused.items():
                value = getattr(self, name)
                check(name, value, f"is {nothing!r} in a dense model", value == nothing)
        known = sorted(KNOWN & set(self.extra))
        check("extra", known, "holds only fields that Qwen3Config does not have", not known)

    def _check_experts(self) -> None:
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"):
            value = getattr(self, name)
            check(name, value, "is an integer >= 1 in a mixture of experts", is_count(value))
        top_k = self.num_experts_per_tok
        check("num_experts_per_tok", top_k, f"is <= num_experts ({self.num_experts})", top_k <= self.num_experts)
        layers = range(self.num_hidden_layers)
        rule = f"lists layers 0 to {self.num_hidden_layers - 1}, each once"
        once = len(set(self.mlp_only_layers)) == len(self.mlp_only_layers)
        ok = once and all(isinstance(i, int) and i in layers for i in self.mlp_only_layers)
        check("mlp_only_layers", self.mlp_only_layers, rule, ok)

    @property
    def model_type(self) -> str:
        """Transformers' name of the architecture: "qwen3" or "qwen3_moe"."""
        return model_type(self.num_experts)

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
        absent has Transformers' default (`norm_topk_prob` and `tie_word_embeddings` are false), except that
        sizes, head_dim and rope theta have to be there.

        Raises:
            ValueError: no such file, or not a Qwen3 that is defined here.
        """
        return cls(**read(source if isinstance(source, Mapping) else load(Path(source))))

    def to_hf(self, style: Style = "transformers-4") -> dict[str, Any]:
        """The content of config.json, ready for `json.dump`; `from_hf` reads it back to an equal config.

        "transformers-4" is the spelling of the published files (rope_theta at top level, torch_dtype), which
        Transformers 4 and 5 both read; "transformers-5" is what Transformers 5 itself writes
        (rope_parameters, dtype).
        """
        return write(vars(self), style)
