"""Dense Qwen3 on trn2.48xlarge: pre-training, continued pre-training and fine-tuning of every size.

    uv run apps/train qwen3_8b_pretrain --dataloader.dataset_path /data/corpus
    uv run apps/train qwen3_8b_finetune --model Qwen/Qwen3-8B --dataloader.dataset_path /data/chat.jsonl

trn2.48xlarge has 64 logical cores (LNC=2) with 24 GiB each. Groups that talk most are smallest and nearest: tensor
parallel on 4 or 8 neighbouring cores, FSDP over the rest. Masters, gradients and AdamW's moments are float32, compute
is bfloat16. The mask is `causal` for the packed texts of pre-training and for the padded conversations of fine-tuning
(padding comes last, so nothing sees it): without a mask tensor and with lengths in multiples of 512, attention takes
Neuron's fast kernel.

Cores, memory and tokens of each stand in figures.json, which `nox -s figures` makes and `apps/train --list` shows.
Memory is modelled by a rehearsal at full depth: the most that torch's tensors take in one step. Runtime, communication
buffers and fragments come on top, and a tenth of the 24 GiB should stay free for them. CI takes one step of each recipe
on as many fake ranks as it has cores: real widths and degrees, the first of the layers, shapes without contents. No
recipe here has run on a device yet.

To make one of your own, copy a function, or call it and set what differs.
"""

from pathlib import Path

from titan_recipes import RunMetrics, SaveLinears, StepCheckpoints, TextDataLoader, Trainer, native, simple_fsdp
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig

ASSETS = "assets/hf"  # hf download Qwen/Qwen3-8B-Base --local-dir assets/hf/Qwen3-8B-Base


def _pretrain(size: str, *, tensor_parallel: int, local_batch: int) -> Trainer.Config:
    """What every recipe of this file starts from: random weights, packed text, 524,288 tokens a step."""
    model_spec = native(size, document_mask="causal")
    return Trainer.Config(
        model_spec=model_spec,
        hf_assets_path=f"{ASSETS}/Qwen3-{size}-Base",  # for the tokenizer; --model sets it too
        dataloader=TextDataLoader.Config(dataset_path="data/text", holdout=0.001),
        validator=Validator.Config(enable=True, freq=500, steps=-1),
        training=TrainingConfig(
            local_batch_size=local_batch,
            global_batch_size=128,  # the rest is gradient accumulation
            seq_len=4096,
            steps=20_000,
        ),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=tensor_parallel,
            data_parallel_shard_degree=64 // tensor_parallel,
        ),
        activation_checkpoint=SaveLinears.Config(),
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=1000, decay_ratio=0.9, decay_type="cosine", min_lr_factor=0.1
        ),
        loss=CrossEntropyLoss.Config(global_vocab_size=model_spec.model.vocab_size),
        metrics=RunMetrics.Config(log_freq=10, enable_tensorboard=True),
        checkpoint=StepCheckpoints.Config(enable=True, interval=500, keep_latest_k=3),
    )


def _continued(config: Trainer.Config) -> Trainer.Config:
    """Continue from the base model's weights on texts of one's own: shorter, at a tenth of the learning rate."""
    config.checkpoint.initial_load_path = str(Path(config.hf_assets_path).absolute())
    config.checkpoint.initial_load_in_hf = True
    config.optimizer = default_adamw(lr=3e-5)
    config.training.steps = 2000
    config.lr_scheduler.warmup_steps = 100
    config.validator.freq = 100
    config.dataloader.holdout = 0.01
    return config


def _finetune(config: Trainer.Config) -> Trainer.Config:
    """Fine-tune the base model's weights on conversations, one a sequence, padded; the assistant's turns
    are learned.
    """
    config = _continued(config)
    config.dataloader = TextDataLoader.Config(
        dataset_path="data/chat.jsonl", format="chat", holdout=0.02, infinite=True
    )
    config.optimizer = default_adamw(lr=1e-5)
    config.training.seq_len = 2048
    config.training.global_batch_size = 64
    config.training.steps = 1000
    config.lr_scheduler.warmup_steps = 50
    return config


def _nodes(config: Trainer.Config, nodes: int) -> Trainer.Config:
    """The same on several instances: each holds a whole copy, gradients are averaged over EFA once a step (HSDP)."""
    config.parallelism.data_parallel_replicate_degree = nodes
    config.training.global_batch_size *= nodes
    return config


def qwen3_0_6b_pretrain() -> Trainer.Config:
    """Pre-train Qwen3-0.6B on one trn2.48xlarge: FSDP over all cores."""
    return _pretrain("0.6B", tensor_parallel=1, local_batch=1)


def qwen3_0_6b_continued() -> Trainer.Config:
    """Continue pre-training Qwen3-0.6B-Base on one trn2.48xlarge: FSDP over all cores."""
    return _continued(qwen3_0_6b_pretrain())


def qwen3_0_6b_finetune() -> Trainer.Config:
    """Fine-tune Qwen3-0.6B-Base on conversations, on one trn2.48xlarge: FSDP over all cores."""
    return _finetune(qwen3_0_6b_pretrain())


