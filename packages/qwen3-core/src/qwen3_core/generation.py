"""Generation with a key/value cache of fixed length: after the prompt, every step has the same shapes.

L = layers, B = batch, G = key/value heads, S = slots of the cache, K = head dim, T = new positions,
V = vocabulary.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qwen3_core.config import Qwen3Config

if TYPE_CHECKING:
    from qwen3_core.model import Qwen3ForCausalLM

__all__ = ["KVCache", "generate"]


class KVCache:
    """Keys and values of all layers, `length` slots a sequence; slot p holds position p.

    Slots that are not yet filled are never seen: attention with a cache reads the slots up to
    a query's position.
    """

    def __init__(
        self,
        config: Qwen3Config,
        batch: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        config.check_sequence_length(length)
        shape = (config.num_hidden_layers, batch, config.num_key_value_heads, length, config.head_dim)
        self.length = length
        self.k_LBGSK = torch.zeros(shape, dtype=dtype, device=device)
        self.v_LBGSK = torch.zeros(shape, dtype=dtype, device=device)

    def update(self, layer: int, positions_BT: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values to their slots, return all that it has: two [B, G, S, K]."""
        slots = positions_BT[:, None, :, None].expand_as(k_BGTK)
        k_BGSK, v_BGSK = self.k_LBGSK[layer], self.v_LBGSK[layer]
        k_BGSK.scatter_(2, slots, k_BGTK)
        v_BGSK.scatter_(2, slots, v_BGTK)
        return k_BGSK, v_BGSK


@torch.no_grad()
def generate(
    model: "Qwen3ForCausalLM",
    prompt_BT: Tensor,
    length: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue every prompt to `length` tokens, prompt included: int64 [B, length].

    Temperature 0 takes the most probable token, else one is drawn from softmax(logits / temperature).
    Stopping at an end token is left to the caller, since a step of fixed shape costs the same for all. Raises
    ValueError if the prompt is empty or longer than `length`.
    """
    batch, prompt = prompt_BT.shape
    if not 1 <= prompt <= length:
        raise ValueError(f"the prompt has {prompt} tokens; expected at least 1 and at most length = {length}")
    tokens_BS = torch.cat((prompt_BT, prompt_BT.new_zeros(batch, length - prompt)), dim=1)
    weight = model.model.embed_tokens.weight
    cache = KVCache(model.config, batch, length, weight.dtype, weight.device)
    positions_BT = torch.arange(prompt, device=prompt_BT.device).expand(batch, -1)
    step_BT = prompt_BT
    for filled in range(prompt, length):
        logits_BV = model.lm_head(model.model(step_BT, positions_BT, cache)[:, -1]).float()
        step_BT = _choose(logits_BV, temperature, generator)
        tokens_BS[:, filled : filled + 1] = step_BT
        positions_BT = positions_BT[:, -1:] + 1
    return tokens_BS


def _choose(logits_BV: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0.0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    return torch.multinomial((logits_BV / temperature).softmax(dim=-1), 1, generator=generator)
