"""The training loss, and the value it has before anything is learned.

B = batch, T = positions, V = vocabulary. The expected loss needs no torch.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ExpectedLoss", "expected_random_loss", "next_token_targets", "target_loss"]

IGNORE = -100  # a position without a target, as torch.nn.functional.cross_entropy has it


def target_loss(logits_BTV: "Tensor", targets_BT: "Tensor", num_targets: "int | Tensor | None" = None) -> "Tensor":
    """Summed cross-entropy over the targets, divided by how many there are.

        loss = target_loss(model(tokens_BT), next_token_targets(tokens_BT))

    Nothing is shifted here: `targets_BT[b, t]` is the token that `logits_BTV[b, t]` should predict, which is the next
    one. Transformers' `labels` are the tokens themselves, and are shifted by its model.

    Args:
        logits_BTV: as the model gives them, any float dtype; the loss is worked out in float32.
        targets_BT: token ids, int64; -100 is no target.
        num_targets: targets in the whole optimizer step, over all micro-batches and ranks. With it the summed gradients
            are those of one large batch; a mean per micro-batch would weigh the tokens of a short one more. Absent, the
            targets of this batch are counted.

    Returns:
        A float32 scalar; 0 when there is no target.
    """
    import torch.nn.functional as F

    total = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    if num_targets is None:
        num_targets = (targets_BT != IGNORE).sum().clamp(min=1)
    return total / num_targets


def next_token_targets(tokens_BT: "Tensor") -> "Tensor":
    """What a model should predict at each position of a sequence: the token after it.

    Args:
        tokens_BT: token ids, int64, each row one document.

    Returns:
        int64 [B, T]; the last position of a row has no target (-100).
    """
    return tokens_BT.roll(-1, dims=1).index_fill(1, tokens_BT.new_tensor([tokens_BT.shape[1] - 1]), IGNORE)


class ExpectedLoss(NamedTuple):
    """`value` in nats, and the standard error of the mean over the tokens that it was asked for."""

    value: float
    standard_error: float


def expected_random_loss(vocab_size: int, hidden_norm: float, head_std: float, num_tokens: int) -> ExpectedLoss:
    """Mean cross-entropy of a random model on random targets: ln V + s²/2, where s = hidden_norm head_std.

    `hidden_norm` is the norm |h| of a final hidden state, after the last norm. At initialisation, with norm
    weights of 1, it is √D; `model.model.norm.weight.norm()` in general. `head_std` is the *measured* standard
    deviation of the head, `model.lm_head.weight.std()`: a truncated or scaled initialiser has another than
    its nominal one. `num_tokens` is the number of targets that the loss will be a mean of.

    Derivation. Given h, the logits z_v = h·w_v of a head with independent entries are independent normals of
    variance s² = |h|² head_std². The loss at target t is ln Σ_v exp z_v - z_t. By the law of large numbers
    Σ_v exp z_v ≈ V E[exp z] = V exp(s²/2), and targets drawn without looking at h have E[z_t] = 0. Together
    ln V + s²/2.

    Error. z_t varies by s from token to token, which makes s/√N of a mean over N. The sum over V is not quite
    its expectation: its logarithm varies by √((e^{s²} - 1)/V), at worst alike for all tokens (the hidden
    states of a random model resemble each other), and is low by half the square of that, which is subtracted.
    `standard_error` is both in quadrature. Not covered is a *tied* head on next to no layers: the stream then
    still holds the token's own embedding, whose logit is not random and counts once it comes near ln V.

    It depends on the initialiser, not on the model's size as such. With V = 151936 and std 0.02 it is 12.14
    at D 1024, 12.44 at D 2560, 12.96 at D 5120. A head of std 1/√D has ln V + 1/2 = 12.43 at every size, and
    truncated at three standard deviations (variance 0.973/D, as TorchTitan's Transformers backend draws it)
    12.42. So a "12.43 for 4B" is exact for the second and right to a hundredth for Qwen3's own, because
    2560 · 0.02² happens to be near 1.
    """
    logit_variance = (hidden_norm * head_std) ** 2
    sum_variance = math.expm1(logit_variance) / vocab_size
    value = math.log(vocab_size) + logit_variance / 2 - sum_variance / 2
    return ExpectedLoss(value, math.sqrt(logit_variance / num_tokens + sum_variance))
