"""The contract: config.json in any form that is about is read to the same Qwen3Config, or refused with a
message that names field, value and rule. Nothing is guessed that would change the model.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from qwen3_core import MODELS, Qwen3Config, Yarn

# As Qwen/Qwen3-30B-A3B publishes it, smaller.
MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 320,
}
EXPERT_FIELDS = {
    "decoder_sparse_step",
    "mlp_only_layers",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "output_router_logits",
    "router_aux_loss_coef",
}
DENSE = {k: v for k, v in MOE.items() if k not in EXPERT_FIELDS} | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
}
YARN_BLOCK = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def without(fields: dict[str, Any], *names: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in fields.items() if k not in names} | changes


def test_config_and_table_and_accounting_need_no_torch() -> None:
    code = (
        "import sys; from qwen3_core import MODELS; import qwen3_core.accounting, qwen3_core.loss;"
        "MODELS['4B'].to_hf(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("style", ["transformers-4", "transformers-5"])
@pytest.mark.parametrize("name", MODELS)
def test_every_row_of_the_table_survives_a_round_trip(name: str, style: Any) -> None:
    written = json.loads(json.dumps(MODELS[name].to_hf(style)))
    assert Qwen3Config.from_hf(written) == MODELS[name]


@pytest.mark.parametrize("fields", [DENSE, MOE], ids=["dense", "moe"])
def test_a_published_file_comes_back_as_it_was(fields: dict[str, Any]) -> None:
    assert Qwen3Config.from_hf(fields).to_hf() == fields


def test_it_is_read_from_a_file_and_from_the_folder_it_lies_in(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    expected = Qwen3Config.from_hf(DENSE)
    assert Qwen3Config.from_hf(tmp_path) == Qwen3Config.from_hf(str(tmp_path / "config.json")) == expected


def test_reading_does_not_change_what_was_passed() -> None:
    given = without(MOE, "rope_theta", rope_parameters={"rope_theta": 1e6, **YARN_BLOCK})
    before = json.dumps(given)
    Qwen3Config.from_hf(given)
    assert json.dumps(given) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e6},
        {"rope_theta": 5_000_000},
        {"rope_theta": 5e6, "rope_scaling": {"type": "default"}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5e6}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
        {"rope_parameters": {"rope_theta": 5e6}},
        {"rope_theta": 5e6, "rope_parameters": {"rope_type": "default", "rope_theta": 5000000}},
        {"rope_theta": 5e6, "partial_rotary_factor": 1.0, "rope_parameters": {}},
    ],
)
def test_plain_rope_is_read_from_every_place_it_is_written_in(changes: dict[str, Any]) -> None:
    config = Qwen3Config.from_hf(without(DENSE, "rope_theta", "rope_scaling", **changes))
    assert (config.rope_theta, config.rope_scaling) == (5e6, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1e6, "rope_scaling": YARN_BLOCK},
        {"rope_theta": 1e6, "rope_scaling": without(YARN_BLOCK, "rope_type", type="yarn")},
        {"rope_theta": 1e6, "rope_scaling": {**YARN_BLOCK, "type": "yarn", "attention_factor": None}},
        {"rope_parameters": {**YARN_BLOCK, "rope_theta": 1e6}},
        {"rope_parameters": {**without(YARN_BLOCK, "rope_type"), "type": "yarn", "rope_theta": 1e6}},
    ],
)
def test_yarn_is_read_in_both_spellings(changes: dict[str, Any]) -> None:
    config = Qwen3Config.from_hf(without(DENSE, "rope_theta", "rope_scaling", **changes))
    assert config.rope_scaling == Yarn(factor=4.0, original_max_position_embeddings=32)
    assert config.rope_theta == 1e6


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "longrope", "mrope", "yarn2"])
def test_any_other_rope_type_is_refused(place: str, kind: str) -> None:
    block = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e6}
    with pytest.raises(ValueError, match=rf"{place}.*{kind}.*default.*yarn"):
        Qwen3Config.from_hf(without(DENSE, "rope_scaling", **{place: block}))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no theta at all": (without(DENSE, "rope_theta"), "rope_theta is missing"),
    "a null theta": (without(DENSE, rope_theta=None), "rope_theta is missing"),
    "two thetas": (
        without(DENSE, rope_parameters={"rope_theta": 1e4}),
        "rope theta .*1000000.0.*10000.0.* same",
    ),
    "a negative theta": (without(DENSE, rope_theta=-1.0), "rope_theta = -1.0"),
    "a list as theta": (without(DENSE, rope_theta=[1e6]), r"rope_theta = \[1000000.0\]"),
    "scaling without a type": (
        without(DENSE, rope_scaling={"factor": 4.0}),
        "rope_scaling has rope type None",
    ),
    "two rope types": (without(DENSE, rope_scaling={**YARN_BLOCK, "type": "linear"}), "rope_type and type"),
    "two scalings": (
        without(DENSE, rope_scaling=YARN_BLOCK, rope_parameters={"rope_type": "default"}),
        "rope scaling .* same",
    ),
    "scaling of parts of the head": (
        without(DENSE, partial_rotary_factor=0.5),
        "partial_rotary_factor = 0.5",
    ),
    "the same, nested": (
        without(DENSE, rope_scaling={"type": "default", "partial_rotary_factor": 0.5}),
        "partial",
    ),
    "an unknown rope field": (
        without(DENSE, rope_scaling={"type": "default", "mrope_section": [24, 20, 20]}),
        "mrope_section",
    ),
    "rope by layer type": (
        without(DENSE, rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e6}}),
        "rope_parameters",
    ),
    "YaRN without its length": (
        without(DENSE, rope_scaling=without(YARN_BLOCK, "original_max_position_embeddings")),
        "original_max_position_embeddings",
    ),
    "YaRN that shrinks": (without(DENSE, rope_scaling={**YARN_BLOCK, "factor": 0.5}), "factor of YaRN = 0.5"),
    "no head_dim": (without(DENSE, "head_dim"), "head_dim.*not hidden_size / num_attention_heads"),
    "an odd head_dim": (without(DENSE, head_dim=31), "head_dim = 31.*even"),
    "several missing": (without(DENSE, "vocab_size", "hidden_size"), "lacks vocab_size, hidden_size"),
    "heads that do not divide": (
        without(DENSE, num_key_value_heads=3),
        r"num_key_value_heads = 3.*divides.*\(4\)",
    ),
    "a size as text": (without(DENSE, hidden_size="64"), "hidden_size = '64'"),
    "a size of zero": (without(DENSE, num_hidden_layers=0), "num_hidden_layers = 0"),
    "a size of true": (without(DENSE, num_hidden_layers=True), "num_hidden_layers = True"),
    "a tie flag as text": (without(DENSE, tie_word_embeddings="false"), "tie_word_embeddings = 'false'"),
    "another architecture": (without(DENSE, model_type="qwen2"), "model_type = 'qwen2'"),
    "no architecture": (without(DENSE, "model_type"), "model_type = None"),
    "another activation": (without(DENSE, hidden_act="gelu"), "hidden_act = 'gelu'"),
    "biases": (without(DENSE, attention_bias=True), "attention_bias = True"),
    "dropout": (without(DENSE, attention_dropout=0.1), "attention_dropout = 0.1"),
    "a sliding window": (without(DENSE, use_sliding_window=True), "use_sliding_window = True"),
    "sliding layers": (
        without(DENSE, layer_types=["full_attention", "sliding_attention"]),
        "sliding_attention",
    ),
    "a length of YaRN outside its block": (
        without(DENSE, original_max_position_embeddings=64),
        "original_max_position_embeddings = 64",
    ),
    "a dtype that is none": (without(DENSE, torch_dtype=16), "dtype = 16"),
    "two dtypes": (without(DENSE, dtype="float32"), "dtype and torch_dtype"),
    "experts in a dense model": (without(DENSE, num_experts=8), "num_experts = 8"),
    "experts without experts": (without(MOE, num_experts=0), "num_experts = 0"),
    "experts, number missing": (without(MOE, "num_experts"), "num_experts = 0"),
    "experts, two numbers": (without(MOE, num_local_experts=4), "num_experts and num_local_experts"),
    "experts, size missing": (without(MOE, "moe_intermediate_size"), "lacks moe_intermediate_size"),
    "more used than there are": (without(MOE, num_experts_per_tok=9), r"num_experts_per_tok = 9.*<= .*\(8\)"),
    "a layer that is not there": (without(MOE, mlp_only_layers=[2]), r"mlp_only_layers = \(2,\).*0 to 1"),
    "shared experts": (
        without(MOE, shared_expert_intermediate_size=512),
        "shared_expert_intermediate_size = 512",
    ),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_this_model_is_refused_by_field_value_and_rule(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Qwen3Config.from_hf(fields)


def test_a_broken_or_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        Qwen3Config.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        Qwen3Config.from_hf(tmp_path)


def test_the_outer_tie_flag_wins_over_the_nested_one() -> None:
    fields = without(DENSE, tie_word_embeddings=False, text_config={"tie_word_embeddings": True, "note": 1})
    config = Qwen3Config.from_hf(fields)
    assert config.tie_word_embeddings is False
    assert config.extra["note"] == 1


def test_sizes_may_be_nested_while_the_tie_flag_is_outside() -> None:
    nested = without(DENSE, "model_type", tie_word_embeddings=True)
    fields = {"model_type": "qwen3", "tie_word_embeddings": False, "text_config": nested}
    assert Qwen3Config.from_hf(fields) == Qwen3Config.from_hf(DENSE)


def test_head_dim_is_the_given_one() -> None:
    config = Qwen3Config.from_hf(DENSE)
    assert config.head_dim == 32 != config.hidden_size // config.num_attention_heads


def test_unknown_fields_survive_and_known_ones_follow_the_config() -> None:
    config = Qwen3Config.from_hf(without(DENSE, my_field={"a": [1]}, layer_types=["full_attention"] * 2))
    deeper = replace(config, num_hidden_layers=3).to_hf("transformers-5")
    assert deeper["my_field"] == {"a": [1]}
    assert deeper["num_hidden_layers"] == 3
    assert "layer_types" not in deeper  # a list of 2 would contradict 3 layers


def test_extra_cannot_shadow_a_field() -> None:
    with pytest.raises(ValueError, match=r"extra.*rope_theta"):
        replace(MODELS["4B"], extra={"rope_theta": 1e4})


def test_absent_options_mean_what_transformers_takes_them_for() -> None:
    config = Qwen3Config.from_hf(without(MOE, "norm_topk_prob", "tie_word_embeddings", "torch_dtype"))
    assert (config.norm_topk_prob, config.tie_word_embeddings, config.dtype) == (False, False, None)


def test_norm_topk_prob_is_carried_to_the_export() -> None:
    for value in (True, False):
        assert Qwen3Config.from_hf(without(MOE, norm_topk_prob=value)).to_hf()["norm_topk_prob"] is value


def test_both_styles_say_the_same_in_the_form_asked_for() -> None:
    config = replace(MODELS["4B"], rope_scaling=Yarn(4.0, 32768))
    four, five = config.to_hf("transformers-4"), config.to_hf("transformers-5")
    assert four["rope_theta"] == 1e6
    assert four["rope_scaling"] | {"rope_theta": 1e6} == five["rope_parameters"]
    assert "rope_parameters" not in four
    assert not {"rope_theta", "rope_scaling"} & set(five)
    assert four["torch_dtype"] == five["dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="style = 'v5'"):
        config.to_hf("v5")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["4B-Instruct-2507", "30B-A3B"])
@pytest.mark.parametrize("style", ["transformers-4", "transformers-5"])
def test_transformers_reads_what_is_written_and_is_read_in_turn(name: str, style: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = replace(MODELS[name], rope_scaling=Yarn(4.0, 32768))
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf(style)))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    assert theirs.rope_parameters["rope_type"] == "yarn"
    assert theirs.head_dim == 128
    theirs.save_pretrained(tmp_path / "again")  # writes num_local_experts, layer_types and rope_parameters
    again = Qwen3Config.from_hf(tmp_path / "again")
    assert replace(again, extra={}) == replace(config, extra={})


def test_a_length_above_the_maximum_is_an_error_and_yarn_extends_it() -> None:
    config = Qwen3Config.from_hf(DENSE)
    config.check_sequence_length(128)
    with pytest.raises(ValueError, match=r"129.*128"):
        config.check_sequence_length(129)
    replace(config, rope_scaling=Yarn(4.0, 64)).check_sequence_length(256)


def test_configs_are_values() -> None:
    assert hash(MODELS["4B"]) == hash(replace(MODELS["4B"]))
    with pytest.raises(AttributeError):
        MODELS["4B"].hidden_size = 1  # type: ignore[misc]
