"""The contract: Qwen3-4B at its real size, random, in bfloat16 on CPU, has the loss that the formula gives.

About 10 GB and a few minutes, so not part of CI:  pytest -m soak tests/qwen3_core/test_qwen3_soak_real_size.py
"""

from pathlib import Path

import pytest
import torch
from qwen3_core import MODELS, Qwen3ForCausalLM, token_loss
from qwen3_core.accounting import count_parameters
from qwen3_core.loss import expected_random_loss

TOKENS = 256


@pytest.mark.soak
def test_qwen3_4b_at_random_has_the_expected_loss() -> None:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) / 1e6
    if available < 11:
        pytest.skip(f"{available:.1f} GB of memory available; needs 11")
    config = MODELS["4B"]
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    model.init_weights(torch.Generator().manual_seed(0))
    assert sum(p.numel() for p in model.parameters()) == count_parameters(config).total

    tokens, targets = torch.randint(config.vocab_size, (2, 1, TOKENS), generator=torch.Generator().manual_seed(1000))
    with torch.no_grad():
        loss = token_loss(model(tokens), targets).item()
    std = model.lm_head.weight[:10000].float().std().item()
    expected = expected_random_loss(config.vocab_size, config.hidden_size**0.5, std, TOKENS)
    print(f"Qwen3-4B, {TOKENS} random tokens: {loss:.3f}; formula {expected}")
    assert abs(loss - expected.value) < 3 * expected.standard_error
