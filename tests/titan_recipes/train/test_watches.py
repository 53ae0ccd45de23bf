"""Contract: a loss that stops being finite and a new batch shape are told."""

import logging
import math

import pytest
import torch
from titan_recipes.errors import UserError
from titan_recipes.train.watches import LossWatch, ShapeWatch


def test_the_step_whose_loss_is_not_finite_is_named():
    watch = LossWatch()
    for step, loss in enumerate([3.0, 2.5, math.nan, math.inf], 1):
        watch.add(step, torch.tensor(loss))
    assert float(watch.first) == 3.0
    with pytest.raises(UserError, match="loss of step 3 is not finite"):
        watch.check()


def test_a_new_batch_shape_is_warned_about_once_with_all_shapes(caplog):
    watch = ShapeWatch()
    with caplog.at_level(logging.WARNING):
        for length in (8, 8, 8, 5, 5, 8):
            watch.see({"input": torch.zeros(2, length), "labels": torch.zeros(2, length)})
    assert len(caplog.records) == 1
    assert "2 distinct" in caplog.text and "(2, 8)" in caplog.text and "(2, 5)" in caplog.text
