"""First-step guard: every parameter and buffer was written before the first step, each element of a load exactly once.

By bookkeeping, not by looking at losses: before initialisation and before each load the tensors are poisoned (NaN;
integers their smallest value), afterwards none may still be; and while DCP loads, the boxes that it fills are counted.
A RoPE table that nobody computed, or an expert that no file held, stops the run with its name, where a loss would have
fallen all the same.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor
from torchtitan.protocols.model_spec import ModelSpec

from ..errors import UserError

__all__ = ["CountingPlanner", "check_written", "guard_initialisation", "local_part", "poison", "states_of"]

_CHUNK = 1 << 24
"""Elements looked at in one go: the comparison's temporary stays at 16 MB."""

Named = Iterable[tuple[str, torch.Tensor]]


def states_of(parts: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer, persistent or not; a tied one once."""
    for part in parts:
        yield from part.named_parameters()
        yield from part.named_buffers()


@torch.no_grad()
def poison(tensors: Named) -> None:
    """Overwrite `tensors` with what no initialiser or checkpoint writes. Booleans, which have no such value, stay."""
    for _, tensor in tensors:
        local = local_part(tensor)
        if local.dtype is not torch.bool:
            local.fill_(_poison_of(local.dtype))


@torch.no_grad()
def check_written(tensors: Named, when: str) -> None:
    """Raise UserError with the names of the tensors that hold poison anywhere. `when` completes "after ...".

    A NaN that was read from a checkpoint counts too: it is no weight to start from.
    """
    unwritten = [name for name, tensor in tensors if _is_poisoned(local_part(tensor))]
    if unwritten:
        raise UserError(
            f"{len(unwritten)} parameters or buffers hold no value after {when}: {_shorten(unwritten)}.\n"
            "They were not written, or a NaN was written. The run stops here, since the loss could fall all the same; "
            "check the weights with `hf-ckpt verify`, and the model code's initialisation for the names above."
        )


def guard_initialisation(spec: ModelSpec) -> ModelSpec:
    """`spec`, whose models check that their `init_weights` writes every parameter and buffer.

    What was built frozen stays frozen.
    """
    return replace(spec, parallelize_fn=partial(_guarded, spec.parallelize_fn))


def _guarded(parallelize: Callable[..., nn.Module], model: nn.Module, **kwargs: Any) -> nn.Module:
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    model = parallelize(model, **kwargs)
    _freeze(model, frozen)
    initialise: Callable[..., None] = model.init_weights  # type: ignore[assignment]

    def init_weights(**options: Any) -> None:
        poison(states_of([model]))
        initialise(**options)
        check_written(states_of([model]), "initialisation")

    model.init_weights = init_weights  # type: ignore[assignment]
    return model


def _freeze(model: nn.Module, frozen: set[str]) -> None:
    """Freeze the parameters of these names again.

    TorchTitan's sharding makes new parameters of a model's, and those train whatever the old ones did: all of a
    LoRA's base.
    """
    found = {name.replace("_orig_mod.", ""): parameter for name, parameter in model.named_parameters()}
    if lost := sorted(frozen - found.keys()):
        raise UserError(
            f"{len(lost)} parameters that the recipe froze have other names once the model is parallelised, and would "
            f"train: {_shorten(lost)}.\nTrain without this layout, or without freezing them."
        )
    for name in frozen:
        found[name].requires_grad_(False)


class CountingPlanner(DefaultLoadPlanner):
    """DCP's planner that remembers which boxes of the state dict were filled."""

    def __init__(self) -> None:
        super().__init__()
        self.filled: dict[str, list[tuple[Any, tuple[int, ...], tuple[int, ...]]]] = {}

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Note which elements were written."""
        where = read_item.dest_index
        box = (where, tuple(read_item.dest_offsets), tuple(read_item.lengths))
        self.filled.setdefault(where.fqn, []).append(box)
        super().commit_tensor(read_item, tensor)

    def check(self, source: str) -> None:
        """Raise UserError unless every element of every tensor was filled once."""
        wrong = []
        for name, tensor in self.state_dict.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            boxes = self.filled.get(name, [])
            have, want = sum(math.prod(lengths) for _, _, lengths in boxes), local_part(tensor).numel()
            if have != want or _overlap(boxes):
                wrong.append(f"{name} ({have:,} of {want:,} elements written)")
        if wrong:
            raise UserError(
                f"{len(wrong)} tensors were not written exactly once while loading {source}: {_shorten(wrong)}.\n"
                "The checkpoint is damaged, or its reader and this model disagree; check it with `hf-ckpt verify`."
            )


def _overlap(boxes: list[tuple[Any, tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether two boxes of the same shard share an element."""
    for i, (where, begins, lengths) in enumerate(boxes):
        for other, other_begins, other_lengths in boxes[:i]:
            if where == other and all(
                a < b + m and b < a + n for a, n, b, m in zip(begins, lengths, other_begins, other_lengths, strict=True)
            ):
                return True
    return False


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, without gradient; shares its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _poison_of(dtype: torch.dtype) -> float | int:
    return math.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _is_poisoned(local: torch.Tensor) -> bool:
    if local.dtype is torch.bool or local.numel() == 0:
        return False
    rows = max(1, _CHUNK // max(1, local[0].numel() if local.dim() else 1))
    parts = local.split(rows) if local.dim() else (local,)
    if local.dtype.is_floating_point or local.dtype.is_complex:
        return any(bool(part.isnan().any()) for part in parts)
    return any(bool((part == _poison_of(local.dtype)).any()) for part in parts)


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
