"""What the tensors say about the architecture."""

from __future__ import annotations

from dataclasses import dataclass

from .names.read import Reading
from .names.rows import Shape

__all__ = ["Sizes", "sizes_of"]


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
    for part, shape in reading.parts.items():
        for size, value in _told(part, shape):
            before = found.setdefault(size, (value, part))
            if before[0] != value:
                raise ValueError(f"{size} is {before[0]} by {before[1]!r} and {value} by {part!r}")
    sizes = {name: value for name, (value, _) in found.items()}
    head_dim, heads = sizes.get("head_dim", 0), {}
    for rows, name in (("query rows", "num_attention_heads"), ("key rows", "num_key_value_heads")):
        count = sizes.pop(rows, 0)
        if head_dim == 0 or count == 0 or count % head_dim:
            raise ValueError(f"{count} {rows} are not a whole number of heads of {head_dim} (from q_norm)")
        heads[name] = count // head_dim
    return Sizes(**sizes, **heads, num_hidden_layers=reading.layers)


def _told(part: str, shape: Shape) -> list[tuple[str, int]]:
    """What the shape of a part says: the name of each dimension that is a size, and its value."""
    leaf = part.rsplit(".", 2)[-2]
    if leaf in ("gate_proj", "up_proj", "down_proj"):
        leaf = f"experts.{leaf}" if ".experts." in part else leaf
    return list(zip(_DIMENSIONS.get(leaf, ()), shape, strict=False))


# Each dimension of a part, by the last word of its name.
_DIMENSIONS = {
    "embed_tokens": ("vocab_size", "hidden_size"),
    "lm_head": ("vocab_size", "hidden_size"),
    "input_layernorm": ("hidden_size",),
    "post_attention_layernorm": ("hidden_size",),
    "norm": ("hidden_size",),
    "q_norm": ("head_dim",),
    "k_norm": ("head_dim",),
    "q_proj": ("query rows", "hidden_size"),
    "k_proj": ("key rows", "hidden_size"),
    "v_proj": ("key rows", "hidden_size"),
    "o_proj": ("hidden_size", "query rows"),
    "gate": ("num_experts", "hidden_size"),
    "gate_proj": ("intermediate_size", "hidden_size"),
    "up_proj": ("intermediate_size", "hidden_size"),
    "down_proj": ("hidden_size", "intermediate_size"),
    "experts.gate_proj": ("moe_intermediate_size", "hidden_size"),
    "experts.up_proj": ("moe_intermediate_size", "hidden_size"),
    "experts.down_proj": ("hidden_size", "moe_intermediate_size"),
}
