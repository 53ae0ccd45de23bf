"""Contract of verify.py: damage of every kind is found, and a marker is trusted no more than its folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hf_ckpt_adapter import convert_checkpoint as convert
from hf_ckpt_adapter import export_step
from hf_ckpt_adapter.logits import compare_logits
from hf_ckpt_adapter.verify import verify
from hf_tiny import config, flip, native, run, save_step, state, write_hub


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    cfg = config(moe=True, dtype="bfloat16")
    return write_hub(tmp_path / "hub", cfg, state(cfg, dtype=torch.bfloat16))


def test_verify_finds_damage_of_every_kind(tmp_path: Path, hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bias = {f"model.layers.{n}.mlp.expert_bias_E": torch.arange(8.0) for n in range(2)}
    hub = write_hub(tmp_path / "biased", config(moe=True), {**state(config(moe=True)), **bias})
    whole = tmp_path / "whole"
    convert(hub, whole, "per-expert")
    assert verify(whole).ok

    def fresh(name: str) -> Path:
        return Path(shutil.copytree(whole, tmp_path / name))

    flip(fresh("bit"), "model.norm.weight", 4, 3)
    flip(fresh("bias") / "titan_state", "layers.1.moe.expert_bias_E", 4, 3)
    (fresh("marker") / "complete.json").write_text("{}")
    (fresh("stray") / "model-00002-of-00002.safetensors").write_bytes(b"")
    (fresh("gone") / "generation_config.json").unlink()
    (fresh("tokenizer") / "tokenizer.json").write_text("[]")
    cfg = fresh("config") / "config.json"
    text = cfg.read_text().replace('"moe_intermediate_size": 48', '"moe_intermediate_size": 84')
    cfg.write_text(text)
    for name, words in {
        "bit": ["model.norm.weight in model.safetensors"],
        "bias": ["titan_state/model.safetensors not what was written"],
        "marker": ["not a completeness marker"],
        "stray": ["model-00002-of-00002.safetensors is not of this export"],
        "gone": ["generation_config.json is missing"],
        "tokenizer": ["tokenizer.json not what was written"],
        "config": ["config.json not what was written", "moe_intermediate_size"],
    }.items():
        code, found = run(capsys, "verify", tmp_path / name)
        failed = [c["detail"] for c in found["checks"] if not c["ok"]]
        assert code == 1 and len(failed) == len(words), (name, found)
        assert all(word in detail for word, detail in zip(words, failed, strict=True)), (name, found)


def test_a_marker_with_a_path_in_it_is_refused(tmp_path: Path, hub: Path) -> None:
    convert(hub, tmp_path / "out", "per-expert")
    path = tmp_path / "out" / "complete.json"
    marker = json.loads(path.read_text())
    marker["files"]["../../etc/passwd"] = 1
    path.write_text(json.dumps(marker))
    result = verify(tmp_path / "out")
    assert not result.ok and "refused" in result.checks[-1].detail


def test_a_source_for_logits_that_is_not_there_is_refused(
    tmp_path: Path, hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(hub, tmp_path / "out", "per-expert")
    code, found = run(capsys, "verify", tmp_path / "out", "--logits", tmp_path / "nowhere")
    assert code == 2 and found["kind"] == "FileNotFoundError"


def test_logits_of_a_step_that_routes_with_a_bias_prove_nothing(tmp_path: Path) -> None:
    """Case 211: without the bias the two would agree, and neither would be what was trained."""
    cfg = config(moe=True)
    step = save_step(tmp_path / "step-1", cfg, native(cfg) | {"layers.1.moe.expert_bias_E": torch.ones(8)})
    export_step(step, tmp_path / "hf")
    assert verify(tmp_path / "hf").ok
    with pytest.raises(ValueError, match=r"routes with an expert bias \(up to 1, layers.1.moe.expert_bias_E\)"):
        compare_logits(str(tmp_path / "hf"), str(step))
    with pytest.raises(ValueError, match="routes with an expert bias"):
        compare_logits(str(tmp_path / "hf"), str(tmp_path / "hf"))


def test_a_training_step_is_verified_by_its_chunks_and_one_damaged_byte_is_found(tmp_path: Path) -> None:
    """Case 213: a step that a trainer saved has no marker; `verify` failed every good one."""
    cfg = config(moe=True)
    step = save_step(tmp_path / "step-1", cfg, native(cfg))
    found = verify(step)
    assert found.ok and not found.marked and "nothing wrong is found" in found.summary(), found
    data = bytearray((step / "__0_0.distcp").read_bytes())
    at = data.find(native(cfg)["layers.1.attention.wo.weight"].numpy().tobytes())
    data[at + 1000] ^= 1
    (step / "__0_0.distcp").write_bytes(data)
    (failed,) = [check for check in verify(step).checks if not check.ok]
    assert "1 chunks are not what was saved: layers.1.attention.wo.weight at [0, 0] in __0_0.distcp" in failed.detail


def test_an_ordinary_hub_folder_is_checked_as_far_as_it_can_be(tmp_path: Path, hub: Path) -> None:
    """Case 267: no marker was one failed check, and nothing else was looked at."""
    found = verify(hub)
    assert found.ok and not found.marked
    assert {check.name for check in found.checks} == {"marker", "tensors", "config", "second reader"}
    (hub / "config.json").write_text(json.dumps(config(moe=True, hidden_size=65)))
    assert [check.name for check in verify(hub).checks if not check.ok] == ["config"]


def test_a_conversion_that_never_finished_is_not_verified(tmp_path: Path, hub: Path) -> None:
    convert(hub, tmp_path / "out", "per-expert", write_once=True)
    (tmp_path / "out" / "complete.json").unlink()
    assert "unfinished conversion" in verify(tmp_path / "out").checks[0].detail and not verify(tmp_path / "out").ok
