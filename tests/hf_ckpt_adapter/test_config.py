"""Contract of config.py: config and tensors agree, and no fact that tensors lack is made up."""

import shutil
from pathlib import Path

import pytest
from hf_ckpt_adapter import export_step
from hf_tiny import config, native, save_step

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
