"""What a validator reads, and how it survives batches without a label."""

import logging
from collections.abc import Callable
from dataclasses import replace

from torch import nn
from torchtitan import trainer as titan
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.validate import Validator

from ..data.loader import TextDataLoader
from ..errors import UserError

__all__ = ["HELD_OUT", "validation_data", "without_labels_no_loss"]

log = logging.getLogger(__name__)

HELD_OUT = TextDataLoader.Config(holdout=0.0)
"""The validator's loader when nobody named data for it. One that does name data reads all of it."""

Validate = Callable[[list[nn.Module], int], None]


def validation_data(config: titan.Trainer.Config) -> BaseDataLoader.Config:
    """Return the held-out part of the training documents, or what the recipe gave the validator.

    Raises:
        UserError: the validator's loader has settings but names no data.
    """
    own, train = config.validator.dataloader, config.dataloader
    if not isinstance(train, TextDataLoader.Config):
        return own
    if isinstance(own, TextDataLoader.Config) and own.names_data():
        return own
    if isinstance(own, TextDataLoader.Config):
        asked = replace(own, sources=())  # of which parsing makes a list
        if own.split == "train" and asked not in (TextDataLoader.Config(), HELD_OUT):
            raise UserError(
                "The validator's dataloader has settings but names no data, so the held-out part of the training data "
                "would be read without them.\nName its data (--validator.dataloader.dataset_path), or set the training "
                "dataloader's."
            )
    elif own != Validator.Config().dataloader:
        return own
    return replace(train, split="validation", infinite=False)


def without_labels_no_loss(validate: Validate, done: Callable[[int], None]) -> Validate:
    """Return `validate` that calls `done(step)` after it, and warns where its batches had no label.

    TorchTitan divides by the number of labels, and a few steps of prompts have none.
    """

    def run(model_parts: list[nn.Module], step: int) -> None:
        try:
            validate(model_parts, step)
        except ZeroDivisionError:
            log.warning("step %d: the validator's batches had no label, so there is no validation loss", step)
            for part in model_parts:
                part.train()
        done(step)

    return run
