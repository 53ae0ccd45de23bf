"""Contract: poison that is still there has a name, and a first loss is judged by what a random model would have."""

import pytest
import torch
from titan_recipes.checkpoint.completeness import check_written, poison, states_of
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
