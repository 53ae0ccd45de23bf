"""What is looked at while a run trains: losses that stop being finite, and batch shapes that were not seen before."""

import logging
from collections.abc import Callable

import torch

from ..errors import UserError

__all__ = ["LossWatch", "ShapeWatch"]

log = logging.getLogger(__name__)

_NEVER = 1 << 62


class LossWatch:
    """Keeps each step's loss on the device and looks at it where the host waits for the device anyway."""

    def __init__(self) -> None:
        self.first = torch.zeros(())
        self._step = -1
        self._unseen: list[tuple[int, torch.Tensor]] = []

    def add(self, step: int, loss: torch.Tensor) -> None:
        """`loss` of one micro-batch of `step`: this rank's part of the mean."""
        loss = loss.detach().clone()  # under CUDA graphs the next replay overwrites it
        if self._step in (-1, step):
            self._step, self.first = step, self.first.to(loss.device) + loss.sum()
        self._unseen.append((step, loss))

    def check(self, highest: Callable[[int], int] = int) -> None:
        """Raise UserError with the first step whose loss was not finite; `highest` of all ranks asks for one on any
        rank.
        """
        seen, self._unseen = self._unseen, []
        bad = -highest(-next((step for step, loss in seen if not bool(loss.isfinite().all())), _NEVER))
        if bad < _NEVER:
            raise UserError(
                f"The loss of step {bad} is not finite; nothing was saved since. The checkpoints before are good.\n"
                "Look at that step's batch (positions, ids, labels), lower the learning rate, or resume from the last "
                "checkpoint with other data (--dataloader.seed)."
            )


class ShapeWatch:
    """Warns when a batch has a shape that no batch had before: on Neuron each one is minutes of compilation."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def see(self, batch: dict[str, torch.Tensor]) -> None:
        """Warn when a batch has a shape that no batch had before."""
        signature = ", ".join(f"{name} {tuple(t.shape)} {str(t.dtype)[6:]}" for name, t in sorted(batch.items()))
        if signature in self.seen:
            return
        self.seen.append(signature)
        if len(self.seen) > 1:
            log.warning(
                "%d distinct batch shapes so far, each compiles a graph on Neuron: %s",
                len(self.seen),
                " | ".join(self.seen),
            )
