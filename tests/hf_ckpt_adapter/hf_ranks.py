"""Save one tiny MoE with DCP from four gloo ranks, in the layouts that TorchTitan shards a Qwen3 in.

Run by test_sharded_saves.py: python hf_ranks.py WORLD FOLDER. Real FSDP2 and DTensors, so
that the chunks on disk are what a training job leaves; weights are those of `hf_tiny.state`, so that the test
knows them.
"""

import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hf_ckpt_adapter import CheckpointReader, Layout, convert_state
from hf_tiny import config, fused, state, write_hub
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

CONFIG = config(moe=True, tie_word_embeddings=False)
TIED = config(tie_word_embeddings=True)
# How TorchTitan shards over the tensor-parallel axis (models/common/decoder_sharding.py): output rows of q,
# k, v, w1, w3 and the vocabulary; input columns of wo; experts' hidden dimension.
ROWS = ("wq.", "wk.", "wv.", "tok_embeddings", "lm_head", "w1_EFD", "w3_EFD")
COLUMNS = ("wo.", "w2_EDF")


class Holder(nn.Module):
    """A tree of modules that holds the parameters of a state dict under their dotted names."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(tensor))


def expert_parallel(native: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """EP=4: experts split over the ranks by their first dimension, everything else the same everywhere."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    return {n: distribute_tensor(t, mesh, [Shard(0) if "_E" in n else Replicate()]) for n, t in native.items()}


def fsdp_tensor_parallel(native: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """FSDP=2 x TP=2 with FSDP2 itself: rows split over both axes are strided shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))

    def over_tp(name: str, tensor: torch.Tensor) -> DTensor:
        dim = 1 if "_E" in name else 0
        place: Shard | Replicate = Replicate()
        if any(part in name for part in ROWS):
            place = Shard(dim)
        elif any(part in name for part in COLUMNS):
            place = Shard(dim + 1)
        return distribute_tensor(tensor, mesh["tp"], [place])

    model = Holder({n: over_tp(n, t) for n, t in native.items()})
    fully_shard(model, mesh=mesh["fsdp"])
    return model.state_dict()


def expert_fsdp(native: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """EP=2 x FSDP=2 with experts split twice along their first dimension, as TorchTitan does when there are
    enough."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    model = Holder(
        {n: distribute_tensor(t, mesh["ep"], [Shard(0) if "_E" in n else Replicate()]) for n, t in native.items()}
    )
    fully_shard(model, mesh=mesh["fsdp"])
    return model.state_dict()


def pipeline(native: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """PP=2 x FSDP=2: each stage has its own layers, and the last has norm and head."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    stage = rank // 2
    mine = {n: t for n, t in native.items() if (stage == 0) == (n.startswith(("tok_embeddings", "layers.0.")))}
    model = Holder(mine)
    fully_shard(model, mesh=mesh["fsdp"])
    return model.state_dict()


def read_back(folder: Path, name: str, tensors: dict[str, torch.Tensor], rank: int) -> None:
    """Load the Hub folder into poisoned shards of the same layout; they must be what was saved. Notes the bytes
    read."""
    reader = CheckpointReader(folder / "hub", Layout.BACKEND if "backend" in name else Layout.NATIVE)
    rows, read = reader._source.read_rows, 0

    def counted(tensor: str, row: int, out: memoryview) -> None:
        nonlocal read
        read += len(out)
        rows(tensor, row, out)

    reader._source.read_rows = counted  # type: ignore[method-assign]
    target = {n: torch.full_like(t, float("nan")) for n, t in tensors.items()}
    dcp.load(target, storage_reader=reader)
    for n, tensor in tensors.items():
        mine, theirs = (t.to_local() if isinstance(t, DTensor) else t for t in (target[n], tensor))
        assert torch.equal(mine, theirs), f"{name}: {n} differs on rank {rank}"
    (folder / f"{name}-bytes-{rank}").write_text(str(read))


def load_tied(folder: Path, rank: int) -> None:
    """FSDP over four ranks, tied by the config, both names in the file: one matrix under both, or refused on every
    rank."""
    native = convert_state(state(TIED, head=False), Layout.NATIVE, tied=True).tensors
    model = Holder({n: torch.full_like(t, float("nan")) for n, t in native.items()})
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    target = model.state_dict()
    dcp.load(target, storage_reader=CheckpointReader(folder / "tied", Layout.NATIVE))
    for n, tensor in native.items():
        assert torch.equal(target[n].full_tensor(), tensor), f"tied: {n} differs on rank {rank}"
    try:
        dcp.load(target, storage_reader=CheckpointReader(folder / "moved", Layout.NATIVE))
    except CheckpointException as error:
        (folder / f"moved-{rank}").write_text(str(error))


def main(rank: int, world: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=world)
    native = convert_state(state(CONFIG), Layout.NATIVE).tensors
    backend = convert_state(state(CONFIG), Layout.BACKEND).tensors
    saves = {
        "ep4": expert_parallel(native),
        "fsdp2-tp2": fsdp_tensor_parallel(native),
        "ep2-fsdp2": expert_fsdp(native),
        "pp2-fsdp2": pipeline(native, rank),
        "backend-ep2-fsdp2": expert_fsdp(backend),
    }
    for name, tensors in saves.items():
        dcp.save(tensors, checkpoint_id=folder / name)
    for name, tensors in saves.items():
        read_back(folder, name, tensors, rank)
    load_tied(folder, rank)
    # Shards in a dict: converting gathers them, on every rank.
    gathered = convert_state(saves["ep2-fsdp2"], Layout.PER_EXPERT).tensors
    if rank == 3:
        plain = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in gathered.items()}
        torch.save(plain, folder / "gathered.pt")
    else:
        for tensor in gathered.values():
            if isinstance(tensor, DTensor):
                tensor.full_tensor()
    dist.barrier()
    dist.destroy_process_group()


def fork_ranks(world: int, folder: Path) -> int:
    """Run `main` in `world` forked processes, which share the imports above; the number that failed."""
    write_hub(folder / "hub", CONFIG, fused(state(CONFIG)))
    both = {**state(TIED, head=False), "lm_head.weight": state(TIED)["model.embed_tokens.weight"]}
    write_hub(folder / "tied", TIED, both)
    both["lm_head.weight"][-1, -1] += 0.5
    write_hub(folder / "moved", TIED, both)
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                main(rank, world, folder)
                os._exit(0)
            except BaseException:
                print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                os._exit(1)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(fork_ranks(int(sys.argv[1]), Path(sys.argv[2])))
