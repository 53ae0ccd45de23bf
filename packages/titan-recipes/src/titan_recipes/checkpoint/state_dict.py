"""TorchTitan's StateDictAdapter for its native Qwen3 and for its Transformers backend: thin, over hf-ckpt-adapter's
table.

Unlike TorchTitan's own, they refuse names that they do not know, convert the experts of both, and leave their input
alone. Starting weights do not pass through them: `reader` lets DCP read a Hugging Face folder as if it had been saved
from the model (see `manager.py`), each rank its own rows.
"""

from pathlib import Path
from typing import Any

import torch
from hf_ckpt_adapter import CheckpointReader, Layout, convert_state, read_names, write_names
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, Shard
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.tools.logging import logger

from ..upstream import StridedShard, compute_local_shape_and_global_offset

__all__ = ["BackendStateDictAdapter", "NativeStateDictAdapter"]


class _Adapter(StateDictAdapter):
    """Hub names, one tensor an expert, against `layout`.

    Sharded expert stacks ([E, F, D] DTensors) are not gathered: `to_hf` gives a rank the experts that it holds, as
    views of them, and `from_hf` of that dict gives the stacks back in their sharding.
    """

    layout: Layout

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        self.model_config, self.hf_assets_path = model_config, hf_assets_path
        self.fqn_to_index_mapping = None  # TorchTitan's own HF save makes one file; `apps/export` makes shards
        self._stacks: dict[str, tuple[DTensor, list[str]]] = {}

    @property
    def tied(self) -> bool:
        raise NotImplementedError

    def reader(self, source: Path | str) -> CheckpointReader:
        """A DCP storage reader for a Hugging Face folder, Hub id or DCP step, under this model's names."""
        return CheckpointReader(source, self.layout)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hub names for a model's state dict. Expert bias, which the Hub cannot hold, is left out with a warning.

        Raises ValueError for a name that a Qwen3 does not have.
        """
        stacks = {n: t for n, t in state_dict.items() if isinstance(t, DTensor) and t.ndim == 3}
        whole = {n: t for n, t in state_dict.items() if n not in stacks}
        dialect = "hub" if self.layout is Layout.BACKEND else "native"
        converted = convert_state(whole, Layout.PER_EXPERT, tied=self.tied, dialect=dialect)
        biased = [n for n, t in converted.side.items() if n.endswith("expert_bias_E") and bool((t != 0).any())]
        if biased:
            logger.warning(
                f"{len(biased)} layers route with an expert bias ({biased[0]}), which a Hugging Face checkpoint cannot "
                "hold: reloaded there, the model routes without. apps/export keeps it in a side file."
            )
        self._stacks = {}
        for name, stack in stacks.items():
            experts = [t.name for t in write_names(read_names({name: tuple(stack.shape)}).parts, Layout.PER_EXPERT)]
            local, first = _local_experts(stack)
            mine = experts[first : first + len(local)]
            self._stacks[name] = (stack, mine)
            converted.tensors.update(zip(mine, local, strict=True))
        return converted.tensors

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """The model's names for Hub names, in either expert layout; sharded stacks as the last `to_hf` saw them.

        Raises ValueError for unknown names and for experts that are not all there.
        """
        left = dict(hf_state_dict)
        stacks = {}
        for name, (stack, experts) in self._stacks.items():
            if experts and experts[0] in left:
                stacks[name] = _stack_like(stack, [left.pop(expert) for expert in experts])
        return convert_state(left, self.layout, tied=self.tied, dialect="hub").tensors | stacks


class NativeStateDictAdapter(_Adapter):
    """The adapter of TorchTitan's native Qwen3, dense or MoE, tied or not."""

    layout = Layout.NATIVE

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one tensor."""
        return bool(self.model_config.enable_weight_tying)


class BackendStateDictAdapter(_Adapter):
    """The adapter of TorchTitan's Transformers backend with a Qwen3, dense or MoE, tied or not."""

    layout = Layout.BACKEND

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one tensor."""
        return bool(self.model_config.tie_word_embeddings)


def _local_experts(stack: DTensor) -> tuple[list[torch.Tensor], int]:
    """This rank's experts of an [E, F, D] stack, and the number of the first. Each is a view: [F, D], or a DTensor of
    that over the mesh axes that split something other than the experts.
    """
    mesh, shape = stack.device_mesh, tuple(stack.shape)
    _, (first, *_) = compute_local_shape_and_global_offset(shape, mesh, stack.placements)
    axes, placements = [], []
    for axis, placement in enumerate(stack.placements):
        if not placement.is_partial() and not _splits(placement, 0):
            axes.append(axis)
            placements.append(_one_dimension_less(placement))
    local = list(stack.to_local())
    if not axes or all(isinstance(p, Replicate) for p in placements):
        return local, first
    assert mesh.mesh_dim_names is not None, mesh
    rest = mesh[tuple(mesh.mesh_dim_names[axis] for axis in axes)]
    size, stride = torch.Size(shape[1:]), (shape[2], 1)
    return [DTensor.from_local(t, rest, placements, run_check=False, shape=size, stride=stride) for t in local], first


def _stack_like(stack: DTensor, experts: list[torch.Tensor]) -> DTensor:
    local = torch.stack([t.to_local() if isinstance(t, DTensor) else t for t in experts])
    return DTensor.from_local(
        local, stack.device_mesh, stack.placements, run_check=False, shape=stack.shape, stride=stack.stride()
    )


def _splits(placement: Placement, dim: int) -> bool:
    return isinstance(placement, (Shard, StridedShard)) and placement.dim == dim


def _one_dimension_less(placement: Placement) -> Placement:
    if isinstance(placement, StridedShard):
        return StridedShard(placement.dim - 1, split_factor=placement.split_factor)
    return Shard(placement.dim - 1) if isinstance(placement, Shard) else placement
