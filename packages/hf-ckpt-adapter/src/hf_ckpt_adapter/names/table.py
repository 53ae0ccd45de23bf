"""The table: what a Qwen3 tensor is called, and how it is folded, in each place it lives.

`SPELLINGS` is the whole mapping. Its common language is the set of *parts*: the tensors as the Hub stores them, one
expert at a time. Each line says that a stored tensor of some name holds these parts, folded by an operation. `rows.py`
says what an operation does to rows, `read.py` and `write.py` read the table in the two directions.

There are two dialects. `hub` has Hugging Face's names; TorchTitan's Transformers backend adds `model.` in front of them
and keeps experts in TorchTitan's stacks. `native` has the names of TorchTitan's own Qwen3.

The names were read in torchtitan 0.3.0 (`models/qwen3/state_dict_adapter.py`; `models/common/attention.py`, where a
hook saves the fused QKV as three tensors; `models/common/moe.py`) and in transformers 5 (the fused experts of
`models/qwen3_moe/modeling_qwen3_moe.py`).

Shape legend: V vocabulary, D model, N query heads x head_dim, K kv heads x head_dim, H head_dim, F feed-forward,
E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

__all__ = [
    "BACKEND_ROOT",
    "EMBED",
    "HEAD",
    "HUB",
    "HUB_LAYOUTS",
    "NATIVE",
    "Q_NORM",
    "ROUTER",
    "SPELLINGS",
    "Layout",
    "Op",
    "Spelling",
]


class Op(Enum):
    """How parts are folded into one stored tensor."""

    RENAME = "rename"  # the part itself
    STACK = "stack"  # [E, F, D]: expert after expert
    GATE_UP = "gate_up"  # [E, 2F, D]: for each expert its gate rows, then its up rows
    QKV = "qkv"  # [K/H * (N/K + 2) * H, D]: for each kv head its q heads, its k head, its v head
    SIDE = "side"  # state that only TorchTitan has: kept in a side file
    DROP = "drop"  # a buffer that is computed, not learned


class Layout(StrEnum):
    """The place that a checkpoint is for, which decides how each tensor is spelled."""

    PER_EXPERT = "per-expert"  # Hub names, one tensor an expert: what the Hub and servers read
    FUSED = "fused"  # Hub names, experts as two 3-D tensors a layer: transformers 5 in memory
    NATIVE = "native"  # TorchTitan's own Qwen3
    NATIVE_WQKV = "native-wqkv"  # the same, q, k and v in one parameter: for models without the split hook
    BACKEND = "backend"  # TorchTitan's Transformers backend


HUB = frozenset({Layout.PER_EXPERT, Layout.FUSED, Layout.BACKEND})  # layouts with Hub names
NATIVE = frozenset({Layout.NATIVE, Layout.NATIVE_WQKV})  # layouts with TorchTitan's names
HUB_LAYOUTS = (Layout.PER_EXPERT, Layout.FUSED)  # layouts that Hugging Face folders have
BACKEND_ROOT = "model."  # TorchTitan's Transformers backend holds the Hugging Face model as `self.model`


@dataclass(frozen=True)
class Spelling:
    """One line of the table: `name` in `layouts` holds `parts`, folded by `op`.

    The first `{}` stands for a layer's number, a second one for an expert's. `dims` counts the stored tensor's
    dimensions.
    """

    name: str
    layouts: frozenset[Layout]
    op: Op
    parts: tuple[str, ...] = ()
    dims: int = 2


def _same(
    part: str, native: str, dims: int = 2, native_layouts: frozenset[Layout] = NATIVE
) -> tuple[Spelling, Spelling]:
    """The two lines of a part that every layout stores by itself."""
    return Spelling(part, HUB, Op.RENAME, (part,), dims), Spelling(native, native_layouts, Op.RENAME, (part,), dims)


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROUTER = "model.layers.{}.mlp.gate.weight"
_ATTN, _TITAN_ATTN = "model.layers.{}.self_attn.", "layers.{}.attention."
_Q, _K, _V = (_ATTN + p for p in ("q_proj.weight", "k_proj.weight", "v_proj.weight"))
Q_NORM = _ATTN + "q_norm.weight"
_SPLIT, _JOINED = frozenset({Layout.NATIVE}), frozenset({Layout.NATIVE_WQKV})
_EXPERT = "model.layers.{}.mlp.experts.{}."
_GATE, _UP, _DOWN = (_EXPERT + p for p in ("gate_proj.weight", "up_proj.weight", "down_proj.weight"))
_BACKEND, _PER_EXPERT, _FUSED = (frozenset({one}) for one in (Layout.BACKEND, Layout.PER_EXPERT, Layout.FUSED))


def _titan_experts(block: str, layouts: frozenset[Layout]) -> tuple[Spelling, ...]:
    """The lines of TorchTitan's stacks, and of the state that only TorchTitan has, in the MoE module `block`."""
    experts = block + "routed_experts.inner_experts."
    return (
        Spelling(experts + "w1_EFD", layouts, Op.STACK, (_GATE,), 3),
        Spelling(experts + "w3_EFD", layouts, Op.STACK, (_UP,), 3),
        Spelling(experts + "w2_EDF", layouts, Op.STACK, (_DOWN,), 3),
        Spelling(block + "expert_bias_E", layouts, Op.SIDE, dims=1),
        Spelling(block + "tokens_per_expert_E", layouts, Op.SIDE, dims=1),
    )


