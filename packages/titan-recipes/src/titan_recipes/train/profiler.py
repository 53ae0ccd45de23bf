"""`--profile`: a torch profiler trace of one step, on the host and on whichever device there is."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.profiler import ProfilerActivity
from torchtitan.tools import utils
from torchtitan.tools.profiler import Profiler

from ..logs import say

__all__ = ["TRACED_STEP", "StepProfiler"]

log = logging.getLogger(__name__)

TRACED_STEP = 4
"""The step of this process that is traced, counted from 1.

The first three pay for warming up, and on Neuron for compiling.
"""

# TorchTitan's profiler knows CUDA and XPU; Neuron is PyTorch's PrivateUse1.
_ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "neuron": ProfilerActivity.PrivateUse1}


class StepProfiler(Profiler):
    """TorchTitan's profiler with one trace, <run>/profile/rank-N.json.gz, and Neuron's activity."""

    @dataclass(kw_only=True, slots=True)
    class Config(Profiler.Config):
        enable_profiling: bool = True

    _written = False

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        profiled = self.torch_profiler is not None
        swallowed = super().__exit__(kind, error, trace)
        if profiled and kind is None and not self._written:
            log.warning(
                "no trace was written: this process ended before its step %d, which --profile traces", TRACED_STEP
            )
        return swallowed

    def build_torch_profiler(self, *, global_step: int, base_folder: str, leaf_folder: str) -> Any:
        """Started, or None when disabled."""
        if not self._config.enable_profiling:
            return None
        file = Path(base_folder) / "profile" / f"rank-{dist.get_rank()}.json.gz"
        activities = [ProfilerActivity.CPU]
        if utils.device_type in _ACTIVITIES:
            activities.append(_ACTIVITIES[utils.device_type])

        def write(profiler: torch.profiler.profile) -> None:
            self._written = True
            file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))
            say(f"trace of step {global_step + TRACED_STEP}: {file} (open it in ui.perfetto.dev)")

        profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=TRACED_STEP - 2, warmup=1, active=1, repeat=1),
            on_trace_ready=write,
            record_shapes=True,
        )
        profiler.__enter__()
        return profiler
