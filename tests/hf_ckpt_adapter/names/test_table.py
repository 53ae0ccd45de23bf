"""Contract of table.py: the names of each layout, and what is folded in each tensor."""

from hf_ckpt_adapter import Layout, convert_state
from hf_tiny import config, state


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
