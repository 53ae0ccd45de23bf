"""Contract: poison that is still there has a name, and a first loss is judged by what a random model would have."""

from dataclasses import replace

import pytest
import torch
from tiny import tiny_spec
from titan_recipes.checkpoint.completeness import check_written, guard_initialisation, poison, states_of
from titan_recipes.errors import UserError
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


@pytest.mark.parametrize("renamed", [False, True])
def test_what_a_recipe_froze_stays_frozen_when_sharding_makes_new_parameters(renamed):
    """TorchTitan's sharding makes a new parameter of each, which trains: all of a LoRA's base did."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4))
    model.init_weights = lambda **options: None
    model[0].requires_grad_(False)

    def shard(model, **kwargs):
        for layer in model:
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
        if renamed:
            model[0].kernel = model[0].weight
            del model[0].weight
        return model

    spec = guard_initialisation(replace(tiny_spec(), parallelize_fn=shard))
    if renamed:
        with pytest.raises(UserError, match=r"1 parameters that the recipe froze have other names .*: 0\.weight"):
            spec.parallelize_fn(model)
        return
    trains = {name for name, parameter in spec.parallelize_fn(model).named_parameters() if parameter.requires_grad}
    assert trains == {"1.weight", "1.bias"}
