"""Contract: DCP loads any checkpoint through `CheckpointReader` as if it had been saved in TorchTitan's names: the same
bits as a conversion, whole tensors or boxes of them, and nothing that a conversion would refuse. Ranks:
test_sharded_saves.py."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hf_ckpt_adapter import CheckpointReader, Layout, convert_checkpoint, convert_state
from hf_ckpt_adapter.dcp_reader import _row_runs
from hf_tiny import config, equal, fused, state, write_hub
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, LoadPlan


def poisoned(tensors: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
    return {n: torch.full_like(t, float("nan"), **kwargs) for n, t in tensors.items()}


def load(folder: Path, layout: Layout, target: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dcp.load(target, storage_reader=CheckpointReader(folder, layout), no_dist=True)
    return target


@pytest.mark.parametrize("layout", [Layout.NATIVE, Layout.NATIVE_WQKV, Layout.BACKEND])
@pytest.mark.parametrize("source", ["per-expert", "fused", "dcp", "dense"])
def test_every_source_loads_into_every_titan_layout_bit_for_bit(tmp_path: Path, source: str, layout: Layout) -> None:
    cfg = config(moe=source != "dense", tie_word_embeddings=False)
    folder = write_hub(tmp_path / "hub", cfg, fused(state(cfg)) if source == "fused" else state(cfg))
    if source == "dcp":
        convert_checkpoint(folder, tmp_path / "step", "native")
        folder = tmp_path / "step"
    expected = convert_state(state(cfg), layout).tensors
    equal(load(folder, layout, poisoned(expected)), expected)


def test_a_tied_head_is_loaded_under_both_names_and_in_the_targets_dtype(tmp_path: Path) -> None:
    cfg = config(tie_word_embeddings=True)
    folder = write_hub(tmp_path / "hub", cfg, {n: t / 1e4 for n, t in state(cfg, head=False).items()})
    expected = {
        n: (t / 1e4).bfloat16()
        for n, t in convert_state(state(cfg, head=False), Layout.NATIVE, tied=True).tensors.items()
    }
    equal(load(folder, Layout.NATIVE, poisoned(expected)), expected)


def test_a_tied_head_that_differs_is_refused_while_loading(tmp_path: Path) -> None:
    cfg = config(tie_word_embeddings=True)
    tensors = state(cfg)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 0.5
    folder = write_hub(tmp_path / "hub", cfg, tensors)
    native = convert_state(state(cfg, head=False), Layout.NATIVE, tied=True).tensors
    with pytest.raises(
        CheckpointException, match=r"'lm_head.weight' and 'model.embed_tokens.weight' differ by up to 0.5"
    ):
        load(folder, Layout.NATIVE, poisoned(native))


def test_a_number_that_the_target_cannot_hold_is_refused(tmp_path: Path) -> None:
    cfg = config()
    folder = write_hub(tmp_path / "hub", cfg, state(cfg))  # numbers up to 1e5
    native = convert_state(state(cfg), Layout.NATIVE).tensors
    with pytest.raises(CheckpointException, match=r"float16 cannot hold that"):
        load(folder, Layout.NATIVE, poisoned(native, dtype=torch.float16))


def test_state_that_only_torchtitan_has_reads_as_it_was_saved_or_as_zeros(tmp_path: Path) -> None:
    cfg = config(moe=True, tie_word_embeddings=False)
    bias = "layers.1.moe.expert_bias_E"
    native = {**convert_state(state(cfg), Layout.NATIVE).tensors, bias: torch.arange(8.0)}
    dcp.save(native, checkpoint_id=tmp_path / "step", no_dist=True)
    write_hub(tmp_path / "step" / "assets", cfg, {})
    (tmp_path / "step" / "assets" / "model.safetensors").unlink()
    target = poisoned({bias: native[bias], "layers.0.moe.expert_bias_E": native[bias]})
    load(tmp_path / "step", Layout.NATIVE, target)
    assert torch.equal(target[bias], torch.arange(8.0))
    assert torch.equal(target["layers.0.moe.expert_bias_E"], torch.zeros(8))


def test_an_expert_bias_of_zero_means_none_wherever_it_comes_from(tmp_path: Path) -> None:
    """Case 221: a conversion adds zero biases, which a model without that buffer must be able to leave aside."""
    cfg = config(moe=True)
    biases = {f"layers.{n}.moe.expert_bias_E" for n in range(2)}
    hub = write_hub(tmp_path / "hub", cfg, state(cfg))
    convert_checkpoint(hub, tmp_path / "step", "native")
    for folder in (hub, tmp_path / "step"):
        assert CheckpointReader(folder, "native").zeros == biases
    native = {**convert_state(state(cfg), Layout.NATIVE).tensors, **dict.fromkeys(biases, torch.arange(8.0))}
    dcp.save(native, checkpoint_id=tmp_path / "biased", no_dist=True)
    shutil.copytree(tmp_path / "step" / "assets", tmp_path / "biased" / "assets")
    assert CheckpointReader(tmp_path / "biased", "native").zeros == set()


def test_a_checkpoint_without_the_last_expert_and_a_hub_layout_are_refused(tmp_path: Path) -> None:
    cfg = config(moe=True)
    tensors = state(cfg)
    del tensors["model.layers.1.mlp.experts.7.up_proj.weight"]
    folder = write_hub(tmp_path / "hub", cfg, tensors)
    with pytest.raises(ValueError, match=r"1 tensors are missing: 'model.layers.1.mlp.experts.7.up_proj.weight'"):
        CheckpointReader(folder, "native")
    with pytest.raises(ValueError, match="'fused': DCP loads into TorchTitan's names"):
        CheckpointReader(folder, "fused")


class Boxes(DefaultLoadPlanner):
    """Ask for tensors in boxes that cut every dimension, as uneven shards would."""

    def create_local_plan(self) -> LoadPlan:
        from dataclasses import replace
        from itertools import product

        items = []
        for item in super().create_local_plan().items:
            cuts = []
            for length in item.lengths:
                middle = length // 3
                cuts.append([(0, middle), (middle, length - middle)] if middle else [(0, length)])
            for box in product(*cuts):
                offsets, lengths = (torch.Size(column) for column in zip(*box, strict=True))
                items.append(replace(item, storage_offsets=offsets, dest_offsets=offsets, lengths=lengths))
        return LoadPlan(items)


def test_boxes_that_cut_every_dimension_put_every_element_in_its_place(tmp_path: Path) -> None:
    cfg = config(moe=True, tie_word_embeddings=False)
    folder = write_hub(tmp_path / "hub", cfg, state(cfg))
    expected = convert_state(state(cfg), Layout.NATIVE).tensors
    target = poisoned(expected)
    dcp.load(target, storage_reader=CheckpointReader(folder, "native"), planner=Boxes(), no_dist=True)
    equal(target, expected)


def test_a_box_is_read_in_as_few_runs_of_rows_as_there_are() -> None:
    whole = [(0, 4, 4), (0, 8, 8)]
    assert list(_row_runs(whole)) == [(0, 32)]
    assert list(_row_runs([(1, 2, 4), (0, 8, 8)])) == [(8, 16)]
    assert list(_row_runs([(1, 2, 4), (2, 3, 8)])) == [(10, 3), (18, 3)]
    assert list(_row_runs([(5, 0, 8)])) == [(5, 0)]
