"""Contract of mapping.py and states.py: one table, read in both directions, loses nothing and changes no
input."""

import pytest
import torch
from hf_ckpt_adapter import Layout, convert_state, read_names
from hf_ckpt_adapter.names.read import missing_parts
from hf_tiny import config, equal, fused, state

LAYOUTS = list(Layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("moe", [False, True])
def test_every_layout_and_back_gives_the_same_bits(layout: Layout, moe: bool) -> None:
    before = state(config(moe))
    there = convert_state(before, layout).tensors
    equal(convert_state(there, Layout.PER_EXPERT).tensors, before)


def test_native_names_are_those_of_torchtitan() -> None:
    names = set(convert_state(state(config(moe=True, num_hidden_layers=1)), Layout.NATIVE).tensors)
    attention = {f"layers.0.attention.{n}.weight" for n in ("wo", "q_norm", "k_norm")}
    attention |= {f"layers.0.attention.qkv_linear.{n}.weight" for n in ("wq", "wk", "wv")}
    experts = {f"layers.0.moe.routed_experts.inner_experts.{n}" for n in ("w1_EFD", "w2_EDF", "w3_EFD")}
    rest = {"tok_embeddings.weight", "norm.weight", "lm_head.weight", "layers.0.moe.router.gate.weight"}
    assert names == attention | experts | rest | {
        "layers.0.attention_norm.weight",
        "layers.0.ffn_norm.weight",
    }


def test_backend_names_hold_the_hub_model_and_titan_experts() -> None:
    names = set(convert_state(state(config(moe=True, num_hidden_layers=1)), Layout.BACKEND).tensors)
    assert {"model.model.embed_tokens.weight", "model.model.norm.weight", "model.lm_head.weight"} < names
    assert "model.model.layers.0.mlp.router.gate.weight" in names
    assert "model.model.layers.0.mlp.routed_experts.inner_experts.w1_EFD" in names


def test_experts_stack_in_order_and_gate_comes_before_up() -> None:
    before = state(config(moe=True))
    native = convert_state(before, Layout.NATIVE).tensors
    both = convert_state(before, Layout.FUSED).tensors
    head = "model.layers.1.mlp.experts."
    for e in range(8):
        gate, up, down = (before[f"{head}{e}.{p}.weight"] for p in ("gate_proj", "up_proj", "down_proj"))
        assert torch.equal(native["layers.1.moe.routed_experts.inner_experts.w1_EFD"][e], gate)
        assert torch.equal(native["layers.1.moe.routed_experts.inner_experts.w3_EFD"][e], up)
        assert torch.equal(native["layers.1.moe.routed_experts.inner_experts.w2_EDF"][e], down)
        assert torch.equal(both[head + "gate_up_proj"][e], torch.cat([gate, up]))
        assert torch.equal(both[head + "down_proj"][e], down)


def test_fused_qkv_interleaves_by_kv_head() -> None:
    before = state(config())
    fused_qkv = convert_state(before, Layout.NATIVE_WQKV).tensors["layers.0.attention.qkv_linear.wqkv.weight"]
    q, k, v = (before[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv")
    # 4 query heads over 2 kv heads of 32: two q heads, k, v; twice.
    assert torch.equal(fused_qkv, torch.cat([q[:64], k[:32], v[:32], q[64:], k[32:], v[32:]]))


def test_query_rows_are_not_permuted() -> None:
    before = state(config())
    after = convert_state(before, Layout.NATIVE).tensors["layers.0.attention.qkv_linear.wq.weight"]
    assert after is before["model.layers.0.self_attn.q_proj.weight"]


def test_square_experts_are_told_apart_by_value() -> None:
    before = state(config(moe=True, moe_intermediate_size=64))
    there = convert_state(fused(before), Layout.NATIVE).tensors
    equal(convert_state(there, Layout.PER_EXPERT).tensors, before)
    gate = before["model.layers.0.mlp.experts.3.gate_proj.weight"]
    assert torch.equal(there["layers.0.moe.routed_experts.inner_experts.w1_EFD"][3], gate)


@pytest.mark.parametrize("layers", [(), (0,), (1,), (0, 1)])
def test_both_expert_layouts_even_mixed_by_layer_give_the_same_model(layers: tuple[int, ...]) -> None:
    before = state(config(moe=True))
    equal(
        convert_state(fused(before, layers), Layout.NATIVE).tensors,
        convert_state(before, Layout.NATIVE).tensors,
    )


@pytest.mark.parametrize(("layers", "experts"), [(4, 2), (2, 7)])
def test_layer_and_expert_numbers_are_not_confused(layers: int, experts: int) -> None:
    before = state(config(moe=True, num_hidden_layers=layers, num_experts=experts))
    equal(convert_state(convert_state(before, Layout.NATIVE).tensors, Layout.PER_EXPERT).tensors, before)


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


def test_a_missing_expert_is_named() -> None:
    before = state(config(moe=True))
    del before["model.layers.1.mlp.experts.3.up_proj.weight"]
    with pytest.raises(ValueError, match=r"layer 1 lacks experts: 'model.layers.1.mlp.experts.3.up_proj.weight'"):
        convert_state(before, Layout.NATIVE)


def test_native_only_state_comes_back_beside_the_tensors() -> None:
    native = convert_state(state(config(moe=True)), Layout.NATIVE).tensors
    native["layers.1.moe.expert_bias_E"] = torch.arange(8.0)
    out = convert_state(native, Layout.PER_EXPERT)
    assert list(out.side) == ["layers.1.moe.expert_bias_E"] and not any("bias" in n for n in out.tensors)


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
