"""A recipe's config as one of our trainer, whoever's config it was."""

from dataclasses import fields, replace
from typing import Any, TypeVar

from torchtitan import trainer as titan
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.components.validate import Validator

from ..checkpoint.manager import StepCheckpoints
from ..data.loader import TextDataLoader
from ..data.tokenizer import TrainingTokenizer
from ..errors import UserError
from ..train.metrics import RunMetrics
from ..train.trainer import Trainer
from ..train.validation import HELD_OUT

__all__ = ["adopt", "recast"]

C = TypeVar("C")


def recast(cls: type[C], config: Any) -> C:
    """Return a dataclass of `cls` with the values of `config`, which is of one of its parents or children.

    Fields that only one of the two classes has keep their defaults.
    """
    ours = {f.name for f in fields(cls) if f.init}  # type: ignore[arg-type]
    return cls(**{f.name: getattr(config, f.name) for f in fields(config) if f.name in ours})


def adopt(config: titan.Trainer.Config) -> Trainer.Config:
    """Return a recipe's config as one of this trainer. TorchTitan's stock Trainer.Config is taken over, field by field.

    Raises:
        UserError: the config is another trainer's, whose hooks would be lost.
    """
    if type(config) is titan.Trainer.Config:
        config = recast(Trainer.Config, config)
    if not isinstance(config, Trainer.Config):
        raise UserError(
            f"The recipe's config belongs to {type(config).__qualname__}; apps/train runs titan_recipes.Trainer. "
            "Derive the trainer from it, or run that recipe with TorchTitan's own entry point."
        )
    if type(config.metrics) is MetricsProcessor.Config:
        config.metrics = recast(RunMetrics.Config, config.metrics)
    if type(config.tokenizer) is HuggingFaceTokenizer.Config:
        config.tokenizer = recast(TrainingTokenizer.Config, config.tokenizer)
    if type(config.checkpoint) is CheckpointManager.Config:
        config.checkpoint = recast(StepCheckpoints.Config, config.checkpoint)
    own = config.validator.dataloader
    if isinstance(config.dataloader, TextDataLoader.Config) and own == Validator.Config().dataloader:
        config.validator.dataloader = replace(HELD_OUT)  # so that --validator.dataloader options are this loader's
    return config
