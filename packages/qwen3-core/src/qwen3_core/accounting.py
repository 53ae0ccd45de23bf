"""Counts that planning rests on, exact and computed from the config alone: parameters, FLOPs, cache bytes.

    count_parameters(MODELS["30B-A3B"]).active           # 3_353_032_704
    training_flops_per_token(MODELS["4B"], length=4096)

Needs no torch. Activation memory depends on how a model is laid out and belongs to neuron-parallel.
D = hidden size, H = query heads, G = key/value heads, K = head dim, F = MLP or expert hidden size,
E = experts, V = vocabulary.
"""

from dataclasses import dataclass, fields
from math import prod

from qwen3_core.config import Qwen3Config

__all__ = [
    "ParameterCount",
    "count_parameters",
    "forward_flops_per_token",
    "kv_cache_bytes",
    "model_flops_utilization",
    "parameter_shapes",
    "training_flops_per_token",
]


def parameter_shapes(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of `Qwen3ForCausalLM(config).state_dict()`, in its order."""
    D, K, V = config.hidden_size, config.head_dim, config.vocab_size
    HK, GK = config.num_attention_heads * K, config.num_key_value_heads * K
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for layer in range(config.num_hidden_layers):
        own = {
            "input_layernorm.weight": (D,),
            "self_attn.q_proj.weight": (HK, D),
            "self_attn.k_proj.weight": (GK, D),
            "self_attn.v_proj.weight": (GK, D),
            "self_attn.o_proj.weight": (D, HK),
            "self_attn.q_norm.weight": (K,),
            "self_attn.k_norm.weight": (K,),
            "post_attention_layernorm.weight": (D,),
        } | (_expert_shapes(config) if config.is_moe_layer(layer) else _mlp_shapes(config))
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    shapes["model.norm.weight"] = (D,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (V, D)
    return shapes


def _mlp_shapes(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    D, F = config.hidden_size, config.intermediate_size
    return {"mlp.gate_proj.weight": (F, D), "mlp.up_proj.weight": (F, D), "mlp.down_proj.weight": (D, F)}


def _expert_shapes(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    D, E, F = config.hidden_size, config.num_experts, config.moe_intermediate_size
    return {
        "mlp.gate.weight": (E, D),
        "mlp.experts.gate_proj": (E, F, D),
        "mlp.experts.up_proj": (E, F, D),
        "mlp.experts.down_proj": (E, D, F),
    }


@dataclass(frozen=True)
class ParameterCount:
    """How many numbers a model has, by what they do. A tied head counts as embedding only."""

    embedding: int
    head: int
    attention: int
    mlp: int
    router: int
    experts: int
    norms: int
    experts_used: int
    """The part of `experts` that one token passes through; not a further group."""

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "experts_used")

    @property
    def active(self) -> int:
        """What one token passes through, embedding and head included: the A3B of 30B-A3B."""
        return self.total - self.experts + self.experts_used

    @property
    def non_embedding(self) -> int:
        """Parameters without embedding and head, as model cards state them."""
        return self.total - self.embedding - self.head


# The first pattern that a name contains is its group; nothing may be left over.
_GROUPS = {
    "norm": "norms",
    "embed_tokens": "embedding",
    "lm_head": "head",
    "self_attn": "attention",
    "mlp.experts": "experts",
    "mlp.gate.": "router",
    "mlp": "mlp",
}


def count_parameters(config: Qwen3Config) -> ParameterCount:
    """The parameters of `Qwen3ForCausalLM(config)`, exactly."""
    sizes = {name: prod(shape) for name, shape in parameter_shapes(config).items()}
    groups = dict.fromkeys(_GROUPS.values(), 0)
    for name, size in sizes.items():
        groups[next(group for pattern, group in _GROUPS.items() if pattern in name)] += size
    used = groups["experts"] * config.num_experts_per_tok // max(config.num_experts, 1)
    count = ParameterCount(**groups, experts_used=used)
    assert count.total == sum(sizes.values()), (count, sum(sizes.values()))
    return count


def forward_flops_per_token(config: Qwen3Config, length: int, causal_factor: float = 0.5) -> float:
    """Floating-point operations of the forward pass for one token of a sequence of `length` tokens.

    Matrix products only, a multiply-add being two: 2 per weight passed through (the head always, the
    embedding look-up never, experts_used of the experts), and 4 H K `length` `causal_factor` a layer for q kᵀ
    and its product with v. `causal_factor` is the part of the score matrix that counts: 0.5 for a kernel that
    skips the masked half (exactly (length + 1) / (2 length)), 1 for one that computes it, as in the PaLM
    convention (https://arxiv.org/abs/2204.02311, appendix B).
    """
    count = count_parameters(config)
    head = config.vocab_size * config.hidden_size
    weights = count.attention + count.mlp + count.router + count.experts_used + head
    scores = 4 * config.num_attention_heads * config.head_dim * length * causal_factor
    return 2 * weights + config.num_hidden_layers * scores


def training_flops_per_token(config: Qwen3Config, length: int, causal_factor: float = 0.5) -> float:
    """Floating-point operations of forward and backward for one token: 3 times the forward pass.

    Work that checkpointing repeats is not counted. The arguments are those of `forward_flops_per_token`.
    """
    return 3 * forward_flops_per_token(config, length, causal_factor)


def model_flops_utilization(
    config: Qwen3Config,
    tokens_per_second: float,
    length: int,
    peak_flops_per_second: float,
    causal_factor: float = 0.5,
) -> float:
    """Model FLOPs utilisation: training FLOPs done in a second over the peak of all devices that took part.

    Args:
        config: the model.
        tokens_per_second: over all devices.
        length: tokens of a sequence.
        peak_flops_per_second: the devices' summed peak.
        causal_factor: as for `forward_flops_per_token`.

    Returns:
        A share, from 0 to 1.

    Raises:
        ValueError: the peak is not above 0.
    """
    if peak_flops_per_second <= 0:
        raise ValueError(f"peak_flops_per_second is {peak_flops_per_second}; expected the devices' summed peak, > 0")
    return tokens_per_second * training_flops_per_token(config, length, causal_factor) / peak_flops_per_second


def kv_cache_bytes(config: Qwen3Config, batch: int, length: int, bytes_per_element: int = 2) -> int:
    """Bytes of the keys and values over all layers.

    Args:
        config: the model.
        batch: sequences.
        length: slots of each.
        bytes_per_element: 2 for bfloat16.
    """
    per_position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return per_position * batch * length * bytes_per_element
