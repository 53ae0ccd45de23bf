"""The training loss, and the value it has before anything is learned.

B = batch, T = positions, V = vocabulary. The expected loss needs no torch.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ExpectedLoss", "expected_random_loss", "token_loss"]

IGNORE = -100


def token_loss(logits_BTV: "Tensor", targets_BT: "Tensor", num_targets: "int | Tensor | None" = None) -> "Tensor":
    """Summed cross-entropy over the targets that are not -100, divided by `num_targets`; float32 scalar.

    `num_targets` is the number of valid targets in the whole optimizer step, over all micro-batches and ranks. With it
    the summed gradients are those of one large batch; a mean per micro-batch would weigh the tokens of a short one
    more. Absent, it is counted here.
    """
    import torch.nn.functional as F

    total = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    if num_targets is None:
        num_targets = (targets_BT != IGNORE).sum().clamp(min=1)
    return total / num_targets


class ExpectedLoss(NamedTuple):
    """`value` in nats, and the standard error of the mean over the tokens that it was asked for."""

    value: float
    standard_error: float


def expected_random_loss(vocab_size: int, hidden_norm: float, head_std: float, num_tokens: int) -> ExpectedLoss:
    """Mean cross-entropy of a random model on `num_tokens` random targets: ln V + s²/2, with s = |h| head_std.

    Args: `hidden_norm` is the norm |h| of a final hidden state, after the last norm; at initialisation, norm weights
    being 1, it is √D, and `model.model.norm.weight.norm()` in general. `head_std` is the *measured* standard deviation
    of the head's weights, `model.lm_head.weight.std()`, which a truncated or scaled initialiser makes different from
    the nominal one.

    Derivation. Given h, the logits z_v = h·w_v of a head with independent entries are independent normals with
    variance s² = |h|² head_std². The loss at a target t is ln Σ_v exp z_v - z_t. By the law of large numbers
    Σ_v exp z_v ≈ V E[exp z] = V exp(s²/2). Targets drawn without looking at h have E[z_t] = 0. Together: ln V + s²/2.

    Error. z_t varies by s from token to token, which gives s/√N. The sum over V is not yet its mean: its logarithm
    varies by √((e^{s²} - 1)/V), in the worst case alike for all tokens (hidden states of a random model resemble each
    other), and is low by half the square of that, which is subtracted. `standard_error` is both in quadrature. Not
    covered: a *tied* head at small depth. The stream then still holds the token's own embedding, whose logit is not
    random; it matters once it comes near ln V, that is with next to no layers.

    It depends on the initialiser. With Qwen3's V of 151936 and std 0.02 it is 12.14 at D 1024, 12.44 at 2560 and
    12.96 at 5120. A head with std 1/√D gives ln V + 1/2 = 12.43 at every size, and TorchTitan's, truncated at three
    standard deviations (variance 0.973/D), 12.42. So "12.43 for 4B" holds for the one to a hundredth and for the
    other only because D is 2560.
    """
    logit_variance = (hidden_norm * head_std) ** 2
    sum_variance = math.expm1(logit_variance) / vocab_size
    value = math.log(vocab_size) + logit_variance / 2 - sum_variance / 2
    return ExpectedLoss(value, math.sqrt(logit_variance / num_tokens + sum_variance))
