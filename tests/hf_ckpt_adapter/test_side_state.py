"""Contract of side_state.py: state that only TorchTitan has goes to a side file and comes back."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hf_ckpt_adapter import Layout, convert_state, export_step
from hf_ckpt_adapter import (
    convert_checkpoint as convert,
)
from hf_tiny import config, equal, load, native, save_step, state, write_hub
from safetensors.torch import load_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_an_expert_bias_goes_to_a_side_file_with_a_warning_of_its_size(tmp_path: Path) -> None:
    cfg = config(moe=True)
    bias = {"layers.1.moe.expert_bias_E": torch.arange(8.0), "layers.0.moe.expert_bias_E": torch.zeros(8)}
    report = export_step(save_step(tmp_path / "step-3", cfg, native(cfg), **bias), tmp_path / "hf")
    assert "non-zero expert bias (up to 7" in report.warnings[0]
    equal(load_file(tmp_path / "hf" / "titan_state" / "model.safetensors"), bias)
    assert not any("bias" in n for n in load_file(tmp_path / "hf" / "model.safetensors"))


def test_expert_bias_comes_back_from_the_side_file_and_is_zero_otherwise(tmp_path: Path) -> None:
    cfg = config(moe=True)
    hub = write_hub(tmp_path / "hub", cfg, state(cfg))
    zero = {f"layers.{n}.moe.expert_bias_E": torch.zeros(8) for n in range(2)}
    convert(hub, tmp_path / "step-0", "native")
    equal(load(tmp_path / "step-0", zero), zero)
    bias = {f"layers.{n}.moe.expert_bias_E": torch.arange(8.0) + n for n in range(2)}
    dcp.save(
        {**convert_state(state(cfg), Layout.NATIVE).tensors, **bias},
        checkpoint_id=tmp_path / "trained",
        no_dist=True,
    )
    export_step(tmp_path / "trained", tmp_path / "hf", assets=hub)
    convert(tmp_path / "hf", tmp_path / "again", "native")
    equal(load(tmp_path / "again", bias), bias)
    convert(tmp_path / "hf", tmp_path / "backend", "backend")
    renamed = {f"model.model.layers.{n}.mlp.expert_bias_E": torch.arange(8.0) + n for n in range(2)}
    equal(load(tmp_path / "backend", renamed), renamed)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("layers.0.moe.expert_bias_E", 7), ("layers.5.moe.expert_bias_E", 8), ("lm_head.weight", 8)],
)
def test_a_side_file_of_another_model_is_refused(tmp_path: Path, name: str, shape: int) -> None:
    from safetensors.torch import save_file

    cfg = config(moe=True)
    hub = write_hub(tmp_path / "hub", cfg, state(cfg))
    (hub / "titan_state").mkdir()
    save_file({name: torch.zeros(shape)}, hub / "titan_state" / "model.safetensors")
    with pytest.raises(ValueError, match=name):
        convert(hub, tmp_path / "out", "native")
    assert not (tmp_path / "out").exists()
