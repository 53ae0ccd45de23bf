"""The contract: with the cache of fixed length, generation gives what the whole sequence gives without it,
and what Transformers gives; every step after the prompt has the same shapes.
"""

from typing import Any

import pytest
import torch
from qwen3_core import KVCache, Qwen3Config, Yarn, generate
from qwen3_core.accounting import kv_cache_bytes
from qwen3_reference import assert_close, pair, tiny, tiny_moe

CONFIGS = [tiny(), tiny_moe(), tiny(rope_scaling=Yarn(4.0, 64))]
IDS = ["dense", "moe", "yarn"]


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_cached_logits_equal_uncached_ones_however_the_sequence_is_cut(config: Qwen3Config) -> None:
    model, _ = pair(config)
    x = torch.randint(320, (2, 20), generator=torch.Generator().manual_seed(0))
    cache = KVCache(config, batch=2, length=32)
    pieces = []
    for start, end in ((0, 7), (7, 8), (8, 19), (19, 20)):
        positions = torch.arange(start, end).expand(2, -1)
        pieces.append(model(x[:, start:end], positions, cache))
    assert_close("logits", torch.cat(pieces, dim=1), model(x))


def test_slots_beyond_the_position_are_never_seen() -> None:
    model, _ = pair(tiny())
    x = torch.arange(10)[None]
    clean, dirty = KVCache(model.config, 1, 16), KVCache(model.config, 1, 16)
    dirty.k_LBGSK.fill_(100.0)
    dirty.v_LBGSK.fill_(100.0)
    positions = torch.arange(10)[None]
    assert torch.equal(model(x, positions, clean), model(x, positions, dirty))


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


def test_a_cache_without_positions_is_refused_since_it_would_overwrite_slot_0() -> None:
    model, _ = pair(tiny())
    with pytest.raises(ValueError, match="positions_BT"):
        model(torch.zeros(1, 1, dtype=torch.long), cache=KVCache(model.config, 1, 8))


def test_the_cache_takes_the_bytes_that_accounting_says() -> None:
    for config in CONFIGS:
        cache = KVCache(config, batch=3, length=40, dtype=torch.bfloat16)
        assert cache.k_LBGSK.nbytes + cache.v_LBGSK.nbytes == kv_cache_bytes(config, batch=3, length=40)
