"""Contract of planning.py: every published Qwen3 by name, and every refusal before a byte is read. (Cases 023, 036,
042, 045, 079, 086.)"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_ckpt_adapter import Layout, Options, convert_checkpoint, export_step
from hf_ckpt_adapter.formats.tensors import TensorInfo
from hf_ckpt_adapter.plan import Plan
from hf_ckpt_adapter.planning import make_plan
from hf_tiny import config, fused, native, save_step, state, write_hub

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_missing_norm_fails_by_name_and_is_not_made_up(tmp_path: Path) -> None:
    cfg = config()
    tensors = native(cfg)
    del tensors["layers.1.attention.q_norm.weight"]
    with pytest.raises(ValueError, match=r"1 tensors are missing: 'model.layers.1.self_attn.q_norm.weight'"):
        export_step(save_step(tmp_path / "step-3", cfg, tensors), tmp_path / "hf")


# Sizes as in the config.json of each model on the Hub (Qwen/Qwen3-...): hidden, layers, heads, kv heads,
# width, tied.
DENSE = {
    "0.6B": (1024, 28, 16, 8, 3072, True),
    "1.7B": (2048, 28, 16, 8, 6144, True),
    "4B": (2560, 36, 32, 8, 9728, True),
    "8B": (4096, 36, 32, 8, 12288, False),
    "14B": (5120, 40, 40, 8, 17408, False),
    "32B": (5120, 64, 64, 8, 25600, False),
}


# ... and experts, expert width.
SPARSE = {"30B-A3B": (2048, 48, 32, 4, 6144, 128, 768), "235B-A22B": (4096, 94, 64, 4, 12288, 128, 1536)}


class Shapes:
    """A source of which only names and shapes are there: nothing may be read."""

    kind = "hub"

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {n: TensorInfo(torch.bfloat16, tuple(t.shape)) for n, t in tensors.items()}
        self.left_out: dict[str, int] = {}

    def read_rows(self, name: str, row: int, out: memoryview) -> None:
        raise AssertionError(f"{name} was read while planning")

    def close(self) -> None:
        pass


def meta_state(cfg: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`hf_tiny.state` without memory."""
    real = torch.arange
    try:
        torch.arange = lambda start, end, dtype: torch.empty(end - start, dtype=dtype, device="meta")  # type: ignore
        return state(cfg, head=not cfg["tie_word_embeddings"])
    finally:
        torch.arange = real


