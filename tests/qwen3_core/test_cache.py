"""Contract of cache.py: with a cache the logits are those without one."""

import pytest
import torch
from qwen3_core import KVCache, Qwen3Config
from qwen3_core.accounting import kv_cache_bytes
from qwen3_reference import CONFIGS, IDS, assert_close, pair, tiny


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


def test_a_cache_without_positions_is_refused_since_it_would_overwrite_slot_0() -> None:
    model, _ = pair(tiny())
    with pytest.raises(ValueError, match="positions_BT"):
        model(torch.zeros(1, 1, dtype=torch.long), cache=KVCache(model.config, 1, 8))


def test_the_cache_takes_the_bytes_that_accounting_says() -> None:
    for config in CONFIGS:
        cache = KVCache(config, batch=3, length=40, dtype=torch.bfloat16)
        assert cache.k_LBGSK.nbytes + cache.v_LBGSK.nbytes == kv_cache_bytes(config, batch=3, length=40)
