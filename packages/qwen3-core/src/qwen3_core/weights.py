"""The Hub's tensors and this model's: equal names, except that the experts of a layer are stacked here.

    model.load_state_dict(from_hub(load_file("model.safetensors"), config), strict=True)

On disk model.layers.L.mlp.experts.E.gate_proj.weight is [F, D], and so are up_proj and (transposed, [D, F])
down_proj; in memory model.layers.L.mlp.experts.gate_proj is [E, F, D]. E = experts, F = expert hidden, D =
model dim.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from qwen3_core.config import Qwen3Config

__all__ = ["from_hub", "to_hub"]

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_STACK = re.compile(r"(.*\.mlp\.experts)\.(gate_proj|up_proj|down_proj)")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def from_hub(tensors: Mapping[str, Tensor], config: Qwen3Config) -> dict[str, Tensor]:
    """A state dict for `load_state_dict(strict=True)`.

    Experts are stacked. The copy of the embedding that some tied checkpoints carry as lm_head.weight is dropped if it
    is equal. Other names pass through, so that strict loading lists what is missing or unexpected.

    Args:
        tensors: the tensors of a Hub checkpoint, by name; they stay untouched.
        config: the model that they are for.

    Returns:
        The tensors by this model's names.

    Raises:
        ValueError: a layer lacks experts or has more than the config says, or a tied model has a head of its own.
    """
    out: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        else:
            out[name] = tensor
    for name, by_expert in stacks.items():
        if set(by_expert) != set(range(config.num_experts)):
            missing = sorted(set(range(config.num_experts)) - set(by_expert))
            raise ValueError(
                f"{name}: found {len(by_expert)} experts, the highest {max(by_expert)}; num_experts of the "
                f"config is {config.num_experts}. Missing: {missing}. Pass the tensors of all shards, or "
                "correct the config."
            )
        out[name] = torch.stack([by_expert[e] for e in range(config.num_experts)])
    if config.tie_word_embeddings and _HEAD in out and _EMBEDDING in out:
        head, embedding = out.pop(_HEAD), out[_EMBEDDING]
        if head.shape != embedding.shape or not torch.equal(head, embedding):
            same = head.shape == embedding.shape
            apart = (head.float() - embedding.float()).abs().max().item() if same else "shapes differ"
            raise ValueError(
                f"the config ties the head to the embedding, but {_HEAD} differs from {_EMBEDDING} "
                f"(max |difference| {apart}). Set tie_word_embeddings to false to keep the head, or "
                "delete it from the file."
            )
    return out


def to_hub(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The Hub's names for a state dict of this model, experts one by one: views of the stacks, none is copied."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if match := _STACK.fullmatch(name):
            out |= {f"{match[1]}.{e}.{match[2]}.weight": t for e, t in enumerate(tensor)}
        else:
            out[name] = tensor
    return out
