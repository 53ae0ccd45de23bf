"""Recipes that run anywhere in minutes: the shape of a real run, at the size of a laptop."""

from dataclasses import replace
from pathlib import Path

from qwen3_core import Qwen3Config
from titan_recipes import RunMetrics, StepCheckpoints, TextDataLoader, Trainer, kernel, native, python_docs
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import DebugConfig, TrainingConfig

TOKENIZER = Path(__file__).parent / "debug_tokenizer"
VOCAB_SIZE = 2048


def debug() -> Trainer.Config:
    """A 2-million-parameter Qwen3 on the Python language reference: CPU, under 3 minutes.

    Tied embeddings, QK-norm, 4 query heads on 2 KV heads, head_dim 64 (hidden/heads is 48): everything a dense Qwen3
    has.
    """
    return Trainer.Config(
        model_spec=native(
            Qwen3Config(
                vocab_size=VOCAB_SIZE,
                hidden_size=192,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=64,
                intermediate_size=512,
                max_position_embeddings=4096,
                rope_theta=1_000_000.0,
                tie_word_embeddings=True,
            ),
            document_mask="block",
            flavor="debug",
        ),
        hf_assets_path=str(TOKENIZER),
        dataloader=TextDataLoader.Config(holdout=0.1),
        validator=Validator.Config(enable=True, freq=75, steps=-1),
        training=TrainingConfig(local_batch_size=4, seq_len=256, steps=300, dtype="float32"),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=20, decay_ratio=0.8, decay_type="cosine", min_lr_factor=0.1
        ),
        activation_checkpoint=None,  # nothing to save memory for at this size
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB_SIZE),
        metrics=RunMetrics.Config(log_freq=10, enable_tensorboard=True),
        debug=DebugConfig(seed=0),
        checkpoint=StepCheckpoints.Config(enable=True, interval=150, keep_latest_k=3),
    )


def debug_moe() -> Trainer.Config:
    """A mixture of experts of 8 million parameters on the same text, through nki-moe's experts: CPU, minutes.

    8 experts of 256, 2 a token; widths that the kernels take, so that NKI_MOE_BACKEND=sim runs them here on nki-sim
    (slowly).
    """
    config = debug()
    assert config.model_spec is not None
    dense = config.model_spec.model.qwen3
    moe = replace(
        dense, hidden_size=256, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True
    )
    config.model_spec = native(moe, document_mask="block", flavor="debug-moe")
    config.override.imports = [kernel("experts")]
    return config


def debug_continued() -> Trainer.Config:
    """Go on with the model that `debug` left, at a third of its learning rate: CPU, a minute.

    uv run apps/train debug_continued --model outputs/debug-DATE-TIME/hf
    """
    config = debug()
    config.optimizer = default_adamw(lr=3e-4)
    config.training.steps = 100
    config.validator.freq = 50
    return config


def debug_finetune() -> Trainer.Config:
    """Fine-tune the model that `debug` left on questions and answers: CPU, a minute.

    uv run apps/train debug_finetune --model outputs/debug-DATE-TIME/hf

    Chat data as for a real model: the tokenizer's template, one conversation a sequence, labels on the answers alone.
    """
    config = debug_continued()
    config.dataloader = TextDataLoader.Config(documents=questions, format="chat", holdout=0.1)
    return config


def questions() -> list[list[dict[str, str]]]:
    """A conversation for each section of the language reference: its title asked for, its first paragraph
    the answer.
    """
    conversations = []
    for section in python_docs():
        title, _, text = section.partition("\n\n")
        paragraph = " ".join(text.partition("\n\n")[0].split())
        if text and len(paragraph) < 400:
            question = f"What does Python's reference say under {title.strip().splitlines()[0]!r}?"
            conversations.append([{"role": "user", "content": question}, {"role": "assistant", "content": paragraph}])
    return conversations
