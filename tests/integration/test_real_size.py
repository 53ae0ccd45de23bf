"""Contract: at real size the Transformers route starts where theory says.

Needs 24 GB of memory: run by `nox -s soak`.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

TOKENIZER = Path(__file__).parents[2] / "recipes" / "debug_tokenizer"
TOKENS = 512


def random_model(rank: int, model: str, run: Path) -> dict[str, Any]:
    """Build `model` in bf16 as a run does (no optimizer step, so no optimizer state) and take one forward pass."""
    from qwen3_core import target_loss
    from titan_recipes.config.device_defaults import apply_device_defaults
    from titan_recipes.models.spec import transformers
    from titan_recipes.train.first_loss import random_loss
    from titan_recipes.train.trainer import Trainer
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import DebugConfig, TrainingConfig

    config = Trainer.Config(
        model_spec=transformers(model),
        hf_assets_path=str(TOKENIZER),
        training=TrainingConfig(local_batch_size=1, seq_len=TOKENS, steps=1, dtype="bfloat16"),
        optimizer=default_adamw(lr=1e-5),
        loss=CrossEntropyLoss.Config(global_vocab_size=151936),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0),
        dump_folder=str(run),
    )
    apply_device_defaults(config, "cpu")
    config.training.mixed_precision_param = "bfloat16"
    trainer = config.build()
    vocab = trainer.model_config.vocab_size
    generator = torch.Generator().manual_seed(12345)  # not the weights' seed: equal ones bias the loss
    tokens, targets = torch.randint(vocab, (2, 1, TOKENS), generator=generator)
    expected = random_loss(trainer.model_parts, vocab, TOKENS)
    assert expected is not None
    with torch.no_grad(), trainer.train_context():
        logits = trainer.model_parts[0](tokens, positions=torch.arange(TOKENS)[None])
    dtypes = sorted({str(p.dtype) for p in trainer.model_parts[0].parameters()})
    parameters = sum(p.numel() for p in trainer.model_parts[0].parameters())
    return {"loss": target_loss(logits, targets).item(), "expected": tuple(expected), "dtypes": dtypes, "n": parameters}


@pytest.mark.soak
def test_a_random_qwen3_4b_in_bfloat16_has_the_formulas_first_loss(tmp_path: Path) -> None:
    (found,) = run_ranks(random_model, 1, "4B", tmp_path, timeout=3600)
    assert found["dtypes"] == ["torch.bfloat16"] and found["n"] == 4_022_468_096
    value, error = found["expected"]
    # bf16 logits near 5 are rounded to 1/64: a mean over many of them moves by far less
    assert found["loss"] == pytest.approx(value, abs=4 * error + 0.01)
    assert found["loss"] > math.log(151936)
