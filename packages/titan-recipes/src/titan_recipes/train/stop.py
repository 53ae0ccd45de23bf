"""Stop a run between two steps when SIGINT or SIGTERM arrives, on all ranks at the same step."""

import signal
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist

__all__ = ["StopRequest"]


class StopRequest:
    """Remembers the first signal; ranks agree on it before each step.

    The agreement is one all-reduce of a host integer over gloo (hosts only, so it never waits for a device). A second
    SIGINT ends the process at once, as does a SIGINT before training has begun.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._group: Any = None
        if dist.get_world_size() > 1:
            gloo = dist.get_backend() == "gloo"
            self._group = dist.group.WORLD if gloo else dist.new_group(backend="gloo")

    def install(self) -> None:
        """Catch SIGINT and SIGTERM from here on (main thread only)."""
        signal.signal(signal.SIGINT, self._remember)
        signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        self.signal = self.signal or number

    def agreed(self) -> bool:
        """True on every rank as soon as one rank was signalled. Collective."""
        self.signal = self.highest(self.signal or 0) or None
        return self.signal is not None

    def highest(self, value: int) -> int:
        """The highest `value` of all ranks. Collective."""
        if self._group is None:
            return value
        found = torch.tensor(value)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return int(found)
