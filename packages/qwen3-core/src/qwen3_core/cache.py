"""The key/value cache: what attention has seen so far, in memory of one size.

L = layers, B = batch, G = key/value heads, S = slots of the cache, K = head dim, T = new positions.
"""

import torch
from torch import Tensor

from qwen3_core.config import Qwen3Config

__all__ = ["KVCache"]


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
