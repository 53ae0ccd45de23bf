"""Contract of write.py: every layout and back gives the same bits, and a missing expert is named."""

import pytest
from hf_ckpt_adapter import Layout, convert_state
from hf_tiny import config, equal, state

LAYOUTS = list(Layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("moe", [False, True])
def test_every_layout_and_back_gives_the_same_bits(layout: Layout, moe: bool) -> None:
    before = state(config(moe))
    there = convert_state(before, layout).tensors
    equal(convert_state(there, Layout.PER_EXPERT).tensors, before)


@pytest.mark.parametrize(("layers", "experts"), [(4, 2), (2, 7)])
def test_layer_and_expert_numbers_are_not_confused(layers: int, experts: int) -> None:
    before = state(config(moe=True, num_hidden_layers=layers, num_experts=experts))
    equal(convert_state(convert_state(before, Layout.NATIVE).tensors, Layout.PER_EXPERT).tensors, before)


def test_a_missing_expert_is_named() -> None:
    before = state(config(moe=True))
    del before["model.layers.1.mlp.experts.3.up_proj.weight"]
    with pytest.raises(ValueError, match=r"layer 1 lacks experts: 'model.layers.1.mlp.experts.3.up_proj.weight'"):
        convert_state(before, Layout.NATIVE)
