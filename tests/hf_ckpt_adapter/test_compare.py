"""Contract of compare.py: one flipped bit is found and placed, whatever the formats of the two sides."""

import shutil
from pathlib import Path

import pytest
import torch
from hf_ckpt_adapter import export_step
from hf_ckpt_adapter.cli import main
from hf_ckpt_adapter.compare import diff
from hf_tiny import config, flip, fused, native, run, save_step, state, write_hub


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    cfg = config(moe=True, dtype="bfloat16")
    return write_hub(tmp_path / "hub", cfg, state(cfg, dtype=torch.bfloat16))


def test_one_flipped_bit_is_found_by_diff_with_tensor_shard_and_index(
    tmp_path: Path, hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensor = "model.layers.1.mlp.experts.5.up_proj.weight"
    assert main(["convert", str(hub), str(tmp_path / "hf"), "--to", "hub", "--max-shard-size", "200kB"]) == 0
    capsys.readouterr()
    file = flip(tmp_path / "hf", tensor, byte=2 * (7 * 64 + 9), bit=0)
    code, found = run(capsys, "diff", hub, tmp_path / "hf")
    assert code == 1 and len(found["different"]) == 1 and found["same"] == len(state(config(moe=True))) - 1
    (only,) = found["different"]
    assert only["part"] == tensor and only["index"] == [7, 9] and only["count"] == 1 and file in only["b"]
    value = state(config(moe=True), dtype=torch.bfloat16)[tensor][7, 9]
    other = (value.view(torch.int16) ^ 1).view(torch.bfloat16)
    assert only["max"] == abs(float(value) - float(other)) and only["mean"] == only["max"] / (48 * 64)


def test_a_sign_of_zero_and_a_nan_are_differences(tmp_path: Path) -> None:
    cfg = config()
    write_hub(tmp_path / "a", cfg, state(cfg))
    changed = state(cfg)
    changed["model.embed_tokens.weight"][0, 0] = -0.0  # the very first number is 0.0
    changed["model.norm.weight"][3] = float("nan")
    write_hub(tmp_path / "b", cfg, changed)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert [(d.part, d.index, d.max) for d in found.different] == [
        ("model.embed_tokens.weight", (0, 0), 0.0),
        ("model.norm.weight", (3,), float("inf")),
    ]


def test_diff_reads_any_layout_and_names_what_only_one_side_has(tmp_path: Path, hub: Path) -> None:
    cfg = config(moe=True, dtype="bfloat16")
    write_hub(tmp_path / "fused", cfg, fused(state(cfg, dtype=torch.bfloat16)))
    assert diff(hub, tmp_path / "fused").equal
    less = state(cfg, dtype=torch.bfloat16)
    del less["model.layers.0.self_attn.q_norm.weight"]
    less["model.layers.0.self_attn.q_norm_x.weight"] = torch.zeros(3)
    write_hub(tmp_path / "less", cfg, less)
    found = diff(hub, tmp_path / "less")
    assert found.missing == ["model.layers.0.self_attn.q_norm.weight"]
    assert found.extra == ["model.layers.0.self_attn.q_norm_x.weight"]


def test_diff_between_dtypes_compares_values(tmp_path: Path, hub: Path) -> None:
    cfg = config(moe=True)
    wide = {n: t.float() for n, t in state(cfg, dtype=torch.bfloat16).items()}
    assert diff(hub, write_hub(tmp_path / "wide", cfg, wide)).equal
    wide["model.norm.weight"][5] += 1
    assert [d.index for d in diff(hub, write_hub(tmp_path / "off", cfg, wide)).different] == [(5,)]


def test_padding_of_the_vocabulary_is_no_difference_between_a_step_and_its_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(vocab_size=322)
    hub = write_hub(tmp_path / "hub", cfg, state(cfg))
    assert run(capsys, "convert", hub, tmp_path / "step", "--pad-vocab-to", "8")[0] == 0
    code, found = run(capsys, "diff", tmp_path / "step", hub)
    assert code == 0 and found["same"] == len(state(cfg))
    assert [text.split(" in ")[0] for text in found["padding"]] == [
        "6 padding rows of lm_head.weight",
        "6 padding rows of model.embed_tokens.weight",
    ]


def test_an_expert_bias_that_differs_is_a_difference_and_none_is_zero(tmp_path: Path) -> None:
    """Case 211: such a state is in no tensor of the Hub, and decides which experts a token goes to."""
    cfg, name = config(moe=True), "layers.1.moe.expert_bias_E"
    bias = {name: torch.tensor([0.0] * 7 + [0.5])}
    step = save_step(tmp_path / "biased", cfg, native(cfg) | bias)
    plain = save_step(tmp_path / "plain", cfg, native(cfg))
    zero = save_step(tmp_path / "zero", cfg, native(cfg) | {name: torch.zeros(8)})
    assert diff(plain, zero).equal
    for other in (plain, zero):
        (found,) = diff(step, other).different
        assert (found.part, found.max, found.count, found.index) == (name, 0.5, 1, (7,))
    export_step(step, tmp_path / "hf")
    assert diff(step, tmp_path / "hf").equal
    shutil.rmtree(tmp_path / "hf" / "titan_state")
    assert not diff(step, tmp_path / "hf").equal
