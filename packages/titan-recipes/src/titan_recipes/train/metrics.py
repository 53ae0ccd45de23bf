"""Progress that a person can read, and the same numbers in metrics.jsonl and TensorBoard.

MFU is shown where TorchTitan knows the device's peak (its figure per logical NeuronCore: 158 TFLOPS), never on a CPU.
"""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils

from ..files import replacing
from ..logs import say
from ..upstream import get_metrics_rank
from .device_memory import MemoryWatch

__all__ = ["METRICS_FILE", "RunMetrics", "format_duration", "read_metrics"]

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class RunMetrics(MetricsProcessor):
    """TorchTitan's metrics processor with our console line and a JSON line per logged step."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        disable_color_printing: bool = True
        """TorchTitan's own lines go to a file, where colour codes are noise."""

    def __init__(
        self, config: Config, *, parallel_dims: ParallelDims, dump_folder: str = "./outputs", **kwargs: Any
    ) -> None:
        super().__init__(config, parallel_dims=parallel_dims, dump_folder=dump_folder, **kwargs)
        pp_schedule = kwargs.get("pp_schedule", "1F1B")
        self.prints = dist.get_rank() == get_metrics_rank(parallel_dims=parallel_dims, pp_schedule=pp_schedule)
        self.memory = MemoryWatch(self.device_memory_monitor, warns=self.prints)
        self.file = Path(dump_folder) / METRICS_FILE
        self.total_steps = 0  # set by the trainer, which knows
        self.first_step = 0
        self.validation_loss: float | None = None
        self.more: Callable[[], dict[str, float]] = dict  # what else a logged step records; called on every rank
        self._second_step = 0.0  # when the second step of this process began

    def start(self, loaded_step: int, total_steps: int) -> None:
        """Called once weights are loaded: a resumed run drops the lines that the new steps will write again."""
        self.first_step, self.total_steps = loaded_step, total_steps
        if self.prints and self.file.exists():
            kept = [line for line in read_metrics(self.file) if line["step"] <= loaded_step]
            with replacing(self.file) as temporary:
                temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self.time_last_log = time.perf_counter()

    def should_log(self, step: int) -> bool:
        """Log the last step too."""
        return super().should_log(step) or step == self.total_steps

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Print a line of progress, and write it to metrics.jsonl and TensorBoard."""
        now = time.perf_counter()
        seconds = now - self.time_last_log
        data_ranks = self.parallel_dims.world_size // self.parallel_dims.non_data_parallel_size
        tokens_per_second = self.ntokens_since_last_log * data_ranks / seconds
        memory, more = self.memory.look(), self.more()
        record: dict[str, Any] = {
            "step": step,
            "loss": global_avg_loss,
            "grad_norm": grad_norm,
            "tokens_per_second": tokens_per_second,
            "data_loading_share": sum(self.data_loading_times) / seconds,
            **memory.record(),
            **more,
            **{name.replace("/", "_"): value for name, value in (extra_metrics or {}).items()},
        }
        if utils.device_type != "cpu":
            per_device = tokens_per_second / self.parallel_dims.world_size
            record["mfu_percent"] = 100 * self.num_flops_per_token * per_device / self.gpu_peak_flops
        self._write(step, record)
        done = step - self.first_step
        # The first step pays for warming up (on Neuron, compiling): leave it out of the estimate.
        left = (now - self._second_step) / (done - 1) * (self.total_steps - step) if done > 1 else None
        if done == 1:
            self._second_step = now
        if self.prints:
            mfu = f"  mfu {record['mfu_percent']:.1f}%" if "mfu_percent" in record else ""
            # On a CPU the capacity is the host's, which ranks share.
            capacity = f" of {memory.capacity:.2f}" if utils.device_type != "cpu" else ""
            ending = f"  {format_duration(left)} left" if left is not None and step < self.total_steps else ""
            shown = "".join(f"  {name.replace('_', ' ')} {value:.4g}" for name, value in more.items())
            say(
                f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  loss {global_avg_loss:7.4f}{shown}"
                f"  {tokens_per_second:>7,.0f} tok/s{mfu}  {memory.highest:.2f}{capacity} GiB{ending}"
            )
        self._reset()

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """Print the loss on held-out text, and write it."""
        self.validation_loss = loss
        self._write(step, {"step": step, "validation_loss": loss, **(extra_metrics or {})})
        if self.prints:
            say(f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  validation loss {loss:.4f}")
        self._reset()

    def _write(self, step: int, record: dict[str, Any]) -> None:
        scalars = {key: value for key, value in record.items() if key != "step" and isinstance(value, int | float)}
        try:
            self.logger.log(scalars, step)
            if self.prints:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                with self.file.open("a") as file:
                    file.write(json.dumps(record) + "\n")
        except OSError as error:  # a full disk: training is worth more than its record
            log.warning("step %d: the metrics were not written: %s", step, error)

    def _reset(self) -> None:
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.device_memory_monitor.reset_peak_stats()
        self.time_last_log = time.perf_counter()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line cut short by a kill is skipped."""
    records = []
    for line in file.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def format_duration(seconds: float) -> str:
    """1h02m, 3m05s, 12s."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
