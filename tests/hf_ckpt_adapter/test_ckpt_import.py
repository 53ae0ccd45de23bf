"""Contract of convert towards TorchTitan: torch's own loader finds every tensor, bit for bit; and every way
back.

Oracle: `torch.distributed.checkpoint.load`, which shares no code with our writer.
"""

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
from hf_tiny import config, equal, fused, state, write_hub
from safetensors.torch import load_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TITAN = [Layout.NATIVE, Layout.NATIVE_WQKV, Layout.BACKEND]


def load(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What torch's loader reads into NaN-poisoned tensors of the expected names; extra names are an error."""
    target = {n: torch.full_like(t, float("nan")) for n, t in like.items()}
    dcp.load(target, checkpoint_id=folder, no_dist=True)
    return target


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


def test_native_to_backend_directly(tmp_path: Path) -> None:
    cfg = config(moe=True)
    convert(write_hub(tmp_path / "hub", cfg, state(cfg)), tmp_path / "native", "native")
    convert(tmp_path / "native", tmp_path / "backend", "backend")
    expected = convert_state(state(cfg), Layout.BACKEND).tensors
    equal(load(tmp_path / "backend", expected), expected)


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
