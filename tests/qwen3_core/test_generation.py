"""Contract of generation.py: greedy text is Transformers', and every step has one shape."""

from typing import Any

import pytest
import torch
from qwen3_core import Qwen3Config, generate
from qwen3_reference import CONFIGS, IDS, pair, tiny


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_greedy_generation_equals_transformers(config: Qwen3Config) -> None:
    ours, theirs = pair(config)
    prompt = torch.randint(320, (3, 5), generator=torch.Generator().manual_seed(0))
    whole = torch.ones_like(prompt)  # else Transformers takes tokens equal to the pad token for padding
    options = {"max_length": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    reference = theirs.generate(prompt, attention_mask=whole, **options)
    assert torch.equal(generate(ours, prompt, length=24), reference)


def test_steps_have_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair(tiny())
    shapes: list[Any] = []
    forward = model.model.forward

    def watched(tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.append(tuple(tokens.shape))
        return forward(tokens, *rest)

    monkeypatch.setattr(model.model, "forward", watched)
    generate(model, torch.zeros(2, 5, dtype=torch.long), length=12)
    assert shapes == [(2, 5)] + [(2, 1)] * 6


def test_sampling_is_reproducible_and_follows_the_temperature() -> None:
    model, _ = pair(tiny())
    prompt = torch.zeros(1, 1, dtype=torch.long)

    def sample(seed: int, temperature: float) -> list[int]:
        return generate(model, prompt, 24, temperature, torch.Generator().manual_seed(seed))[0].tolist()

    assert sample(0, 1.0) == sample(0, 1.0) != sample(1, 1.0)
    assert sample(0, 1e-4) == sample(1, 1e-4) == generate(model, prompt, 24)[0].tolist()


def test_prompts_that_do_not_fit_are_refused() -> None:
    model, _ = pair(tiny())
    for length in (0, 9):
        with pytest.raises(ValueError, match=rf"{length} tokens.*length = 8"):
            generate(model, torch.zeros(1, length, dtype=torch.long), 8)
    with pytest.raises(ValueError, match=r"513.*512"):
        generate(model, torch.zeros(1, 4, dtype=torch.long), 513)
    full = torch.arange(8)[None]
    assert torch.equal(generate(model, full, 8), full)
