"""Contract between hf-ckpt-adapter and the real TorchTitan: the table has exactly the names, shapes and row
order of its Qwen3, and its own checkpointer reads what we write."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hf_ckpt_adapter import Layout, Options, convert_checkpoint, convert_state, export_step
from safetensors.torch import load_file

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.filterwarnings("ignore")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


@pytest.fixture(scope="module", params=["debugmodel", "debugmodel_moe"])
def titan(request: pytest.FixtureRequest) -> Any:
    """A real Qwen3Model of TorchTitan with random weights, and its config."""
    from torchtitan.models.qwen3 import qwen3_configs

    build = qwen3_configs[request.param]
    spec = build(attn_backend="flex", **({"moe_comm_backend": "standard"} if "moe" in request.param else {}))
    spec = getattr(spec, "model", spec)
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = spec.build()
    for tensor in model.state_dict().values():
        tensor.normal_() if tensor.is_floating_point() else tensor.zero_()
    return spec, model


def hub_config(spec: Any, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What config.json would say; sizes are left to the tensors."""
    moe = any(".experts." in n for n in state)
    return {
        "model_type": "qwen3_moe" if moe else "qwen3",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": bool(spec.enable_weight_tying),
        "dtype": "float32",
        **({"num_experts_per_tok": 2, "norm_topk_prob": True} if moe else {}),
    }


def side(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: t for n, t in state.items() if "expert_bias" in n}


def test_our_table_agrees_with_torchtitans_own_adapter(titan: Any) -> None:
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    spec, model = titan
    state = {n: t for n, t in model.state_dict().items() if n not in side(model.state_dict())}
    theirs = Qwen3StateDictAdapter(spec, None).to_hf(dict(state))
    ours = convert_state(model.state_dict(), Layout.PER_EXPERT, tied=bool(spec.enable_weight_tying))
    equal(ours.tensors, theirs)
    equal(ours.side, side(model.state_dict()))
    equal(convert_state(ours.tensors, Layout.NATIVE, tied=bool(spec.enable_weight_tying)).tensors, state)


def test_a_saved_model_exports_and_comes_back_and_the_model_loads_it(titan: Any, tmp_path: Path) -> None:
    spec, model = titan
    state = model.state_dict()
    tied = bool(spec.enable_weight_tying)
    dcp.save(dict(state), checkpoint_id=tmp_path / "step-1", no_dist=True)
    hub = convert_state(state, Layout.PER_EXPERT, tied=tied).tensors
    (tmp_path / "step-1" / "assets").mkdir()
    (tmp_path / "step-1" / "assets" / "config.json").write_text(json.dumps(hub_config(spec, hub)))
    export_step(tmp_path / "step-1", tmp_path / "hf")
    equal(load_file(tmp_path / "hf" / "model.safetensors"), hub)
    convert_checkpoint(tmp_path / "hf", tmp_path / "again", "native")
    target = {n: torch.full_like(t, float("nan")) for n, t in state.items()}
    dcp.load(target, checkpoint_id=tmp_path / "again", no_dist=True)
    equal(target, {n: t.detach() for n, t in state.items()})
    assert not model.load_state_dict(target, strict=True).missing_keys


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_torchtitans_checkpointer_loads_an_import_and_does_not_mind_assets(
    titan: Any, tmp_path: Path, one_rank: None
) -> None:
    from torchtitan.components.checkpointer.base import MODEL, ModelWrapper
    from torchtitan.components.checkpointer.dcp import CheckpointManager

    logging.getLogger("torchtitan").setLevel(logging.ERROR)
    spec, model = titan
    tied = bool(spec.enable_weight_tying)
    expected = {n: t.clone() for n, t in model.state_dict().items()}
    hub = convert_state(expected, Layout.PER_EXPERT, tied=tied).tensors
    dcp.save(expected, checkpoint_id=tmp_path / "source", no_dist=True)
    (tmp_path / "source" / "assets").mkdir()
    (tmp_path / "source" / "assets" / "config.json").write_text(json.dumps(hub_config(spec, hub)))
    export_step(tmp_path / "source", tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "run" / "checkpoint" / "step-0", "native")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(float("nan"))
    manager = CheckpointManager.Config(enable=True, keep_latest_k=0).build(
        dataloader=None, model_parts=[model], optimizers=None, lr_schedulers=None, states={},
        sd_adapter=None, base_folder=str(tmp_path / "run"),
    )  # fmt: skip
    assert isinstance(manager, CheckpointManager) and isinstance(manager.states[MODEL], ModelWrapper)
    assert (tmp_path / "run" / "checkpoint" / "step-0" / "assets" / "config.json").is_file()
    assert manager.load(step=0)
    equal({n: t.detach() for n, t in model.state_dict().items()}, expected)
    manager.close()


def test_padding_for_tensor_parallelism_survives_the_round_trip(titan: Any, tmp_path: Path) -> None:
    spec, model = titan
    tied = bool(spec.enable_weight_tying)
    hub = convert_state(model.state_dict(), Layout.PER_EXPERT, tied=tied).tensors
    (tmp_path / "hub").mkdir()
    from safetensors.torch import save_file

    save_file({n: t.contiguous() for n, t in hub.items()}, tmp_path / "hub" / "model.safetensors")
    (tmp_path / "hub" / "config.json").write_text(json.dumps(hub_config(spec, hub)))
    (tmp_path / "hub" / "config.json").write_text(
        json.dumps({**hub_config(spec, hub), "vocab_size": hub["model.embed_tokens.weight"].shape[0]})
    )
    convert_checkpoint(tmp_path / "hub", tmp_path / "padded", "native", options=Options(pad_vocab_to=24))
    export_step(tmp_path / "padded", tmp_path / "back")
    equal(load_file(tmp_path / "back" / "model.safetensors"), hub)


def test_backend_names_are_those_that_torchtitans_own_conversion_gives(tmp_path: Path) -> None:
    """Its expert conversion (`hf_to_titan_moe_state_dict`) plus the `model.` prefix that its adapter puts in
    front."""
    transformers = pytest.importorskip("transformers")
    from torchtitan.experiments.transformers_modeling_backend.state_dict_adapter import (
        hf_to_titan_moe_state_dict,
    )

    config = transformers.Qwen3MoeConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=96, vocab_size=320, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
    )  # fmt: skip
    hub = transformers.Qwen3MoeForCausalLM(config).state_dict()  # experts fused, as transformers 5 has them
    theirs = {"model." + n: t for n, t in hf_to_titan_moe_state_dict(dict(hub)).items()}
    equal(convert_state(hub, Layout.BACKEND).tensors, theirs)
    equal(convert_state(theirs, Layout.FUSED).tensors, dict(hub))
