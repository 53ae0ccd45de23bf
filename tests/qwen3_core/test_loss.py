"""The contract: the loss weighs every token alike however a batch is cut, and before training it has the
value that `expected_random_loss` computes, within three standard errors on at least 2,048 tokens.
"""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from qwen3_core import MODELS, Qwen3Config, Qwen3ForCausalLM, next_token_targets, target_loss
from qwen3_core.accounting import count_parameters
from qwen3_core.loss import expected_random_loss
from qwen3_reference import assert_close, pair, tiny, tiny_moe
from torch import Tensor, nn

TOKENS = 2048


def test_micro_batches_with_1_and_63_targets_give_the_gradients_of_one_batch_of_64() -> None:
    model = Qwen3ForCausalLM(tiny())
    model.init_weights(torch.Generator().manual_seed(0))
    x = torch.randint(320, (2, 64), generator=torch.Generator().manual_seed(1))
    targets = x.roll(-1, dims=1).clone()
    targets[0, 1:] = -100
    targets[1, 63:] = -100

    def gradients() -> list[Tensor]:
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return grads

    target_loss(model(x), targets).backward()
    whole = gradients()
    for row in range(2):
        target_loss(model(x[row : row + 1]), targets[row : row + 1], num_targets=64).backward()
    for (name, _), a, b in zip(model.named_parameters(), gradients(), whole, strict=True):
        assert_close(name, a, b)


def test_it_is_the_mean_cross_entropy_of_the_valid_targets_in_float32() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.tensor([[0, 1, -100, 3, 4], [-100, 6, 5, 4, -100]])
    loss = target_loss(logits, targets)
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()))
    assert target_loss(logits, torch.full_like(targets, -100)).item() == 0.0


RANDOM_MODELS = {
    "dense": tiny(hidden_size=256, vocab_size=8192, intermediate_size=512),
    "dense, wide": tiny(hidden_size=1024, vocab_size=16384, intermediate_size=1024),
    "tied": tiny(hidden_size=512, vocab_size=8192, intermediate_size=1024, tie_word_embeddings=True),
    "experts": tiny_moe(hidden_size=512, vocab_size=8192),
    "large std": tiny(hidden_size=256, vocab_size=16384, initializer_range=0.06),
}


def measured(model: Qwen3ForCausalLM, seed: int) -> float:
    # Not the seed of the weights: equal seeds give equal streams, and then targets are not drawn without
    # looking at h.
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens, targets = torch.randint(model.config.vocab_size, (2, TOKENS), generator=generator).view(2, 8, -1)
    with torch.no_grad():
        return target_loss(model(tokens), targets).item()


@pytest.mark.parametrize("config", RANDOM_MODELS.values(), ids=RANDOM_MODELS.keys())
@pytest.mark.parametrize("seed", [0, 1])
def test_a_random_model_has_the_expected_loss(config: Qwen3Config, seed: int) -> None:
    model = Qwen3ForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(seed))
    norm, std = model.model.norm.weight.norm().item(), model.lm_head.weight.std().item()
    expected = expected_random_loss(config.vocab_size, norm, std, TOKENS)
    loss = measured(model, seed)
    assert abs(loss - expected.value) < 3 * expected.standard_error, (loss, expected)
    # The tolerance tells it from ln V, the value that is usually quoted.
    assert abs(loss - math.log(config.vocab_size)) > 3 * expected.standard_error


def test_the_head_is_measured_so_another_initialiser_is_covered() -> None:
    config = RANDOM_MODELS["dense"]
    model = Qwen3ForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(0))
    nominal = config.hidden_size**-0.5
    torch.manual_seed(2000)  # again not the seed of the other weights
    nn.init.trunc_normal_(model.lm_head.weight, std=nominal, a=-3 * nominal, b=3 * nominal)
    std = model.lm_head.weight.std().item()
    assert std**2 / nominal**2 == pytest.approx(0.973, abs=0.005)
    expected = expected_random_loss(config.vocab_size, 16.0, std, TOKENS)
    assert abs(measured(model, 0) - expected.value) < 3 * expected.standard_error


@pytest.mark.parametrize(
    ("hidden", "std", "loss"),
    [
        (1024, 0.02, "12.14"),
        (2560, 0.02, "12.44"),
        (5120, 0.02, "12.96"),
        (1024, 1024**-0.5, "12.43"),
        (2560, 2560**-0.5, "12.43"),
        (2560, (0.9733 / 2560) ** 0.5, "12.42"),
        (5120, (0.9733 / 5120) ** 0.5, "12.42"),
    ],
)
def test_the_values_that_the_docstring_quotes(hidden: int, std: float, loss: str) -> None:
    assert f"{expected_random_loss(151936, hidden**0.5, std, TOKENS).value:.2f}" == loss


def test_the_standard_error_is_that_of_the_mean_over_models() -> None:
    # 400 heads on one hidden state: the mean loss spreads by what standard_error says, so three of it is no
    # guess.
    generator = torch.Generator().manual_seed(0)
    vocab, dim, std, tokens = 512, 64, 0.15, 256
    h_D = F.normalize(torch.randn(dim, generator=generator), dim=0) * dim**0.5
    losses = []
    for _ in range(400):
        logits_V = std * torch.randn(vocab, dim, generator=generator) @ h_D
        targets_N = torch.randint(vocab, (tokens,), generator=generator)
        losses.append((logits_V.logsumexp(0) - logits_V[targets_N]).mean())
    spread = torch.stack(losses)
    expected = expected_random_loss(vocab, dim**0.5, std, tokens)
    assert spread.std().item() == pytest.approx(expected.standard_error, rel=0.15)
    assert abs(spread.mean().item() - expected.value) < 3 * expected.standard_error / 400**0.5


def test_the_loss_of_a_sequence_is_transformers_loss_with_labels() -> None:
    """Case 265: without the shift it would be another plausible number."""
    ours, theirs = pair(tiny())
    tokens = torch.randint(ours.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, expected = ours(tokens), theirs(tokens, labels=tokens).loss
    torch.testing.assert_close(target_loss(logits, next_token_targets(tokens)), expected, rtol=1e-5, atol=0)
    assert abs(target_loss(logits, tokens) - expected) > 1e-2


def test_the_old_name_says_the_new_one() -> None:
    with pytest.raises(ImportError, match=r"target_loss now.*next_token_targets"):
        exec("from qwen3_core import token_loss")


@pytest.mark.soak
def test_qwen3_4b_at_random_has_the_expected_loss() -> None:
    """Its real size, in bfloat16 on CPU: about 10 GB and a few minutes."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) / 1e6
    if available < 11:
        pytest.skip(f"{available:.1f} GB of memory available; needs 11")
    config, count = MODELS["4B"], 256
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    model.init_weights(torch.Generator().manual_seed(0))
    assert sum(p.numel() for p in model.parameters()) == count_parameters(config).total

    tokens, targets = torch.randint(config.vocab_size, (2, 1, count), generator=torch.Generator().manual_seed(1000))
    with torch.no_grad():
        loss = target_loss(model(tokens), targets).item()
    std = model.lm_head.weight[:10000].float().std().item()
    expected = expected_random_loss(config.vocab_size, config.hidden_size**0.5, std, count)
    print(f"Qwen3-4B, {count} random tokens: {loss:.3f}; formula {expected}")
    assert abs(loss - expected.value) < 3 * expected.standard_error
