"""What the first loss says about the weights: beside a random model's, and a warning when loaded ones do no better."""

import logging
import math
from collections.abc import Sequence

import torch
from qwen3_core.loss import ExpectedLoss, expected_random_loss
from torch import nn

from ..checkpoint.completeness import local_part
from ..logs import say

__all__ = ["random_loss", "report_first_loss"]

log = logging.getLogger(__name__)

KNOWS_NOTHING = 1.0
"""Nats under ln V that any trained model beats: knowing which tokens are frequent is worth several on real text."""


@torch.no_grad()
def random_loss(parts: Sequence[nn.Module], vocab_size: int, num_tokens: int) -> ExpectedLoss | None:
    """`expected_random_loss` for the head and final norm as they are; None on a pipeline stage without them.

    Measured on this rank's shards, of which each is a sample of the same distribution: no collective, and no copy.
    """
    head, norm = getattr(parts[-1], "lm_head", None), getattr(parts[-1], "norm", None)
    if head is None or norm is None or isinstance(head, nn.Identity):
        return None
    mean, square, _ = _moments(head.weight)
    _, norm_square, dim = _moments(norm.weight)
    if math.isnan(square) or math.isnan(norm_square):  # an empty shard
        return None
    return expected_random_loss(vocab_size, math.sqrt(norm_square * dim), math.sqrt(square - mean**2), num_tokens)


def _moments(weight: torch.Tensor) -> tuple[float, float, int]:
    """Mean and mean square of this rank's part, and the number of elements of the whole."""
    local = local_part(weight).flatten()
    total = square = 0.0
    for part in local.split(1 << 24):
        total += float(part.float().sum())
        square += float(part.float().square().sum())
    count = local.numel() or math.nan
    return total / count, square / count, weight.numel()


def report_first_loss(loss: float, expected: ExpectedLoss, vocab_size: int, weights_were_loaded: bool) -> None:
    """Say the first loss and a random model's; warn when loaded weights behave like none, or when there is nothing to
    learn.
    """
    if loss == 0:
        log.warning("the first step had no label, so its loss says nothing: its sequences are prompts alone")
        return
    say(
        f"first loss {loss:.4f}; a random model of these sizes has {expected.value:.4f} +- "
        f"{expected.standard_error:.4f} on random targets"
    )
    if weights_were_loaded and loss > math.log(vocab_size) - KNOWS_NOTHING:
        log.warning(
            "the weights were loaded, but the first loss %.2f is that of a model that knows nothing (ln %d = %.2f). "
            "If they were trained, something is wrong with them, with the tokenizer, or with rope_theta in "
            "config.json.",
            loss,
            vocab_size,
            math.log(vocab_size),
        )
