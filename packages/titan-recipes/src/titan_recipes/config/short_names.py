"""Short names for what everybody sets, and a hint for names that other trainers have.

    apps/train debug --lr 3e-4 --steps 100 --batch 8 --seq 1024 --data corpus.jsonl

A short name stands for options of TorchTitan, which `--help` lists. No torch.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError

__all__ = ["OTHERS", "SHORT", "expand", "refuse_others"]

LR = "optimizer.param-groups.{}.optimizer-kwargs.lr"

SHORT = {
    "lr": f"--{LR.format('N')}",
    "steps": "--training.steps",
    "batch": "--training.global_batch_size",
    "seq": "--training.seq_len",
    "data": "--dataloader.dataset_path, or --dataloader.dataset for a Hub id",
}
"""What each short name stands for. N: every parameter group of the recipe."""

OTHERS = {
    "activation_checkpoint.mode": "choose activation_checkpoint in the recipe, as titan_recipes.SaveLinears.Config()",
    "checkpoint.enable_checkpoint": "--checkpoint.enable",
    "experimental.context_parallel_degree": "--parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "--parallelism.pipeline_parallel_degree",
    "job.config_file": "a recipe is a Python function here; see --list",
    "job.dump_folder": "--dump_folder",
    "model.flavor": "--model",
    "model.hf_assets_path": "--hf_assets_path",
    "model.name": "--model",
    "model.tokenizer_path": "--hf_assets_path",
    "optimizer.eps": "--optimizer.param-groups.0.optimizer-kwargs.eps",
    "optimizer.lr": "--lr",
    "optimizer.weight_decay": "--optimizer.param-groups.0.optimizer-kwargs.weight-decay",
    "training.batch_size": "--training.local_batch_size for one rank, --batch for a step of all",
    "training.compile": "--compile.enable",
    "training.data_parallel_degree": "--parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "--parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "--parallelism.data_parallel_shard_degree",
    "training.dataset": "--dataloader.dataset",
    "training.dataset_path": "--data",
    "training.tensor_parallel_degree": "--parallelism.tensor_parallel_degree",
    # Transformers' Trainer and its kin.
    "bf16": "--training.mixed_precision_param bfloat16",
    "dataset_name": "--data",
    "gradient_accumulation_steps": "--batch, the sequences of a step of all ranks",
    "learning_rate": "--lr",
    "max_length": "--seq",
    "max_seq_length": "--seq",
    "max_steps": "--steps",
    "model_name_or_path": "--model",
    "num_train_epochs": "--steps",
    "output_dir": "--dump_folder",
    "per_device_train_batch_size": "--training.local_batch_size",
}
"""Names of earlier TorchTitan releases and of other trainers, and what is called so here."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def name_of(argument: str) -> str:
    """Return an option's name as Python spells it, or nothing for a value."""
    return argument.partition("=")[0][2:].replace("-", "_") if argument.startswith("--") else ""


def refuse_others(arguments: Sequence[str]) -> None:
    """Say what an option of another trainer is called here.

    Raises:
        UserError: one of the arguments is such an option.
    """
    for name in map(name_of, arguments):
        if name in OTHERS:
            raise UserError(f"There is no option --{name} here. Its place: {OTHERS[name]}.")


def expand(arguments: Sequence[str], groups: int) -> list[str]:
    """Return command line arguments with each short name as the options that it stands for.

    Args:
        arguments: as they were typed, after the recipe's name.
        groups: the recipe's parameter groups, each of which has a learning rate.

    Raises:
        UserError: a short name has no value, or is given beside an option that it stands for.
    """
    expanded, rest, short = list[str](), list(arguments), dict[str, str]()
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if name[2:] not in SHORT or not name.startswith("--"):
            expanded.append(argument)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"{name} has no value; it stands for {SHORT[name[2:]]}.")
            value = rest.pop(0)
        for option in _options(name[2:], value, groups):
            short[option] = name
            expanded += [f"--{option}", value]
    names = [name_of(argument) for argument in expanded]
    for option, name in short.items():
        if names.count(option.replace("-", "_")) > 1:
            raise UserError(f"{name} and --{option} are the same: give one, once.")
    return expanded


def _options(name: str, value: str, groups: int) -> list[str]:
    if name == "lr":
        return [LR.format(group) for group in range(groups)]
    if name == "data":
        hub = value == "python-docs" or (
            _HUB_ID.fullmatch(value) and not Path(value).suffix and not Path(value).exists()
        )
        return ["dataloader.dataset" if hub else "dataloader.dataset_path"]
    return [SHORT[name][2:]]
