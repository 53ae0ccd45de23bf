"""Contract of the trainer's hooks that need no run: validation reads the held-out part, new shapes are named."""

import logging
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_spec
from titan_recipes.data.loader import TextDataLoader
from titan_recipes.errors import UserError
from titan_recipes.models.spec import native
from titan_recipes.train.trainer import ShapeWatch, Trainer, adopt, validation_data
from torchtitan import trainer as titan
from torchtitan.components.validate import Validator


def test_the_validator_reads_the_held_out_part_of_the_training_documents():
    config = Trainer.Config(dataloader=TextDataLoader.Config(dataset_path="x.jsonl", holdout=0.3, seed=5))
    loader = validation_data(config)
    assert (loader.split, loader.dataset_path, loader.holdout, loader.seed) == ("validation", "x.jsonl", 0.3, 5)


def test_a_validator_with_documents_of_its_own_keeps_them():
    own = TextDataLoader.Config(dataset_path="held.jsonl", split="train", holdout=0.0)
    config = Trainer.Config(validator=Validator.Config(enable=True, steps=-1, dataloader=own))
    assert validation_data(config) is own


class Bare(Trainer):
    """The trainer's hooks without a run."""

    def __init__(self, **fields):
        self.validated_step = -1
        vars(self).update(fields)


def test_the_start_says_what_trains_and_a_recipe_that_expects_otherwise_stops(caplog):
    """Case 120: a setting that froze nothing trains everything, and nobody notices."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4))
    model[0].requires_grad_(False)
    config = Trainer.Config(model_spec=tiny_spec(), expected_trainable=16)
    trainer = Bare(config=config, model_parts=[model], parallel_dims=SimpleNamespace(pp_enabled=False))
    with caplog.at_level(logging.INFO):
        trainer._report_parameters()
    assert "25 parameters, 16 trainable" in caplog.text
    model[0].requires_grad_(True)
    with pytest.raises(UserError, match="expects 16 trainable parameters; 25 of 25 would train"):
        trainer._report_parameters()


def test_tied_weights_that_became_two_parameters_are_refused():
    class Ends(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tok_embeddings, self.lm_head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)

    apart, tied = Ends(), Ends()
    tied.lm_head.weight = tied.tok_embeddings.weight
    config = native(replace(tiny_spec().model.qwen3, tie_word_embeddings=True)).model
    Bare(model_config=config, model_parts=[tied])._check_ties()
    with pytest.raises(UserError, match="two parameters that would train apart"):
        Bare(model_config=config, model_parts=[apart])._check_ties()
    Bare(model_config=tiny_spec().model, model_parts=[apart])._check_ties()  # an untied model has two


def test_a_validation_without_any_label_is_a_warning_and_training_goes_on(caplog):
    """TorchTitan divides by the number of labels: a few steps of long prompts have none."""
    model = torch.nn.Linear(1, 1)

    def validate(parts, step):
        model.eval()
        raise ZeroDivisionError("float division by zero")

    trainer = Bare()
    trainer._remembering(validate)([model], 4)
    assert "step 4: the validator's batches had no label" in caplog.text
    assert model.training and trainer.validated_step == 4


def test_a_stock_torchtitan_recipe_is_taken_over_with_its_values():
    from titan_recipes.checkpoint.manager import StepCheckpoints
    from titan_recipes.train.metrics import RunMetrics
    from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

    stock = qwen3_debugmodel()
    ours = adopt(stock)
    assert type(ours) is Trainer.Config
    assert type(ours.metrics) is RunMetrics.Config and ours.metrics.log_freq == stock.metrics.log_freq == 1
    assert type(ours.checkpoint) is StepCheckpoints.Config and ours.checkpoint.interval == 10
    assert ours.model_spec is stock.model_spec and ours.dataloader is stock.dataloader


def test_another_trainers_config_is_refused():
    class Other(titan.Trainer):
        @dataclass(kw_only=True, slots=True)
        class Config(titan.Trainer.Config):
            pass

    with pytest.raises(UserError, match=r"Other\.Config"):
        adopt(Other.Config())


def test_a_new_batch_shape_is_warned_about_once_with_all_shapes(caplog):
    watch = ShapeWatch()
    with caplog.at_level(logging.WARNING):
        for length in (8, 8, 8, 5, 5, 8):
            watch.see({"input": torch.zeros(2, length), "labels": torch.zeros(2, length)})
    assert len(caplog.records) == 1
    assert "2 distinct" in caplog.text and "(2, 8)" in caplog.text and "(2, 5)" in caplog.text
