"""Contract: what a pipeline stage sends, forward and back, is contiguous, and its values are those that
were computed.
"""

import torch
from titan_recipes.models.pipeline_stages import sendable, sends_its_gradient


def test_output_and_gradient_of_a_transposed_stage_are_contiguous_and_right():
    x = torch.randn(3, 4, 5, requires_grad=True)
    weight = torch.randn(3, 5, 4)
    out = sendable(sends_its_gradient(x).transpose(1, 2))
    assert out.is_contiguous() and torch.equal(out, x.transpose(1, 2))
    (gradient,) = torch.autograd.grad((out * weight).sum(), x)
    assert gradient.is_contiguous() and torch.equal(gradient, weight.transpose(1, 2))


def test_token_ids_and_contiguous_outputs_pass_as_they_are():
    ids, out = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3)
    assert sends_its_gradient(ids) is ids and sendable(out) is out
