"""Contract of read.py: names are found under any root and wrapper, and a hostile shape costs nothing."""

import pytest
import torch
from hf_ckpt_adapter import Layout, convert_state, read_names
from hf_ckpt_adapter.names.read import missing_parts
from hf_tiny import config, equal, fused, state


@pytest.mark.parametrize("layers", [(), (0,), (1,), (0, 1)])
def test_both_expert_layouts_even_mixed_by_layer_give_the_same_model(layers: tuple[int, ...]) -> None:
    before = state(config(moe=True))
    equal(
        convert_state(fused(before, layers), Layout.NATIVE).tensors,
        convert_state(before, Layout.NATIVE).tensors,
    )


@pytest.mark.parametrize(
    "rename",
    [
        lambda n: "_orig_mod." + n,
        lambda n: n.replace("attention.", "attention._checkpoint_wrapped_module."),
        lambda n: n.replace("layers.0.", "layers.0._orig_mod._checkpoint_wrapped_module."),
        lambda n: n.replace("layers.1.", "layers.1._checkpoint_wrapped_module._orig_mod."),
        lambda n: "module._orig_mod." + n,
        lambda n: "model." + n,
    ],
)
def test_wrapper_names_vanish_at_any_depth(rename) -> None:  # type: ignore[no-untyped-def]
    before = state(config())
    native = {rename(n): t for n, t in convert_state(before, Layout.NATIVE).tensors.items()}
    equal(convert_state(native, Layout.PER_EXPERT).tensors, before)


@pytest.mark.parametrize("root", ["", "model.language_model.", "language_model.model.", "base_model.model.model."])
def test_hub_names_are_found_under_any_root(root: str) -> None:
    before = state(config())
    moved = {n.replace("model.", root, 1) if n.startswith("model.") else n: t for n, t in before.items()}
    equal(convert_state(moved, Layout.PER_EXPERT).tensors, before)


def test_two_names_that_become_one_are_an_error_naming_both() -> None:
    native = convert_state(state(config()), Layout.NATIVE).tensors
    native["_orig_mod.norm.weight"] = native["norm.weight"]
    with pytest.raises(ValueError, match=r"'norm.weight' and '_orig_mod.norm.weight'"):
        convert_state(native, Layout.PER_EXPERT)


@pytest.mark.parametrize("suffix", ["lora_A.default.weight", "lora_B.weight", "base_layer.weight"])
def test_adapter_leftovers_are_refused_by_name(suffix: str) -> None:
    stray = f"base_model.model.model.layers.0.self_attn.q_proj.{suffix}"
    with pytest.raises(ValueError, match=r"adapter.*q_proj.*merge"):
        convert_state({**state(config()), stray: torch.zeros(1, 1)}, Layout.NATIVE)


def test_computed_buffers_are_dropped_and_named() -> None:
    old = {**state(config()), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}
    out = convert_state(old, Layout.NATIVE)
    assert out.dropped == ["model.layers.0.self_attn.rotary_emb.inv_freq"]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.99999999.self_attn.q_norm.weight",
        "model.layers.01.self_attn.q_norm.weight",
        f"model.layers.{'9' * 5000}.self_attn.q_norm.weight",
    ],
)
def test_numbers_that_no_model_has_are_unknown_names_and_not_a_long_loop(name: str) -> None:
    with pytest.raises(ValueError, match="1 tensors that a Qwen3"):
        convert_state({**state(config()), name: torch.zeros(32)}, Layout.NATIVE)


def test_shapes_that_stand_for_more_experts_than_any_model_has_are_refused_early() -> None:
    layers = range(60)
    routers = {f"model.layers.{n}.mlp.gate.weight": (100_000, 1) for n in layers}
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.gate.weight.* 100000 experts"):
        read_names({**routers, "model.layers.0.input_layernorm.weight": (1,)})
    stacks = {f"model.layers.{n}.mlp.experts.gate_up_proj": (9_999, 2, 1) for n in layers}
    with pytest.raises(ValueError, match=r"more than 1000000 experts"):
        read_names(stacks)
    routers = {f"model.layers.{n}.mlp.gate.weight": (9_999, 1) for n in range(101)}
    with pytest.raises(ValueError, match=r"101 layers with routers of 9999 rows"):
        missing_parts(read_names({**routers, "model.layers.0.input_layernorm.weight": (1,)}), layers=101, experts=9_999)


@pytest.mark.parametrize("shape", [(1 << 40, 0, 64), (100_000, 2, 1)])
def test_a_shape_cannot_make_us_list_experts_without_end(shape: tuple[int, int, int]) -> None:
    shapes = {"model.layers.0.mlp.experts.down_proj": shape, "model.layers.0.input_layernorm.weight": (64,)}
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.experts.down_proj"):
        read_names(shapes)
