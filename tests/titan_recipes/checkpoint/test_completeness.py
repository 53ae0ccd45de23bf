"""Contract: poison that is still there has a name, and a first loss is judged by what a random model would have."""

import logging
import math

import pytest
import torch
from qwen3_core.loss import expected_random_loss
from titan_recipes.checkpoint.completeness import check_written, poison, states_of
from titan_recipes.errors import UserError
from titan_recipes.launch.compare_modes import Step, table
from titan_recipes.launch.rank import explain_late_error
from titan_recipes.train.first_loss import random_loss, report_first_loss
from titan_recipes.train.trainer import LossWatch
from torch import nn


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.linear.weight
        self.register_buffer("rope", torch.ones(3), persistent=False)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(2, dtype=torch.bool))


def test_every_parameter_and_buffer_that_was_not_written_is_named_once():
    model = Small()
    poison(states_of([model]))
    with pytest.raises(
        UserError, match=r"5 parameters or buffers hold no value after it: linear\.weight, linear\.bias"
    ) as e:
        check_written(states_of([model]), "it")
    assert "rope" in str(e.value) and "count" in str(e.value)


def test_one_unwritten_element_is_enough():
    model = Small()
    poison(states_of([model]))
    with torch.no_grad():
        for _, tensor in states_of([model]):
            tensor.zero_()
    check_written(states_of([model]), "it")
    poison([("rope", model.rope[2:])])
    with pytest.raises(UserError, match=r"1 parameters or buffers .*: rope"):
        check_written(states_of([model]), "it")


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


def test_the_step_whose_loss_is_not_finite_is_named():
    watch = LossWatch()
    for step, loss in enumerate([3.0, 2.5, math.nan, math.inf], 1):
        watch.add(step, torch.tensor(loss))
    assert float(watch.first) == 3.0
    with pytest.raises(UserError, match="loss of step 3 is not finite"):
        watch.check()


def test_modes_that_part_are_told_with_the_step():
    eager = [Step(1, 7.0, 1.0), Step(2, 6.5, 0.2), Step(3, 6.0, 0.2)]
    compiled = [Step(1, 7.0, 9.0), Step(2, 6.5, 0.1), Step(3, 6.1, 0.1)]
    lines = table(eager, compiled, 1e-2)
    assert lines[-1].startswith("they part at step 3")
    assert "(2.00x)" in lines[-2]
    assert table(eager, eager, 1e-2)[-1].startswith("together")
    assert table(eager, [*compiled[:2], Step(3, math.nan, 0.1)], 1e-2)[-1].startswith("they part at step 3")


def test_a_late_device_error_is_explained_with_the_variable_that_makes_it_early(monkeypatch):
    monkeypatch.delenv("NEURON_LAUNCH_BLOCKING", raising=False)
    assert "NEURON_LAUNCH_BLOCKING=1" in explain_late_error(RuntimeError("out of memory"), "neuron")
    assert explain_late_error(RuntimeError("out of memory"), "cpu") == ""
    assert explain_late_error(KeyError("x"), "neuron") == ""
    monkeypatch.setenv("NEURON_LAUNCH_BLOCKING", "1")
    assert explain_late_error(RuntimeError("out of memory"), "neuron") == ""
