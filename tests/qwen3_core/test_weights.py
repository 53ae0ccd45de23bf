"""The contract: `load_file` + `from_hub` + `load_state_dict(strict=True)` loads what the Hub holds, `to_hub`
gives it back bit for bit, rows stay in their order, and nothing is dropped, invented or changed in silence.
"""

from pathlib import Path

import pytest
import torch
from qwen3_core import Qwen3Config, Qwen3ForCausalLM, from_hub, to_hub
from qwen3_reference import assert_close, hf_model, pair, tiny, tiny_moe, transformers
from torch import Tensor

safetensors = pytest.importorskip("safetensors.torch")

TOKENS = torch.arange(64)[None] % 320


def hub_tensors(config: Qwen3Config) -> dict[str, Tensor]:
    return to_hub(pair(config)[0].state_dict())


def load(tensors: dict[str, Tensor], config: Qwen3Config) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    model.load_state_dict(from_hub(tensors, config), strict=True)
    assert not any(p.isnan().any() for p in model.parameters())
    return model


@pytest.mark.parametrize(
    "config",
    [tiny(), tiny(tie_word_embeddings=True), tiny_moe(), tiny_moe(num_hidden_layers=4, num_experts=2)],
)
def test_what_transformers_saves_is_loaded_and_what_we_save_is_loaded_by_it(
    config: Qwen3Config, tmp_path: Path
) -> None:
    theirs = hf_model(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(safetensors.load_file(tmp_path / "theirs" / "model.safetensors"), config)
    assert_close("logits", ours(TOKENS), theirs(input_ids=TOKENS).logits)

    ours, _ = pair(config)
    hub = {name: t.contiguous() for name, t in to_hub(ours.state_dict()).items()}
    safetensors.save_file(hub, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", attn_implementation="eager")
    assert_close("logits", ours(TOKENS), again(input_ids=TOKENS).logits)


@pytest.mark.parametrize("config", [tiny(), tiny_moe(mlp_only_layers=(1,))], ids=["dense", "moe"])
def test_a_round_trip_is_bit_exact_and_leaves_its_input_alone(config: Qwen3Config) -> None:
    hub = hub_tensors(config)
    names, ids = list(hub), [id(t) for t in hub.values()]
    back = to_hub(from_hub(hub, config))
    assert (list(hub), [id(t) for t in hub.values()]) == (names, ids)
    assert set(back) == set(hub)
    assert all(torch.equal(back[name], hub[name]) for name in hub)


def test_expert_e_of_the_file_is_index_e_of_the_stack_and_not_transposed() -> None:
    config = tiny_moe(hidden_size=48, num_attention_heads=2)  # hidden == expert size: only values reveal a transpose
    hub = hub_tensors(config)
    stacked = from_hub(hub, config)
    for e in range(8):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            one = hub[f"model.layers.1.mlp.experts.{e}.{projection}.weight"]
            assert torch.equal(stacked[f"model.layers.1.mlp.experts.{projection}"][e], one)


def test_rows_of_q_and_k_are_not_permuted() -> None:
    hub = hub_tensors(tiny())
    name = "model.layers.0.self_attn.q_proj.weight"
    hub[name] = torch.arange(128.0)[:, None].expand(128, 64).clone()
    assert torch.equal(load(hub, tiny()).state_dict()[name][:, 0], torch.arange(128.0))


def test_three_tied_checkpoints_load_to_the_same_logits_and_are_written_alike() -> None:
    config = tiny(tie_word_embeddings=True)
    without_head = hub_tensors(config)
    embedding = without_head["model.embed_tokens.weight"]
    first = {"lm_head.weight": embedding.clone(), **without_head}
    last = {**without_head, "lm_head.weight": embedding.clone()}
    models = [load(tensors, config) for tensors in (without_head, first, last)]
    for model in models[1:]:
        assert torch.equal(model(TOKENS), models[0](TOKENS))
    for model in models:
        assert set(to_hub(model.state_dict())) == set(without_head)


def test_a_tied_config_with_a_head_of_its_own_is_refused_by_both_names_and_the_difference() -> None:
    config = tiny(tie_word_embeddings=True)
    hub = hub_tensors(config)
    hub["lm_head.weight"] = hub["model.embed_tokens.weight"] + 0.5
    with pytest.raises(ValueError, match=r"lm_head\.weight.*model\.embed_tokens\.weight.*0\.5"):
        from_hub(hub, config)
    hub["lm_head.weight"] = hub["lm_head.weight"][:100]
    with pytest.raises(ValueError, match="shapes differ"):
        from_hub(hub, config)


@pytest.mark.parametrize("experts", [4, 16])
def test_a_number_of_experts_that_is_not_the_configs_is_refused_by_layer(experts: int) -> None:
    hub = hub_tensors(tiny_moe())
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp\.experts.*num_experts.*is {experts}"):
        from_hub(hub, tiny_moe(num_experts=experts))


def test_an_expert_that_is_missing_is_named() -> None:
    hub = hub_tensors(tiny_moe())
    del hub["model.layers.1.mlp.experts.5.up_proj.weight"]
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts\.up_proj.*Missing: \[5\]"):
        from_hub(hub, tiny_moe())


def test_a_missing_norm_is_an_error_and_not_ones() -> None:
    hub = hub_tensors(tiny())
    del hub["model.layers.1.self_attn.q_norm.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*model\.layers\.1\.self_attn\.q_norm\.weight"):
        load(hub, tiny())


@pytest.mark.parametrize("name", ["model.layers.0.mlp.expert_bias", "model.layers.0.mlp.experts.gate_up_proj_x"])
def test_what_the_model_does_not_have_is_an_error(name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"Unexpected key.*{name}"):
        load({**hub_tensors(tiny_moe()), name: torch.zeros(8)}, tiny_moe())
