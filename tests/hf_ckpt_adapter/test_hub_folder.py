"""Contract of hub_folder.py: a Hugging Face folder has weights, index, config and tokenizer that fit each other."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hf_ckpt_adapter import Layout, Options, export_step
from hf_tiny import config, equal, native, save_step, state
from safetensors import safe_open
from safetensors.torch import load_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
