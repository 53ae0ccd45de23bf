"""The default attention, and the masks that say what sees what.

An attention is any callable (q_BHTK, k_BGSK, v_BGSK, mask_B1TS or None) -> out_BHTK; no mask means causal
with T == S.
B = batch, T = queries, S = keys, H = query heads, G = key/value heads (G divides H), K = head dim.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Attention", "cache_mask", "document_mask", "scaled_dot_product_attention"]

Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def scaled_dot_product_attention(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask_B1TS: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √K) v by torch's fused kernel; query head h reads key head h // (H/G).

    Args:
        q_BHTK: queries.
        k_BGSK: keys.
        v_BGSK: values.
        mask_B1TS: bool, true where a query sees a key; None means causal, with T == S.

    Returns:
        out_BHTK, in the dtype of q.
    """
    return F.scaled_dot_product_attention(
        q_BHTK, k_BGSK, v_BGSK, attn_mask=mask_B1TS, is_causal=mask_B1TS is None, enable_gqa=True
    )


def document_mask(positions_BT: Tensor) -> Tensor:
    """bool [B, 1, T, T]: a position sees itself and what came before it in its own document.

    A document goes on as long as positions step by one; packed documents that each count from 0 need no more.
    """
    starts_BT = positions_BT[:, 1:] != positions_BT[:, :-1] + 1
    document_BT = F.pad(starts_BT.long().cumsum(dim=1), (1, 0))
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    return same_BTT.tril()[:, None]


def cache_mask(positions_BT: Tensor, length: int) -> Tensor:
    """The mask of queries against a cache: a query at position p sees the slots 0 to p.

    Args:
        positions_BT: position of each query, int64.
        length: slots of the cache.

    Returns:
        bool [B, 1, T, length].
    """
    slots_S = torch.arange(length, device=positions_BT.device)
    return (slots_S <= positions_BT[:, :, None])[:, None]
