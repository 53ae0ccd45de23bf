"""Contract of convert.py: a checkpoint becomes the same model in another layout, whole, or nothing happens."""

import json
from pathlib import Path

import pytest
import torch
from hf_ckpt_adapter import (
    Layout,
    Options,
    convert_state,
    export_step,
)
from hf_ckpt_adapter import (
    convert_checkpoint as convert,
)
from hf_tiny import TITAN, config, equal, fused, load, state, write_hub
from safetensors.torch import load_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("layout", TITAN)
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("moe", [False, True])
def test_hub_to_titan_to_hub_is_bit_exact(tmp_path: Path, layout: Layout, tie: bool, moe: bool) -> None:
    cfg = config(moe, tie_word_embeddings=tie, dtype="bfloat16")
    before = {n: t.to(torch.bfloat16) for n, t in state(cfg, head=not tie).items()}
    hub = write_hub(tmp_path / "hub", cfg, before)
    convert(hub, tmp_path / "step-0", layout)
    export_step(tmp_path / "step-0", tmp_path / "back")
    equal(load_file(tmp_path / "back" / "model.safetensors"), before)
    kept = json.loads((tmp_path / "back" / "config.json").read_text())
    assert kept == cfg
    assert (tmp_path / "back" / "tokenizer.json").read_text() == (hub / "tokenizer.json").read_text()


def test_per_expert_and_fused_and_back(tmp_path: Path) -> None:
    cfg = config(moe=True)
    convert(write_hub(tmp_path / "hub", cfg, state(cfg)), tmp_path / "fused", "fused")
    equal(load_file(tmp_path / "fused" / "model.safetensors"), fused(state(cfg)))
    convert(tmp_path / "fused", tmp_path / "split", "per-expert")
    equal(load_file(tmp_path / "split" / "model.safetensors"), state(cfg))


def test_as_source_keeps_the_layout_of_each_layer(tmp_path: Path) -> None:
    cfg = config(moe=True)
    mixed = fused(state(cfg), layers=(1,))
    hub = write_hub(tmp_path / "hub", cfg, mixed)
    convert(hub, tmp_path / "out", "per-expert", options=Options(experts="as-source", dtype=torch.float32))
    equal(load_file(tmp_path / "out" / "model.safetensors"), mixed)
    marker = json.loads((tmp_path / "out" / "complete.json").read_text())
    assert marker["layout"] == "fused and per-expert"
    hub = write_hub(tmp_path / "fused", cfg, fused(state(cfg)))
    report = convert(hub, tmp_path / "same", "per-expert", options=Options(experts="as-source"))
    assert report.layout == "fused"


def test_native_to_backend_directly(tmp_path: Path) -> None:
    cfg = config(moe=True)
    convert(write_hub(tmp_path / "hub", cfg, state(cfg)), tmp_path / "native", "native")
    convert(tmp_path / "native", tmp_path / "backend", "backend")
    expected = convert_state(state(cfg), Layout.BACKEND).tensors
    equal(load(tmp_path / "backend", expected), expected)
