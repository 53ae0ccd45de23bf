"""Contract of the trainer's hooks that need no run: validation reads the held-out part, new shapes are named."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_spec
from titan_recipes.errors import UserError
from titan_recipes.models.spec import native
from titan_recipes.train.trainer import Trainer


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
