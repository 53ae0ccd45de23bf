"""State that only TorchTitan has (expert load-balancing bias, counters): beside an export, and back on
import.

It lies in a folder of its own, where neither Transformers nor a server that globs `*.safetensors` takes it
for weights. It is small: a vector of experts for each layer.
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

__all__ = ["read_side_state", "side_file_bytes"]

MAX_SIDE_STATE = 64 << 20
_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.moe\.(expert_bias_E|tokens_per_expert_E)")


def read_side_state(
    source: TensorSource, reading: Reading, folder: Path, *, follow_symlinks: bool = False
) -> dict[str, torch.Tensor]:
    """Native-only state by native name: from the checkpoint itself, or from the side file of an export.

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


def side_file_bytes(state: Mapping[str, torch.Tensor]) -> bytes:
    """The side file as a whole."""
    infos = tensor_order({n: TensorInfo(t.dtype, tuple(t.shape)) for n, t in state.items()})
    return header_bytes(infos) + b"".join(tensor_bytes(state[n]) for n in infos)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of a small tensor's bytes."""
    data, copy = buffer(tensor.dtype, tuple(tensor.shape))
    copy.copy_(tensor)
    return bytes(data)
