"""Contract of states.py: a state dict in memory is converted by the same table, and is not changed."""

import pytest
import torch
from hf_ckpt_adapter import Layout, convert_state
from hf_tiny import config, state

LAYOUTS = list(Layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_input_is_not_changed(layout: Layout) -> None:
    before = state(config(moe=True), head=False)
    identities = {name: id(t) for name, t in before.items()}
    convert_state(before, layout, tied=True)
    assert {name: id(t) for name, t in before.items()} == identities


def test_a_tied_head_is_one_tensor_under_both_native_names_and_absent_on_the_hub() -> None:
    native = convert_state(state(config(), head=False), Layout.NATIVE, tied=True).tensors
    assert native["lm_head.weight"] is native["tok_embeddings.weight"]
    assert "lm_head.weight" not in convert_state(native, Layout.PER_EXPERT, tied=True).tensors


@pytest.mark.parametrize("layout", [Layout.NATIVE, Layout.PER_EXPERT])
def test_an_unknown_name_is_refused_in_both_directions_with_the_nearest_known(layout: Layout) -> None:
    there = convert_state(state(config(moe=True)), layout).tensors
    stray = next(n for n in there if "q_norm" in n)
    there[stray.replace("q_norm", "q_norms")] = there.pop(stray)
    with pytest.raises(ValueError, match=r"1 tensors.*q_norms.*nearest known.*q_norm"):
        convert_state(there, Layout.NATIVE if layout is Layout.PER_EXPERT else Layout.PER_EXPERT)


def test_native_only_state_comes_back_beside_the_tensors() -> None:
    native = convert_state(state(config(moe=True)), Layout.NATIVE).tensors
    native["layers.1.moe.expert_bias_E"] = torch.arange(8.0)
    out = convert_state(native, Layout.PER_EXPERT)
    assert list(out.side) == ["layers.1.moe.expert_bias_E"] and not any("bias" in n for n in out.tensors)
