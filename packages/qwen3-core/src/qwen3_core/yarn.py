"""YaRN, the context extension of Qwen3, as numbers. What they do is computed in rope.py."""

import math
from dataclasses import dataclass

from qwen3_core.validation import check, is_count, is_number

__all__ = ["Yarn"]


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension (Peng et al. 2023, https://arxiv.org/abs/2309.00071), as config.json states it.

    Frequencies that turn more than `beta_fast` times within the original length stay, those that turn less
    than `beta_slow` times are divided by `factor`, a ramp between.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check("factor of YaRN", self.factor, "is a number >= 1", is_number(self.factor) and self.factor >= 1)
        original = self.original_max_position_embeddings
        check("original_max_position_embeddings of YaRN", original, "is an integer >= 1", is_count(original))
        fast, slow = self.beta_fast, self.beta_slow
        ordered = is_number(fast) and is_number(slow) and fast >= slow > 0
        check(
            "beta_fast, beta_slow of YaRN",
            (fast, slow),
            "are numbers with beta_fast >= beta_slow > 0",
            ordered,
        )
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            check(
                f"{name} of YaRN",
                value,
                "is absent or a number > 0",
                value is None or (is_number(value) and value > 0),
            )
        check("truncate of YaRN", self.truncate, "is true or false", isinstance(self.truncate, bool))

    @property
    def attention_scale(self) -> float:
        """The factor on cos and sin (paper, eq. 22): as given, else 0.1 ln(factor) + 1 or a ratio of two."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0
