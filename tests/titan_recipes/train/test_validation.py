"""Contract: a validator reads what was held out, and survives batches without a label."""

import torch
from titan_recipes.data.loader import TextDataLoader
from titan_recipes.train.trainer import Trainer
from titan_recipes.train.validation import validation_data, without_labels_no_loss
from torchtitan.components.validate import Validator


class Bare(Trainer):
    """The trainer's hooks without a run."""

    def __init__(self, **fields):
        self.validated_step = -1
        vars(self).update(fields)


def test_the_validator_reads_the_held_out_part_of_the_training_documents():
    config = Trainer.Config(dataloader=TextDataLoader.Config(dataset_path="x.jsonl", holdout=0.3, seed=5))
    loader = validation_data(config)
    assert (loader.split, loader.dataset_path, loader.holdout, loader.seed) == ("validation", "x.jsonl", 0.3, 5)


def test_a_validator_with_documents_of_its_own_keeps_them():
    own = TextDataLoader.Config(dataset_path="held.jsonl", split="train", holdout=0.0)
    config = Trainer.Config(validator=Validator.Config(enable=True, steps=-1, dataloader=own))
    assert validation_data(config) is own


def test_a_validation_without_any_label_is_a_warning_and_training_goes_on(caplog):
    """TorchTitan divides by the number of labels: a few steps of long prompts have none."""
    model = torch.nn.Linear(1, 1)

    def validate(parts, step):
        model.eval()
        raise ZeroDivisionError("float division by zero")

    validated = []
    without_labels_no_loss(validate, validated.append)([model], 4)
    assert "step 4: the validator's batches had no label" in caplog.text
    assert model.training and validated == [4]