def qwen3_1_7b_pretrain() -> Trainer.Config:
    """Pre-train Qwen3-1.7B on one trn2.48xlarge: FSDP over all cores."""
    return _pretrain("1.7B", tensor_parallel=1, local_batch=1)


def qwen3_1_7b_continued() -> Trainer.Config:
    """Continue pre-training Qwen3-1.7B-Base on one trn2.48xlarge: FSDP over all cores."""
    return _continued(qwen3_1_7b_pretrain())


def qwen3_1_7b_finetune() -> Trainer.Config:
    """Fine-tune Qwen3-1.7B-Base on conversations, on one trn2.48xlarge: FSDP over all cores."""
    return _finetune(qwen3_1_7b_pretrain())


def qwen3_4b_pretrain() -> Trainer.Config:
    """Pre-train Qwen3-4B on one trn2.48xlarge: TP4 x FSDP16."""
    return _pretrain("4B", tensor_parallel=4, local_batch=2)


def qwen3_4b_continued() -> Trainer.Config:
    """Continue pre-training Qwen3-4B-Base on one trn2.48xlarge: TP4 x FSDP16."""
    return _continued(qwen3_4b_pretrain())


def qwen3_4b_finetune() -> Trainer.Config:
    """Fine-tune Qwen3-4B-Base on conversations, on one trn2.48xlarge: TP4 x FSDP16."""
    return _finetune(qwen3_4b_pretrain())


def qwen3_8b_pretrain() -> Trainer.Config:
    """Pre-train Qwen3-8B on one trn2.48xlarge: TP4 x FSDP16."""
    return _pretrain("8B", tensor_parallel=4, local_batch=2)


def qwen3_8b_continued() -> Trainer.Config:
    """Continue pre-training Qwen3-8B-Base on one trn2.48xlarge: TP4 x FSDP16."""
    return _continued(qwen3_8b_pretrain())


def qwen3_8b_finetune() -> Trainer.Config:
    """Fine-tune Qwen3-8B-Base on conversations, on one trn2.48xlarge: TP4 x FSDP16."""
    return _finetune(qwen3_8b_pretrain())


def qwen3_14b_pretrain() -> Trainer.Config:
    """Pre-train Qwen3-14B on one trn2.48xlarge: TP8 x FSDP8."""
    return _pretrain("14B", tensor_parallel=8, local_batch=1)


def qwen3_14b_continued() -> Trainer.Config:
    """Continue pre-training Qwen3-14B-Base on one trn2.48xlarge: TP8 x FSDP8."""
    return _continued(qwen3_14b_pretrain())


def qwen3_14b_finetune() -> Trainer.Config:
    """Fine-tune Qwen3-14B-Base on conversations, on one trn2.48xlarge: TP8 x FSDP8."""
    return _finetune(qwen3_14b_pretrain())


def qwen3_32b_pretrain() -> Trainer.Config:
    """Pre-train Qwen3-32B on one trn2.48xlarge: TP8 x FSDP8."""
    return _pretrain("32B", tensor_parallel=8, local_batch=1)


def qwen3_32b_continued() -> Trainer.Config:
    """Continue pre-training Qwen3-32B-Base on one trn2.48xlarge: TP8 x FSDP8."""
    return _continued(qwen3_32b_pretrain())


def qwen3_32b_finetune() -> Trainer.Config:
    """Fine-tune Qwen3-32B-Base on conversations, on one trn2.48xlarge: TP8 x FSDP8."""
    return _finetune(qwen3_32b_pretrain())


def qwen3_8b_pretrain_4_nodes() -> Trainer.Config:
    """Pre-train Qwen3-8B on four trn2.48xlarge or a Trn2 UltraServer: TP4 x FSDP16 in each, four copies (HSDP)."""
    return _nodes(qwen3_8b_pretrain(), 4)


def qwen3_14b_pretrain_4_nodes() -> Trainer.Config:
    """Pre-train Qwen3-14B on four trn2.48xlarge or a Trn2 UltraServer: TP8 x FSDP8 in each, four copies (HSDP)."""
    return _nodes(qwen3_14b_pretrain(), 4)


def qwen3_32b_pretrain_4_nodes() -> Trainer.Config:
    """Pre-train Qwen3-32B on four trn2.48xlarge or a Trn2 UltraServer: TP8 x FSDP8 in each, four copies (HSDP)."""
    return _nodes(qwen3_32b_pretrain(), 4)


def qwen3_8b_pretrain_compiled() -> Trainer.Config:
    """`qwen3_8b_pretrain` with each block compiled, by the device's compiler (neuron on Trainium).

    Rehearsed eagerly, because compilation needs a device.
    """
    config = qwen3_8b_pretrain()
    config.compile = CompileConfig(enable=True, components=["model"])
    return config


def qwen3_8b_pretrain_simple_fsdp() -> Trainer.Config:
    """`qwen3_8b_pretrain` compiled whole, its collectives in the graph: SimpleFSDP.

    Rehearsed eagerly, because compilation needs a device.
    """
    config = qwen3_8b_pretrain_compiled()
    assert config.model_spec is not None
    config.model_spec = simple_fsdp(config.model_spec)
    config.parallelism.spmd_backend = "partial_dtensor"
    return config