SPELLINGS: tuple[Spelling, ...] = (
    *_same(EMBED, "tok_embeddings.weight"),  # [V, D]
    *_same("model.layers.{}.input_layernorm.weight", "layers.{}.attention_norm.weight", 1),  # [D]
    *_same(_Q, _TITAN_ATTN + "qkv_linear.wq.weight", native_layouts=_SPLIT),  # [N, D]
    *_same(_K, _TITAN_ATTN + "qkv_linear.wk.weight", native_layouts=_SPLIT),  # [K, D]
    *_same(_V, _TITAN_ATTN + "qkv_linear.wv.weight", native_layouts=_SPLIT),  # [K, D]
    Spelling(_TITAN_ATTN + "qkv_linear.wqkv.weight", _JOINED, Op.QKV, (_Q, _K, _V)),  # [N + 2K, D]
    *_same(_ATTN + "o_proj.weight", _TITAN_ATTN + "wo.weight"),  # [D, N]
    *_same(Q_NORM, _TITAN_ATTN + "q_norm.weight", 1),  # [H]
    *_same(_ATTN + "k_norm.weight", _TITAN_ATTN + "k_norm.weight", 1),  # [H]
    *_same("model.layers.{}.post_attention_layernorm.weight", "layers.{}.ffn_norm.weight", 1),  # [D]
    *_same("model.layers.{}.mlp.gate_proj.weight", "layers.{}.feed_forward.w1.weight"),  # [F, D]
    *_same("model.layers.{}.mlp.up_proj.weight", "layers.{}.feed_forward.w3.weight"),  # [F, D]
    *_same("model.layers.{}.mlp.down_proj.weight", "layers.{}.feed_forward.w2.weight"),  # [D, F]
    # Mixture of experts: the router is [E, D]
    Spelling(ROUTER, frozenset(HUB_LAYOUTS), Op.RENAME, (ROUTER,)),
    Spelling("model.layers.{}.mlp.router.gate.weight", _BACKEND, Op.RENAME, (ROUTER,)),
    Spelling("layers.{}.moe.router.gate.weight", NATIVE, Op.RENAME, (ROUTER,)),
    *(Spelling(part, _PER_EXPERT, Op.RENAME, (part,)) for part in (_GATE, _UP, _DOWN)),
    Spelling("model.layers.{}.mlp.experts.gate_up_proj", _FUSED, Op.GATE_UP, (_GATE, _UP), 3),
    Spelling("model.layers.{}.mlp.experts.down_proj", _FUSED, Op.STACK, (_DOWN,), 3),
    *_titan_experts("layers.{}.moe.", NATIVE),
    *_titan_experts("model.layers.{}.mlp.", _BACKEND),
    *_same("model.norm.weight", "norm.weight", 1),  # [D]
    *_same(HEAD, HEAD),  # [V, D]
    # Buffers of older files
    Spelling("model.layers.{}.self_attn.rotary_emb.inv_freq", HUB, Op.DROP),
    Spelling("model.rotary_emb.inv_freq", HUB, Op.DROP),
    Spelling("freqs_cis", NATIVE, Op.DROP),
    Spelling("rope_cache", NATIVE, Op.DROP),
)
