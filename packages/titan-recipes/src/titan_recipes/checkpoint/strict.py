"""Strict loading: a checkpoint has exactly the keys and shapes that the run wants, or the run stops with
their names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer.base import DATALOADER, LR_SCHEDULER, OPTIMIZER, TRAIN_STATE

from ..errors import UserError
from ..upstream import flatten_state_dict

__all__ = ["compare_with_checkpoint", "zero_biases"]


def compare_with_checkpoint(
    state_dict: dict[str, Any], metadata: Metadata, checkpoint: str, excluded: Sequence[str] = ()
) -> None:
    """Raise UserError listing keys that are missing, unexpected or of another shape in a checkpoint. Collective.

    A model-only load (no train_state among the wanted keys) may leave the checkpoint's optimizer and loader state
    aside.
    """
    wanted, _ = flatten_state_dict({k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state_dict.items()})
    found = metadata.state_dict_metadata
    missing = sorted(wanted.keys() - found.keys())
    model_only = not any(key.startswith(f"{TRAIN_STATE}.") for key in wanted)
    skipped = tuple(
        f"{key}." for key in ((TRAIN_STATE, OPTIMIZER, DATALOADER, LR_SCHEDULER) if model_only else excluded)
    )
    unexpected = sorted(
        key
        for key in found.keys() - _names_of_all_ranks(wanted)
        if not key.startswith(skipped) and not _optimizer(key, skipped)
    )
    shapes = []
    for key, value in sorted(wanted.items()):
        stored = found.get(key)
        if isinstance(value, torch.Tensor) and isinstance(stored, TensorStorageMetadata) and stored.size != value.shape:
            shapes.append(f"{key}: {tuple(stored.size)} in the checkpoint, {tuple(value.shape)} here")
    lines = [
        f"{len(keys)} {what}: {'; '.join(keys[:4])}{' ...' if len(keys) > 4 else ''}"
        for what, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if keys
    ]
    if lines:
        raise UserError(
            f"{checkpoint} does not fit this recipe:\n  "
            + "\n  ".join(lines)
            + "\nResume with the recipe that wrote it (its "
            "assets/recipe.json), or leave parts out with --checkpoint.exclude_from_loading "
            "optimizer,lr_scheduler,dataloader."
        )


def zero_biases(reader: StorageReader, wanted: Mapping[str, Any]) -> set[str]:
    """Names of expert biases in a checkpoint that this model does not have and that are zero.

    A conversion adds them, because TorchTitan's model may have such a buffer, and routes as if there were none.
    """
    described = reader.read_metadata().state_dict_metadata
    biases = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if name.endswith("expert_bias_E") and name not in wanted and isinstance(entry, TensorStorageMetadata)
    }
    if biases:
        dcp.load(biases, storage_reader=reader, no_dist=True)
    return {name for name, bias in biases.items() if not bias.any()}


def _names_of_all_ranks(wanted: dict[str, Any]) -> set[str]:
    """A pipeline stage holds some of the layers; a checkpoint holds those of all."""
    names: list[Any] = [list(wanted)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        names *= dist.get_world_size()
        dist.all_gather_object(names, list(wanted))
    return set().union(*names)


def _optimizer(key: str, skipped: tuple[str, ...]) -> bool:
    """TorchTitan's optimizer keys are flat: state.<parameter>.<moment> and param_groups.<parameter>.<setting>."""
    return f"{OPTIMIZER}." in skipped and key.startswith(("state.", "param_groups."))
