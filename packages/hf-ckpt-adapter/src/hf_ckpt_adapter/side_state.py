"""State that only TorchTitan has (the experts' load-balancing bias, counters): it lies beside an export and comes back.

It has a folder of its own, where neither Transformers nor a server that globs `*.safetensors` takes it for weights. It
is
small: one number for each expert of each layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from .formats.files import SIDE_FILE, SIDE_FOLDER, inner_folder
from .formats.safetensors import SafetensorsFolder, header_bytes, tensor_order
from .formats.tensors import TensorInfo, TensorSource, buffer
from .names.read import Reading
from .names.table import Layout
from .plan import Plan

__all__ = ["check_side", "read_side_state", "side_file_bytes", "side_names", "tensor_bytes"]

MAX_SIDE_STATE = 64 << 20
_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.moe\.(expert_bias_E|tokens_per_expert_E)")


def read_side_state(
    source: TensorSource, reading: Reading, folder: Path, *, follow_symlinks: bool = False
) -> dict[str, torch.Tensor]:
    """Native-only state by native name, out of the checkpoint itself or out of the side file of an export.

    Args:
        source: the opened checkpoint.
        reading: what its names are.
        folder: the checkpoint's folder.
        follow_symlinks: trust links that lead out of it.

    Returns:
        Native name -> tensor; empty when there is none.

    Raises:
        ValueError: the side file is hostile, holds anything else, or is too large for what it is.
    """
    if reading.side:
        return _read(source, reading.side, str(folder))
    home = inner_folder(folder, SIDE_FOLDER, follow_symlinks=follow_symlinks)
    if not home.is_dir():
        return {}
    side = SafetensorsFolder(home, follow_symlinks=follow_symlinks)
    try:
        strange = [n for n in side.tensors if not _NAME.fullmatch(n)]
        if strange:
            raise ValueError(f"{folder / SIDE_FILE} holds {strange[0]!r}, which is not native-only state")
        return _read(side, {n: n for n in side.tensors}, str(folder / SIDE_FILE))
    finally:
        side.close()


def _read(source: TensorSource, names: Mapping[str, str], where: str) -> dict[str, torch.Tensor]:
    size = sum(source.tensors[stored].nbytes for stored in names.values())
    if size > MAX_SIDE_STATE:
        raise ValueError(f"{where} has {size} bytes of native-only state; up to {MAX_SIDE_STATE} are read")
    state = {}
    for name, stored in sorted(names.items()):
        info = source.tensors[stored]
        if len(info.shape) != 1:
            raise ValueError(f"{where}: {stored!r} has shape {list(info.shape)}; expected one number for each expert")
        data, state[name] = buffer(info.dtype, info.shape)
        source.read_rows(stored, 0, data)
    return state


def check_side(state: Mapping[str, torch.Tensor], plan: Plan) -> None:
    """ValueError unless native-only state has one number for each expert of MoE layers that this model has."""
    for name, tensor in state.items():
        layer = int(name.split(".")[1])
        if layer not in plan.reading.experts or tuple(tensor.shape) != (plan.sizes.num_experts,):
            raise ValueError(
                f"native-only state {name!r} of shape {list(tensor.shape)} is not of this model, which "
                f"has {plan.sizes.num_experts} experts in layers {sorted(plan.reading.experts)}"
            )


def side_names(state: Mapping[str, torch.Tensor], plan: Plan, *, fill: bool = True) -> dict[str, torch.Tensor]:
    """Native-only state under the names of a TorchTitan layout.

    With `fill`, a MoE layer without any gets a zero bias: TorchTitan's model has that buffer (moe.py,
    `load_balance_coeff`) and DCP refuses to load a model of which the checkpoint lacks a name.
    """
    layers = plan.reading.experts if fill else ()
    full = {f"layers.{n}.moe.expert_bias_E": torch.zeros(plan.sizes.num_experts) for n in layers}
    full.update(state)
    if plan.layout is Layout.BACKEND:
        full = {re.sub(r"^layers\.(\d+)\.moe\.", r"model.model.layers.\1.mlp.", n): t for n, t in full.items()}
    return dict(sorted(full.items()))


def side_file_bytes(state: Mapping[str, torch.Tensor]) -> bytes:
    """The side file as a whole."""
    infos = tensor_order({n: TensorInfo(t.dtype, tuple(t.shape)) for n, t in state.items()})
    return header_bytes(infos) + b"".join(tensor_bytes(state[n]) for n in infos)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of a small tensor's bytes."""
    data, copy = buffer(tensor.dtype, tuple(tensor.shape))
    copy.copy_(tensor)
    return bytes(data)
