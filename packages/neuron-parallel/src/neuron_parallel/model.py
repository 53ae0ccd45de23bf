"""The sizes of a model, as plain numbers: what planning needs to know of it.

    ModelShape.from_hf(json.load(open("config.json")))
    ModelShape(hidden_size=4096, num_hidden_layers=36, ...)

Field names are those of Hugging Face's config.json for Qwen3.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

__all__ = ["ModelShape"]

_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """One decoder, dense (`num_experts == 0`) or mixture of experts. Raises ValueError for sizes that are no model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 40960
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    dense_layers: int = 0
    """Layers of a mixture of experts that have a plain MLP."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.default == 0 else 1
            if field.name != "tie_word_embeddings" and (
                not isinstance(value, int) or isinstance(value, bool) or value < least
            ):
                raise ValueError(f"{field.name} is {value!r}; expected an integer >= {least}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(f"num_experts_per_tok {self.num_experts_per_tok} is not in 1..{self.num_experts}")
        if self.num_experts and self.moe_intermediate_size < 1:
            raise ValueError("moe_intermediate_size is needed with num_experts")
        if self.dense_layers > self.num_hidden_layers or (self.dense_layers and not self.num_experts):
            raise ValueError(
                f"dense_layers {self.dense_layers} is for a mixture of experts, up to its number of layers"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Read the sizes from the content of a config.json of Qwen3 or Qwen3-MoE.

        Raises:
            ValueError: naming what is missing or foreign.
        """
        kind = config.get("model_type", "qwen3")
        if kind not in ("qwen3", "qwen3_moe"):
            raise ValueError(f"config.json is a {kind!r}'s; planning knows qwen3 and qwen3_moe")
        names = [field.name for field in fields(cls) if field.name != "dense_layers"]
        known = {name: config[name] for name in names if config.get(name) is not None}
        missing = [name for name in _NEEDED if name not in known]
        if missing:
            raise ValueError(f"config.json has no {', '.join(missing)}; is it that of a Qwen3?")
        shape = cls(**known)
        step, plain = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        layers = range(shape.num_hidden_layers) if shape.num_experts else ()
        return replace(shape, dense_layers=sum((i + 1) % step != 0 or i in plain for i in layers))

    @cached_property
    def one_layer(self) -> "ModelShape":
        """The same model with one layer, the key of everything that does not depend on the number of layers."""
        return replace(self, num_hidden_layers=1, dense_layers=0)

    @cached_property
    def kinds(self) -> tuple[bool, ...]:
        """The kinds of its layers: with experts (True), without (False)."""
        return tuple(
            moe for moe, n in ((True, self.moe_layers), (False, self.num_hidden_layers - self.moe_layers)) if n
        )

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        """The hash is worked out once, because shapes are keys of many look-ups."""
        return self._hash

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.num_hidden_layers - self.dense_layers if self.num_experts else 0

    @property
    def parameters(self) -> int:
        """The number of parameters. A tied head counts once."""
        D, K = self.hidden_size, self.head_dim
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        attention = D * K * (2 * heads + 2 * groups) + 2 * K + 2 * D
        mlp = 3 * D * self.intermediate_size
        experts = self.num_experts * (3 * D * self.moe_intermediate_size + D)
        plain = self.num_hidden_layers - self.moe_layers
        embeddings = self.vocab_size * D * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * attention + plain * mlp + self.moe_layers * experts + embeddings + D

    @property
    def active_parameters(self) -> int:
        """The number of parameters that one token passes through."""
        idle = self.num_experts - self.num_experts_per_tok
        return self.parameters - self.moe_layers * idle * 3 * self.hidden_size * self.moe_intermediate_size

    def flops_per_token(self, length: int) -> float:
        """Matrix products of the forward pass for one token, causal attention over `length` (a multiply-add is two).

        2 per weight passed through, the embedding look-up and norms not, the head always; 4 H K length / 2 a layer for
        the scores and their product with v.
        """
        embedding = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        norms = self.num_hidden_layers * (2 * self.hidden_size + 2 * self.head_dim) + self.hidden_size
        scores = 2 * self.num_attention_heads * self.head_dim * length
        return 2 * (self.active_parameters - embedding - norms) + self.num_hidden_layers * scores