def published(name: str) -> dict[str, Any]:
    hidden, layers, heads, kv, width, *rest = DENSE.get(name) or SPARSE[name]
    cfg = config(
        moe=name in SPARSE, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, intermediate_size=width, head_dim=128, vocab_size=151936,
    )  # fmt: skip
    if name in SPARSE:
        return {
            **cfg,
            "num_experts": rest[0],
            "moe_intermediate_size": rest[1],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return {**cfg, "tie_word_embeddings": rest[0]}


def rows(plan: Plan) -> int:
    return sum(read.rows for output in plan.outputs for read in output.reads)


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_every_published_model_is_planned_in_every_layout_and_no_row_is_lost(name: str) -> None:
    cfg = published(name)
    source = Shapes(meta_state(cfg))
    for layout in Layout if name != "235B-A22B" else (Layout.PER_EXPERT, Layout.NATIVE):
        plan = make_plan(source, cfg, layout, Options())
        assert rows(plan) == sum(i.rows for i in source.tensors.values())
        assert sum(o.info.nbytes for o in plan.outputs) == 2 * sum(
            torch.Size(i.shape).numel() for i in source.tensors.values()
        ) * (2 if layout in (Layout.PER_EXPERT, Layout.FUSED) else 1)  # the tiny config says float32 on the Hub
        assert bool(plan.aliases) == (cfg["tie_word_embeddings"] and not plan.to_hub)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": 16}, "num_experts: config.json says 16, the tensors 8"),
        ({"moe_intermediate_size": 84}, "moe_intermediate_size: config.json says 84"),
        ({"model_type": "qwen3"}, "layer 0 is mixture-of-experts by its tensors and dense by config.json"),
        ({"mlp_only_layers": [1]}, "layer 1 is mixture-of-experts by its tensors and dense"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"norm_topk_prob": None}, "norm_topk_prob"),
        ({"rope_theta": None}, "rope_theta"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "torch_dtype 'float32'"),
        ({"dtype": "int7"}, "unknown dtype 'int7'"),
        ({"dtype": "int8"}, "config.json says dtype 'int8'"),
        ({"rope_parameters": {"rope_theta": 5e6}}, "rope_theta 1000000.0 and rope_parameters.rope_theta 5000000.0"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6', expected a positive number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is '-1'"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false'; expected true or false"),
        ({"norm_topk_prob": "no"}, "norm_topk_prob is 'no'"),
        ({"num_experts_per_tok": 2.5}, "num_experts_per_tok is '2.5'"),
        ({"decoder_sparse_step": "1"}, "decoder_sparse_step is '1'"),
        ({"mlp_only_layers": 5}, "mlp_only_layers is '5'"),
        ({"layer_types": [["full_attention"]] * 2}, "layer_types is"),
        ({"num_local_experts": 16}, "num_local_experts: config.json says 16, the tensors 8"),
        ({"model_type": "llama"}, "model_type is 'llama', expected qwen3 or qwen3_moe"),
        ({"attention_bias": True}, "attention_bias is 'True', expected false"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is .* not quantised"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_in_words(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_plan(Shapes(state(config(moe=True))), config(moe=True, **change), Layout.PER_EXPERT, Options())


def test_theta_is_found_in_its_old_and_its_new_place() -> None:
    cfg = config(rope_theta=None, rope_parameters={"rope_theta": 5e6, "rope_type": "default"})
    plan = make_plan(Shapes(state(config())), cfg, Layout.PER_EXPERT, Options())
    assert plan.config["rope_parameters"]["rope_theta"] == 5e6


def test_sizes_that_the_config_leaves_out_are_filled_in_from_the_tensors() -> None:
    bare = {k: config(moe=True)[k] for k in ("rms_norm_eps", "rope_theta", "num_experts_per_tok", "norm_topk_prob")}
    plan = make_plan(Shapes(state(config(moe=True))), bare, Layout.PER_EXPERT, Options())
    expected = {k: v for k, v in config(moe=True).items() if type(v) is int and k != "intermediate_size"}
    assert {k: plan.config[k] for k in expected} == expected
    assert plan.config["model_type"] == "qwen3_moe" and plan.config["architectures"] == ["Qwen3MoeForCausalLM"]


def test_a_reference_config_of_another_depth_is_fitted_on_request_only() -> None:
    source = Shapes(state(config(num_hidden_layers=3)))
    reference = config(layer_types=["full_attention"] * 2)
    with pytest.raises(ValueError, match=r"num_hidden_layers: config.json says 2, the tensors 3"):
        make_plan(source, reference, Layout.PER_EXPERT, Options())
    plan = make_plan(source, reference, Layout.PER_EXPERT, Options(fit_config=True))
    assert plan.config["num_hidden_layers"] == 3 and plan.config["layer_types"] == ["full_attention"] * 3


@pytest.mark.parametrize("layout", [Layout.PER_EXPERT, Layout.NATIVE])
def test_an_expert_missing_from_a_file_is_named(layout: Layout) -> None:
    less = state(config(moe=True))
    del less["model.layers.1.mlp.experts.7.down_proj.weight"]
    with pytest.raises(ValueError, match=r"1 tensors are missing: 'model.layers.1.mlp.experts.7.down_proj.weight'"):
        make_plan(Shapes(less), config(moe=True), layout, Options())


def test_a_renamed_fused_tensor_is_reported_and_not_dropped() -> None:
    tensors = fused(state(config(moe=True)))
    tensors["model.layers.0.mlp.experts.gate_up_proj_x"] = tensors.pop("model.layers.0.mlp.experts.gate_up_proj")
    with pytest.raises(
        ValueError, match=r"gate_up_proj_x.*nearest known: 'model.layers.\{\}.mlp.experts.gate_up_proj'"
    ):
        make_plan(Shapes(tensors), config(moe=True), Layout.NATIVE, Options())


def test_more_rows_than_padding_can_explain_is_a_contradiction() -> None:
    with pytest.raises(ValueError, match=r"vocab_size: config.json says 320, the tensors 2000"):
        make_plan(Shapes(state(config(vocab_size=2000))), config(), Layout.PER_EXPERT, Options())


def test_mixed_dtypes_are_joined_only_when_a_dtype_is_chosen(tmp_path: Path) -> None:
    cfg = {**config(moe=True), "dtype": None}
    mixed = state(cfg)
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    mixed[name] = mixed[name].double()
    folder = write_hub(tmp_path / "hub", cfg, mixed)
    with pytest.raises(ValueError, match=r"w3_EFD' joins tensors of torch.float32 and torch.float64"):
        convert_checkpoint(folder, tmp_path / "out", "native")


def test_no_accelerator_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("an accelerator was touched")

    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", refuse)
    folder = write_hub(tmp_path / "hub", config(), state(config()))
    convert_checkpoint(folder, tmp_path / "dcp", "native")
    convert_checkpoint(tmp_path / "dcp", tmp_path / "hf", "per-expert")


@pytest.mark.parametrize(
    ("options", "layout", "words"),
    [
        (Options(experts="fused"), Layout.NATIVE, "--expert-layout"),
        (Options(head="write"), Layout.BACKEND, "--tied-head"),
        (Options(pad_vocab_to=8), Layout.PER_EXPERT, "--pad-vocab-to"),  # rows that config.json does not know
        (Options(pad_vocab_to=1 << 40), Layout.NATIVE, "1099511627456 rows; an export takes fewer than 1024"),
    ],
)
def test_an_option_that_would_do_nothing_or_harm_is_refused(options: Options, layout: Layout, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_plan(Shapes(state(config())), config(), layout, options)
