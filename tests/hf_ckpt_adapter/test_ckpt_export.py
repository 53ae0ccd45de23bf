"""Contract of export_step: a TorchTitan step folder alone becomes a whole Hugging Face folder, or nothing
happens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hf_ckpt_adapter import Layout, Options, convert_state, export_step
from hf_tiny import config, equal, state
from safetensors import safe_open
from safetensors.torch import load_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_step(folder: Path, cfg: dict[str, Any], tensors: dict[str, torch.Tensor], **extra: Any) -> Path:
    """A step folder as TorchTitan and the trainer leave it: DCP files and `assets/`."""
    optimizer = {"state": {"norm.weight": {"exp_avg": torch.zeros(3)}}, "lr": 1e-3}
    dcp.save(
        {**tensors, **extra, "optimizer": optimizer, "train_state": {"step": 3}},
        checkpoint_id=folder,
        no_dist=True,
    )
    (folder / "assets").mkdir()
    (folder / "assets" / "config.json").write_text(json.dumps(cfg))
    (folder / "assets" / "generation_config.json").write_text("{}")
    (folder / "assets" / "tokenizer.json").write_text('{"model": 1}')
    (folder / "assets" / "recipe.json").write_text("{}")
    return folder


def native(cfg: dict[str, Any], layout: Layout = Layout.NATIVE) -> dict[str, torch.Tensor]:
    return convert_state(
        state(cfg, head=not cfg["tie_word_embeddings"]), layout, tied=cfg["tie_word_embeddings"]
    ).tensors


@pytest.mark.parametrize("layout", [Layout.NATIVE, Layout.NATIVE_WQKV, Layout.BACKEND])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("moe", [False, True])
def test_a_step_folder_alone_becomes_the_same_model(tmp_path: Path, layout: Layout, tie: bool, moe: bool) -> None:
    cfg = config(moe, tie_word_embeddings=tie)
    step = save_step(tmp_path / "step-3", cfg, native(cfg, layout))
    report = export_step(step, tmp_path / "hf")
    equal(load_file(tmp_path / "hf" / "model.safetensors"), state(cfg, head=not tie))
    assert report.left_out == {"optimizer": 2, "train_state": 1}
    files = {p.name for p in (tmp_path / "hf").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"} < files
    assert not [p for p in tmp_path.iterdir() if p.name not in ("hf", "step-3")]


def test_an_assets_folder_in_a_step_does_not_disturb_dcp(tmp_path: Path) -> None:
    cfg = config()
    step = save_step(tmp_path / "step-3", cfg, native(cfg))
    target = {name: torch.zeros_like(t) for name, t in native(cfg).items()}
    dcp.load(target, checkpoint_id=step, no_dist=True)
    equal(target, native(cfg))


def test_tensors_have_the_dtype_that_the_config_says(tmp_path: Path) -> None:
    for key in ("dtype", "torch_dtype"):
        cfg = {**config(), "dtype": None, key: "bfloat16"}
        step = save_step(tmp_path / key, cfg, native(cfg))
        report = export_step(step, tmp_path / f"hf-{key}")
        tensors = load_file(tmp_path / f"hf-{key}" / "model.safetensors")
        assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
        assert report.cast == {"float32 -> bfloat16": 25}
        equal(tensors, state(cfg, dtype=torch.bfloat16))


def test_a_dtype_asked_for_is_written_into_the_config(tmp_path: Path) -> None:
    cfg = config()
    step = save_step(tmp_path / "step-3", cfg, native(cfg))
    export_step(step, tmp_path / "hf", dtype="bfloat16")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_file(tmp_path / "hf" / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_a_number_that_the_dtype_cannot_hold_is_an_error(tmp_path: Path) -> None:
    cfg = config()
    step = save_step(tmp_path / "step-3", cfg, native(cfg))
    with pytest.raises(ValueError, match=r"torch.float16 cannot hold that"):
        export_step(step, tmp_path / "hf", dtype="float16")
    assert not (tmp_path / "hf").exists()


def test_sharded_output_has_an_index_with_the_right_total(tmp_path: Path) -> None:
    cfg = config()
    step = save_step(tmp_path / "step-3", cfg, native(cfg))
    export_step(step, tmp_path / "hf", options=Options(max_shard_bytes=100_000))
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    merged = {}
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(tmp_path / "hf" / file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                assert index["weight_map"][name] == file
                merged[name] = handle.get_tensor(name)
    equal(merged, state(cfg))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in merged.values())
    assert len(set(index["weight_map"].values())) > 3


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path: Path) -> None:
    cfg = config(moe=True)
    outs = []
    for run in ("one", "two"):
        export_step(save_step(tmp_path / run, cfg, native(cfg)), tmp_path / f"hf-{run}")
        outs.append({p.name: p.read_bytes() for p in (tmp_path / f"hf-{run}").iterdir() if p.name != "complete.json"})
    assert outs[0] == outs[1]


def test_a_used_folder_is_refused_or_replaced_whole(tmp_path: Path) -> None:
    cfg = config()
    step = save_step(tmp_path / "step-3", cfg, native(cfg))
    export_step(step, tmp_path / "hf", options=Options(max_shard_bytes=200_000))
    with pytest.raises(FileExistsError, match="overwrite"):
        export_step(step, tmp_path / "hf")
    export_step(step, tmp_path / "hf", overwrite=True)
    assert [p.name for p in (tmp_path / "hf").glob("*.safetensors")] == ["model.safetensors"]
    weight_map = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map.values()) == {"model.safetensors"}


def test_a_folder_with_other_things_in_it_is_not_replaced(tmp_path: Path) -> None:
    cfg = config()
    step = save_step(tmp_path / "step-3", cfg, native(cfg))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"thesis.tex"):
        export_step(step, tmp_path / "home", overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_without_assets_the_error_says_what_is_needed(tmp_path: Path) -> None:
    cfg = config()
    step = save_step(tmp_path / "step-3", cfg, native(cfg))
    shutil.rmtree(step / "assets")
    with pytest.raises(FileNotFoundError, match=r"config.json"):
        export_step(step, tmp_path / "hf")


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", 3), ("head_dim", 16), ("vocab_size", 500), ("intermediate_size", 95)],
)
def test_a_config_that_contradicts_the_tensors_is_refused(tmp_path: Path, field: str, value: int) -> None:
    cfg = config()
    step = save_step(tmp_path / "step-3", {**cfg, field: value}, native(cfg))
    with pytest.raises(ValueError, match=field):
        export_step(step, tmp_path / "hf")


@pytest.mark.parametrize("field", ["rope_theta", "rms_norm_eps"])
def test_a_fact_that_tensors_cannot_tell_has_no_default(tmp_path: Path, field: str) -> None:
    cfg = config()
    step = save_step(tmp_path / "step-3", {k: v for k, v in cfg.items() if k != field}, native(cfg))
    with pytest.raises(ValueError, match=field):
        export_step(step, tmp_path / "hf")


def test_a_missing_norm_fails_by_name_and_is_not_made_up(tmp_path: Path) -> None:
    cfg = config()
    tensors = native(cfg)
    del tensors["layers.1.attention.q_norm.weight"]
    with pytest.raises(ValueError, match=r"1 tensors are missing: 'model.layers.1.self_attn.q_norm.weight'"):
        export_step(save_step(tmp_path / "step-3", cfg, tensors), tmp_path / "hf")


def test_an_expert_bias_goes_to_a_side_file_with_a_warning_of_its_size(tmp_path: Path) -> None:
    cfg = config(moe=True)
    bias = {"layers.1.moe.expert_bias_E": torch.arange(8.0), "layers.0.moe.expert_bias_E": torch.zeros(8)}
    report = export_step(save_step(tmp_path / "step-3", cfg, native(cfg), **bias), tmp_path / "hf")
    assert "non-zero expert bias (up to 7" in report.warnings[0]
    equal(load_file(tmp_path / "hf" / "titan_state" / "model.safetensors"), bias)
    assert not any("bias" in n for n in load_file(tmp_path / "hf" / "model.safetensors"))


def test_importing_the_package_pulls_in_torch_alone() -> None:
    import subprocess
    import sys

    code = (
        # what torch's own DCP module brings with it is torch's affair
        "import sys, torch, torch.distributed.checkpoint; before = set(sys.modules); from hf_ckpt_adapter import *;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before} - {'hf_ckpt_adapter'} - "
        "sys.stdlib_module_names;"
        "sys.exit(str(new - {'torch', 'safetensors'}) if new - {'torch', 'safetensors'} else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
