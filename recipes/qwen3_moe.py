"""Qwen3's mixtures of experts on Trainium2: pre-training, continued pre-training and fine-tuning.

    uv run apps/train qwen3_30b_a3b_pretrain --dataloader.dataset_path /data/corpus
    uv run apps/train qwen3_30b_a3b_finetune --model Qwen/Qwen3-30B-A3B --dataloader.dataset_path /data/chat.jsonl

As in qwen3.py, whose functions these start from, with three choices more. Expert parallel (EP) divides the experts over
neighbouring cores, FSDP each expert over the rest; tokens are gathered within the group
(titan_recipes.moe.dispatchers), so that no shape depends on the routing. More EP means smaller gathers of weights and
more rows: a core has room for the fullest routing, EP x its tokens x 8. Experts are nki-moe's (route 3: `--route
native` takes them out). Pre-training asks for balanced experts by Qwen3's own auxiliary loss; TorchTitan's expert bias,
which a Hugging Face folder cannot hold, is off.

Memory per core is modelled and steps are checked as in qwen3.py. No recipe here has run on a device yet.
"""

from dataclasses import replace

from qwen3 import ASSETS, _continued, _finetune, _pretrain
from qwen3_core import MODELS
from titan_recipes import Trainer, kernel, native, use_balance_loss
from torchtitan.distributed.activation_checkpoint import FullAC

BALANCE = 0.001  # router_aux_loss_coef of every published Qwen3 mixture of experts


def _experts(config: Trainer.Config, *, expert_parallel: int) -> Trainer.Config:
    """A mixture's run: its experts over so many cores, by nki-moe."""
    config.parallelism.expert_parallel_degree = expert_parallel
    config.override.imports = [kernel("experts")]
    return config


def _balanced(config: Trainer.Config, coefficient: float = BALANCE) -> Trainer.Config:
    assert config.model_spec is not None
    use_balance_loss(config.model_spec, coefficient)
    return config


def qwen3_30b_a3b_pretrain() -> Trainer.Config:
    """Pre-train Qwen3-30B-A3B on one trn2.48xlarge: EP4 (a chip) x FSDP over all cores."""
    return _balanced(_experts(_pretrain("30B-A3B", tensor_parallel=1, local_batch=1), expert_parallel=4))


def qwen3_30b_a3b_continued() -> Trainer.Config:
    """Continue pre-training Qwen3-30B-A3B-Base on one trn2.48xlarge: EP4 (a chip) x FSDP over all cores."""
    return _continued(qwen3_30b_a3b_pretrain())


def qwen3_30b_a3b_finetune() -> Trainer.Config:
    """Fine-tune Qwen3-30B-A3B-Base on conversations, on one trn2.48xlarge: EP4 (a chip) x FSDP over all cores."""
    return _finetune(_experts(_pretrain("30B-A3B", tensor_parallel=1, local_batch=1), expert_parallel=4))


def qwen3_30b_a3b_one_chip() -> Trainer.Config:
    """Qwen3-30B-A3B cut to 4 layers, on one Trainium2 chip (trn2.3xlarge), to measure: 30B-A3B, 4 layers,
    EP4 x FSDP4.
    """
    config = qwen3_30b_a3b_pretrain()
    config.model_spec = native(
        replace(MODELS["30B-A3B"], num_hidden_layers=4), document_mask="causal", flavor="30B-A3B, 4 layers"
    )
    config.parallelism.data_parallel_shard_degree = 4
    config.training.global_batch_size = 32
    return _balanced(config)


def qwen3_235b_a22b_pretrain_8_nodes() -> Trainer.Config:
    """Pre-train Qwen3-235B-A22B on eight trn2.48xlarge or two Trn2 UltraServers: EP8 x TP4 x FSDP128, blocks recomputed
    whole.
    """
    config = _experts(_pretrain("235B-A22B", tensor_parallel=4, local_batch=1), expert_parallel=8)
    config.hf_assets_path = f"{ASSETS}/Qwen3-235B-A22B"  # there is no Base
    config.parallelism.data_parallel_shard_degree = 128  # one copy: its masters and moments are 3.8 TB
    config.training.global_batch_size = 512
    config.activation_checkpoint = FullAC.Config()
    return _balanced(config)


def qwen3_235b_a22b_finetune_8_nodes() -> Trainer.Config:
    """Fine-tune Qwen3-235B-A22B on conversations, on eight trn2.48xlarge or two Trn2 UltraServers: EP8 x
    TP4 x FSDP128.
    """
    config = _finetune(_balanced(qwen3_235b_a22b_pretrain_8_nodes(), 0.0))
    config.training.global_batch_size = 128
    return config
