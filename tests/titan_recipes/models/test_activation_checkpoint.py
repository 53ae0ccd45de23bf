"""Contract: SaveLinears recomputes no linear and no attention, and leaves results as they are."""

import pytest
import torch
from tiny import tiny_spec
from titan_recipes.models.activation_checkpoint import SaveLinears
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC


class Count(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self):
        super().__init__()
        self.ops = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func.overloadpacket._qualified_op_name] = self.ops.get(func.overloadpacket._qualified_op_name, 0) + 1
        return func(*args, **(kwargs or {}))


def step(policy):
    """Gradients and operator counts of one forward and backward."""
    torch.manual_seed(0)
    model = tiny_spec().model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    if policy is not None:
        policy.build(dump_folder="").apply(model)
    with Count() as count:
        model(torch.arange(32)[None], torch.arange(32)[None]).square().mean().backward()
    return [p.grad for p in model.parameters()], count.ops


@pytest.fixture(scope="module")
def plain():
    return step(None)


def products(ops):
    return sum(n for name, n in ops.items() if name in ("aten::mm", "aten::addmm", "aten::linear"))


def attentions(ops):
    return sum(n for name, n in ops.items() if "scaled_dot_product" in name and "backward" not in name)


def test_no_linear_and_no_attention_is_computed_again_but_the_rest_is(plain):
    gradients, ops = step(SaveLinears.Config())
    assert products(ops) == products(plain[1]) and attentions(ops) == attentions(plain[1]) == 2
    assert ops["aten::silu"] == 2 * plain[1]["aten::silu"]
    for ours, theirs in zip(gradients, plain[0], strict=True):
        assert torch.equal(ours, theirs)


def test_torchtitans_own_policies_recompute_linears(plain):
    """What the policy is for: if this fails, TorchTitan's has changed and ours may go."""
    for policy in (SelectiveAC.Config(), FullAC.Config()):
        assert products(step(policy)[1]) > products(plain[1])
