"""Contract: TorchTitan's own checkpointer gets from these adapters what its own Qwen3 adapter would give it, for
sharded experts too, and names that neither knows are an error instead of a tensor that disappears."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.filterwarnings("ignore")
EXPERTS = "layers.{}.moe.routed_experts.inner_experts."


class Native:
    """What the adapters read of a native model's config."""

    enable_weight_tying = False


class Backend:
    tie_word_embeddings = False


def native_state() -> dict[str, torch.Tensor]:
    """A two-layer MoE of 8 experts under TorchTitan's names; every element another number."""
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (32, 16),
        "norm.weight": (16,),
        "lm_head.weight": (32, 16),
    }
    for n in range(2):
        shapes |= {
            f"layers.{n}.attention.qkv_linear.wq.weight": (16, 16),
            f"layers.{n}.moe.router.gate.weight": (8, 16),
            EXPERTS.format(n) + "w1_EFD": (8, 12, 16),
            EXPERTS.format(n) + "w2_EDF": (8, 16, 12),
            EXPERTS.format(n) + "w3_EFD": (8, 12, 16),
        }
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}


def adapter(kind: str = "native") -> Any:
    from titan_recipes.checkpoint.state_dict import BackendStateDictAdapter, NativeStateDictAdapter

    return NativeStateDictAdapter(Native(), None) if kind == "native" else BackendStateDictAdapter(Backend(), None)


def test_hub_names_are_those_of_torchtitans_own_adapter_and_lead_back() -> None:
    from torchtitan.models.qwen3 import qwen3_configs
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    config = qwen3_configs["debugmodel_moe"](attn_backend="flex", moe_comm_backend="standard")
    config = getattr(config, "model", config)
    config.enable_weight_tying = False
    for layer in config.layers:
        layer.moe.num_experts = 8
    theirs = Qwen3StateDictAdapter(config, None).to_hf(native_state())
    ours = adapter().to_hf(native_state())
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    back = adapter().from_hf(ours)
    assert back.keys() == native_state().keys()
    assert all(torch.equal(back[n], t) for n, t in native_state().items())


@pytest.mark.parametrize("kind", ["native", "backend"])
def test_an_unknown_name_is_refused_both_ways(kind: str) -> None:
    hub = adapter().to_hf(native_state())
    with pytest.raises(ValueError, match="mystery"):
        adapter(kind).from_hf(hub | {"model.layers.0.mlp.mystery.weight": torch.ones(2, 2)})
    state = adapter(kind).from_hf(hub)
    with pytest.raises(ValueError, match="mystery"):
        adapter(kind).to_hf(state | {"mystery.weight": torch.ones(2, 2)})


def test_an_expert_bias_that_the_hub_cannot_hold_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    zero, one = ({**native_state(), "layers.0.moe.expert_bias_E": torch.full((8,), value)} for value in (0.0, 1.0))
    logger = logging.getLogger("torchtitan")
    logger.addHandler(caplog.handler)
    try:
        assert adapter().to_hf(zero).keys() == adapter().to_hf(native_state()).keys()
        assert not caplog.records
        adapter().to_hf(one)
        assert "layers.0.moe.expert_bias_E" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


class Holder(nn.Module):
    """Parameters under dotted names, for FSDP to shard."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.names = {name: name.replace(".", "_") for name in tensors}
        for name, tensor in tensors.items():
            self.register_parameter(self.names[name], nn.Parameter(tensor))

    def named(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, attribute).detach() for name, attribute in self.names.items()}


def shard(layout: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Shard as TorchTitan places experts: EP on the first dimension, FSDP on the first too while there are enough, else
    the second.
    """
    if layout == "ep4":
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        return {n: distribute_tensor(t, mesh, [Shard(0) if "_E" in n else Replicate()]) for n, t in state.items()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    if layout == "replicate2-ep2":
        places = [Replicate(), Shard(0)]
        return {n: distribute_tensor(t, mesh, places if "_E" in n else [Replicate()] * 2) for n, t in state.items()}
    model = Holder(
        {n: distribute_tensor(t, mesh["ep"], [Shard(0) if "_E" in n else Replicate()]) for n, t in state.items()}
    )
    dim = 0 if layout == "fsdp2-ep2-both-on-experts" else 1

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(dim) if parameter.ndim == 3 else None

    fully_shard(model, mesh=mesh["efsdp"], shard_placement_fn=place)
    return model.named()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


LAYOUTS = ["ep4", "replicate2-ep2", "fsdp2-ep2-both-on-experts", "fsdp2-ep2-fsdp-inside-an-expert"]


def load_on_a_rank(rank: int, folder: str, kind: str) -> dict[str, int]:
    """Load as TorchTitan's dcp_load does: to_hf of poisoned shards, DCP from safetensors, from_hf.

    Returns experts a rank held.
    """
    held = {}
    whole = adapter(kind).from_hf(adapter().to_hf(native_state()))
    for layout in LAYOUTS:
        expected = shard(layout, whole)
        ours = adapter(kind)
        hub = ours.to_hf({n: torch.full_like(t, float("nan")) for n, t in expected.items()})
        held[layout] = sum(".experts." in n for n in hub)
        dcp.load(hub, storage_reader=HuggingFaceStorageReader(folder))
        result = ours.from_hf(hub)
        assert result.keys() == expected.keys(), (layout, sorted(result.keys() ^ expected.keys()))
        for name, tensor in expected.items():
            assert torch.equal(local(result[name]), local(tensor)), f"{layout}: {name} on rank {rank}"
            if isinstance(tensor, DTensor):
                assert result[name].placements == tensor.placements and result[name].shape == tensor.shape
    dist.barrier()
    return held


@pytest.mark.parametrize("kind", ["native", "backend"])
def test_sharded_experts_are_loaded_by_dcp_from_safetensors_without_a_gathered_copy(tmp_path: Path, kind: str) -> None:
    save_file({n: t.contiguous() for n, t in adapter().to_hf(native_state()).items()}, tmp_path / "model.safetensors")
    everything = 2 * 8 * 3  # layers, experts, matrices
    for held in run_ranks(load_on_a_rank, 4, str(tmp_path), kind):
        assert held["ep4"] == held["fsdp2-ep2-both-on-experts"] == everything // 4
        assert held["replicate2-ep2"] == held["fsdp2-ep2-fsdp-inside-an-expert"] == everything // 2
