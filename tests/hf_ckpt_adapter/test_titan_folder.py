"""Contract of titan_folder.py: torch loads what was written, and it can be exported again."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hf_ckpt_adapter import (
    Layout,
    Options,
    convert_state,
    export_step,
    stream,
)
from hf_ckpt_adapter import (
    convert_checkpoint as convert,
)
from hf_ckpt_adapter.formats import dcp_write
from hf_tiny import TITAN, config, equal, load, state, write_hub
from safetensors.torch import load_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("layout", TITAN)
@pytest.mark.parametrize("moe", [False, True])
def test_torch_loads_an_import_and_no_poison_is_left(tmp_path: Path, layout: Layout, moe: bool) -> None:
    cfg = config(moe)
    hub = write_hub(tmp_path / "hub", cfg, state(cfg))
    convert(hub, tmp_path / "step-0", layout)
    expected = convert_state(state(cfg), layout).tensors
    got = load(tmp_path / "step-0", expected)
    equal(got, expected)
    assert not any(t.isnan().any() for t in got.values())


def test_a_tied_head_is_loadable_under_both_names_and_costs_no_bytes(tmp_path: Path) -> None:
    cfg = config(tie_word_embeddings=True)
    hub = write_hub(tmp_path / "hub", cfg, state(cfg, head=False))
    report = convert(hub, tmp_path / "step-0", "native")
    expected = convert_state(state(cfg, head=False), Layout.NATIVE, tied=True).tensors
    equal(load(tmp_path / "step-0", expected), expected)
    assert report.bytes_written == sum(t.nbytes for t in state(cfg, head=False).values())


def test_large_tensors_are_cut_into_chunks_and_blocks_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_write, "CHUNK", 5_000)
    monkeypatch.setattr(stream, "BLOCK", 3_001)
    cfg = config(moe=True)
    hub = write_hub(tmp_path / "hub", cfg, state(cfg))
    convert(hub, tmp_path / "step-0", "native", options=Options(max_shard_bytes=100_000))
    expected = convert_state(state(cfg), Layout.NATIVE).tensors
    equal(load(tmp_path / "step-0", expected), expected)
    assert len(list((tmp_path / "step-0").glob("*.distcp"))) > 5
    export_step(tmp_path / "step-0", tmp_path / "back")
    equal(load_file(tmp_path / "back" / "model.safetensors"), state(cfg))


def test_vocabulary_padding_is_added_as_zeros_and_trimmed_again(tmp_path: Path) -> None:
    cfg = config(vocab_size=322)
    hub = write_hub(tmp_path / "hub", cfg, state(cfg))
    convert(hub, tmp_path / "step-0", "native", options=Options(pad_vocab_to=8))
    padded = load(tmp_path / "step-0", {n: torch.empty(328, 64) for n in ("tok_embeddings.weight", "lm_head.weight")})
    for mine, theirs in (
        ("tok_embeddings.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ):
        assert torch.equal(padded[mine][:322], state(cfg)[theirs]) and not padded[mine][322:].any()
    report = export_step(tmp_path / "step-0", tmp_path / "back")
    equal(load_file(tmp_path / "back" / "model.safetensors"), state(cfg))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == 322
    assert report.trimmed == {"model.embed_tokens.weight": 6, "lm_head.weight": 6}


def test_counters_and_flags_beside_the_weights_are_never_cast(tmp_path: Path) -> None:
    cfg = config(moe=True)
    counters = {
        "layers.0.moe.tokens_per_expert_E": torch.arange(8) + (1 << 40),
        "layers.1.moe.tokens_per_expert_E": torch.arange(8) % 2 == 0,
        "layers.0.moe.expert_bias_E": torch.arange(8, dtype=torch.bfloat16),
        "layers.1.moe.expert_bias_E": torch.arange(8, dtype=torch.float64) / 3,
    }
    native = {**convert_state(state(cfg), Layout.NATIVE).tensors, **counters}
    dcp.save(native, checkpoint_id=tmp_path / "step", no_dist=True)
    hub = write_hub(tmp_path / "hub", cfg, {})
    export_step(tmp_path / "step", tmp_path / "hf", assets=hub, dtype="float64")
    equal(load_file(tmp_path / "hf" / "titan_state" / "model.safetensors"), counters)
    assert load_file(tmp_path / "hf" / "model.safetensors")["model.norm.weight"].dtype == torch.float64
    convert(tmp_path / "hf", tmp_path / "again", "native")
    got = {n: torch.zeros_like(t) for n, t in counters.items()}
    dcp.load(got, checkpoint_id=tmp_path / "again", no_dist=True)
    equal(got, counters)


def test_mixed_floating_dtypes_stay_what_they_are_where_the_config_names_none(tmp_path: Path) -> None:
    cfg = {**config(), "dtype": None}
    mixed = {n: t if "norm" in n else t.to(torch.bfloat16) for n, t in state(cfg).items()}
    convert(write_hub(tmp_path / "hub", cfg, mixed), tmp_path / "step-0", "native")
    export_step(tmp_path / "step-0", tmp_path / "back")
    equal(load_file(tmp_path / "back" / "model.safetensors"), mixed)


def test_the_same_source_gives_the_same_dcp_bytes(tmp_path: Path) -> None:
    cfg = config(moe=True)
    hub = write_hub(tmp_path / "hub", cfg, state(cfg))
    for run in ("one", "two"):
        convert(hub, tmp_path / run, "native")
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / r).iterdir() if p.is_file()} for r in ("one", "two"))
    assert one == two
