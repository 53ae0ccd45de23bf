"""Contract: the first loss is held against that of a random model."""

import logging

import pytest
import torch
from qwen3_core.loss import expected_random_loss
from titan_recipes.train.first_loss import random_loss, report_first_loss
from torch import nn


def small_head() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Module()
    model.lm_head, model.norm = nn.Linear(64, 512, bias=False), nn.LayerNorm(64)
    with torch.no_grad():
        model.lm_head.weight.normal_(0.0, 0.05, generator=generator)
    return model


def test_the_expectation_is_qwen3_cores_formula_on_the_measured_head_and_norm():
    model = small_head()
    assert random_loss([model], 512, 100) == pytest.approx(
        expected_random_loss(512, 8.0, model.lm_head.weight.std(correction=0).item(), 100), rel=1e-5
    )


def test_a_stage_without_a_head_expects_nothing():
    assert random_loss([nn.Linear(2, 2)], 512, 100) is None


@pytest.mark.parametrize(("loss", "loaded", "warns"), [(6.3, True, True), (4.0, True, False), (6.3, False, False)])
def test_loaded_weights_that_behave_like_none_are_warned_about(caplog, loss, loaded, warns):
    with caplog.at_level(logging.WARNING):
        report_first_loss(loss, expected_random_loss(512, 8.0, 0.02, 100), 512, loaded)
    assert ("knows nothing" in caplog.text) is warns


def test_a_first_step_without_labels_is_not_compared_with_anything(caplog):
    with caplog.at_level(logging.INFO):
        report_first_loss(0.0, expected_random_loss(512, 8.0, 0.02, 100), 512, True)
    assert "the first step had no label" in caplog.text and "a random model" not in caplog.text
