"""One rank's life: logging, device, config, training, and on one rank what a run leaves behind.

That rank is the one with the loss, which also prints: rank 0, or with pipeline parallel the first of the last stage.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from .. import environment
from ..checkpoint.steps import step_folder
from ..config.build import build_config
from ..config.options import Options
from ..errors import UserError
from ..logs import say, set_up_logging

__all__ = ["Outcome", "run_rank", "train_rank"]


@dataclass(frozen=True)
class Outcome:
    """How a rank ended. `signal` is None when training reached its last step."""

    step: int
    signal: int | None
    graphs: int = 0
    """Graphs that torch.compile made on this rank."""


def run_rank(options: Options) -> Outcome:
    """Train on this rank. A failing rank prints its own traceback at once, so that it comes before any launcher's."""
    try:
        return train_rank(options)
    except SystemExit:
        raise
    except UserError as error:
        _print_error(f"error: {error}")
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)  # before training began; whoever started this rank says so
    except BaseException as error:
        _print_error(traceback.format_exc() + explain_late_error(error, options.device))
    sys.stderr.flush()
    os._exit(1)  # skips atexit: collectives of a broken group can block there


class _Stopped(BaseException):
    """SIGINT or SIGTERM arrived."""


def until_signal(work: Callable[[], None]) -> int | None:
    """Call `work` and return None, or the number of the SIGINT or SIGTERM that ended it at once."""
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise _Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        work()
    except _Stopped:
        return received[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return None


def explain_late_error(error: BaseException, device: str) -> str:
    """Return a note for an error that a device may have reported late, else nothing.

    Accelerators run behind the host: an operation's error, out-of-memory included, surfaces where the host next waits.
    """
    variable, is_set = environment.blocks_at_each_launch(device)
    if is_set or not isinstance(error, RuntimeError):
        return ""
    return (
        f"\nnote: the {device} device reports errors late. The operation that failed may lie before the last line "
        "above;\n"
        f"run again with {variable}=1 (slower) and the traceback ends at it."
    )


def _print_error(text: str) -> None:
    rank, world = environment.rank(), environment.world_size()
    head = f"[rank {rank} of {world}] " if world > 1 else ""
    sys.stderr.write(head + text.rstrip() + "\n")


def train_rank(options: Options) -> Outcome:
    """The whole of a rank's work.

    Expects RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them.
    """
    import torch

    rank, world = environment.rank(), environment.world_size()
    set_up_logging(Path(options.dump_folder) / "logs" / f"rank-{rank}.log", console=False)
    from ..device.select import set_device

    changes = set_device(options.device)
    if options.device == "cpu":
        torch.set_num_threads(environment.usable_threads())
    from torch import distributed as dist
    from torchtitan.distributed import ParallelDims

    from ..upstream import get_metrics_rank, graph_counters

    config = build_config(options)
    dims = ParallelDims.from_config(config.parallelism, world)
    prints = rank == get_metrics_rank(parallel_dims=dims, pp_schedule=config.parallelism.pipeline_parallel_schedule)
    set_up_logging(Path(options.dump_folder) / "logs" / f"rank-{rank}.log", console=prints)
    import logging

    for line in changes:
        logging.getLogger(__name__).info("device: set %s", line)
    trainer = None
    try:
        trainer = config.build()
        trainer.recipe = {
            "recipe": options.recipe.name,
            "function": options.recipe.function,
            "arguments": list(options.titan_args),
            "device": options.device,
            "config": config.to_dict(),
        }
        trainer.recipe_source = Path(options.recipe.source) if options.recipe.is_file else None
        trainer.train()
    finally:
        if trainer is not None:
            trainer.close()
    stopped_by = None if trainer.finished else trainer.stop.signal
    step = trainer.step
    dist.destroy_process_group()
    if prints and stopped_by is not None:
        folder = step_folder(Path(options.dump_folder) / config.checkpoint.folder, step)
        where = (
            f"checkpoint: {folder}" if step and config.checkpoint.enable else "no step was finished, nothing to save"
        )
        say(f"\nstopped by {signal.Signals(stopped_by).name} after step {step}. {where}")
        if step and config.checkpoint.enable and not config.checkpoint.load_only:
            say(f"to go on:  {options.command}")
    elif prints and config.checkpoint.enable and not config.checkpoint.load_only:
        from ..publish.publish import publish

        stopped_by = until_signal(lambda: publish(trainer))
        if stopped_by is not None:
            folder = step_folder(Path(options.dump_folder) / config.checkpoint.folder, step)
            say(f"\nstopped by {signal.Signals(stopped_by).name} during the export; training is finished: {folder}")
            say(f"to export:  {options.command}")
    return Outcome(step, stopped_by, graph_counters["stats"]["unique_graphs"])
