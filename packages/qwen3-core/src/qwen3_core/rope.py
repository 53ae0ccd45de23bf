"""Rotary position embedding, plain and YaRN, in the half-split convention of the Hub's Qwen3 weights.

B = batch, T = positions, K = head dim. Angles are float32 in every model dtype: bfloat16 cannot count
positions.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qwen3_core.config import Qwen3Config, Yarn

__all__ = ["RotaryEmbedding", "rotary_frequencies", "rotate"]


class RotaryEmbedding(nn.Module):
    """positions_BT -> (cos_BTK, sin_BTK).

    The frequencies are a non-persistent buffer which is computed anew at every move: it is right straight
    after `to_empty`, and float32 after `.to(torch.bfloat16)`.
    """

    inv_freq: Tensor

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self._config = config
        self.scale = config.rope_scaling.attention_scale if config.rope_scaling else 1.0
        self.register_buffer("inv_freq", rotary_frequencies(config), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.inv_freq = rotary_frequencies(self._config, self.inv_freq.device)
        return self

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B, T, K] of int64 positions, worked out in float32 and rounded to `dtype`."""
        angles = positions_BT[..., None].float() * self.inv_freq
        angles_BTK = torch.cat((angles, angles), dim=-1)
        return (angles_BTK.cos() * self.scale).to(dtype), (angles_BTK.sin() * self.scale).to(dtype)


def rotate(x_BHTK: Tensor, cos_BTK: Tensor, sin_BTK: Tensor) -> Tensor:
    """Turn the pairs (i, i + K/2) of every head by the angles of their position.

    Args:
        x_BHTK: queries or keys.
        cos_BTK: cosines as RotaryEmbedding gives them, in the dtype of x.
        sin_BTK: sines, likewise.

    Returns:
        A tensor like x.
    """
    first, second = x_BHTK.chunk(2, dim=-1)
    turned_BHTK = torch.cat((-second, first), dim=-1)
    return x_BHTK * cos_BTK[:, None] + turned_BHTK * sin_BTK[:, None]


def rotary_frequencies(config: Qwen3Config, device: torch.device | None = None) -> Tensor:
    """Radians per position of each pair i: theta^(-2i/K), or with YaRN the blend of its eq. 23.

    Args:
        config: for theta, head dim and YaRN.
        device: where to make them.

    Returns:
        float32 [K/2].
    """
    dim = config.head_dim
    even = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
    freq = 1.0 / (config.rope_theta ** (even / dim))
    if config.rope_scaling is None:
        return freq
    yarn = config.rope_scaling
    low, high = _ramp_bounds(yarn, dim, config.rope_theta)
    pair = torch.arange(dim // 2, dtype=torch.float32, device=device)
    interpolated = ((pair - low) / (high - low)).clamp(0, 1)
    return freq / yarn.factor * interpolated + freq * (1 - interpolated)


def _ramp_bounds(yarn: Yarn, dim: int, theta: float) -> tuple[float, float]:
    """The pairs where interpolation leaves 0 and reaches 1: that turn beta_fast and beta_slow times."""

    def pair_turning(times: float) -> float:
        wavelength = yarn.original_max_position_embeddings / times
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high if high != low else high + 0.001
