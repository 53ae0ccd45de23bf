"""Contract of the trainer's hooks that need no run: validation reads the held-out part, new shapes are named."""

import logging
from dataclasses import dataclass

import pytest
import torch
from titan_recipes.data import TextDataLoader
from titan_recipes.errors import UserError
from titan_recipes.trainer import ShapeWatch, Trainer, adopt, validation_data
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


def test_a_stock_torchtitan_recipe_is_taken_over_with_its_values():
    from titan_recipes.checkpoint import StepCheckpoints
    from titan_recipes.metrics import RunMetrics
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
