"""Generation with a key/value cache of fixed length: after the prompt, every step has the same shapes.

B = batch, S = slots of the cache, T = new positions, V = vocabulary.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qwen3_core.cache import KVCache

if TYPE_CHECKING:
    from qwen3_core.model import Qwen3ForCausalLM

__all__ = ["generate"]


@torch.no_grad()
def generate(
    model: "Qwen3ForCausalLM",
    prompt_BT: Tensor,
    length: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue every prompt to `length` tokens.

    Stopping at an end token is left to the caller, since a step of fixed shape costs the same for all.

    Args:
        model: the model, on the device of the prompt.
        prompt_BT: token ids, int64 [B, T].
        length: tokens of a result, its prompt included.
        temperature: 0 takes the most probable token; else one is drawn from softmax(logits / temperature).
        generator: for drawing.

    Returns:
        Token ids, int64 [B, length].

    Raises:
        ValueError: the prompt is empty or longer than `length`.
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
