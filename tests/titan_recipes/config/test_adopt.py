"""Contract: a stock recipe is taken over with its values; another trainer's is refused."""

from dataclasses import dataclass

import pytest
from titan_recipes.config.adopt import adopt
from titan_recipes.errors import UserError
from titan_recipes.train.trainer import Trainer
from torchtitan import trainer as titan


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
