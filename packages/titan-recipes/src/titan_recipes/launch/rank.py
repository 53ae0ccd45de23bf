"""One rank's life: logging, device, config, training, and on one rank what a run leaves behind.

That rank is the one with the loss, which also prints: rank 0, or with pipeline parallel the first of the last stage.
"""

import os
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..logs import say, set_up_logging
from ..recipes import Recipe, load_recipe
from .compare_modes import STEPS, Mode, prepare

__all__ = ["Options", "Outcome", "build_config", "run_rank", "train_rank"]


@dataclass(frozen=True)
class Options:
    """What the command line asked for. Picklable: spawned ranks get it as it is."""

    recipe: Recipe
    titan_args: tuple[str, ...]
    device: str
    """Resolved: neuron, cuda or cpu."""
    dump_folder: str
    command: str
    """The command as the user typed it, to print how to resume."""
    model: str | None = None
    """Instead of the recipe's: a folder, a Hub id or a name."""
    route: str | None = None
    """Instead of the recipe's: native, transformers or kernels."""
    profile: bool = False
    """Trace one step."""
    mode: Mode | None = None
    """One side of --compare-modes."""


@dataclass(frozen=True)
class Outcome:
    """How a rank ended. `signal` is None when training reached its last step."""

    step: int
    signal: int | None
    graphs: int = 0
    """Graphs that torch.compile made on this rank."""


def build_config(options: Options) -> Any:
    """The recipe's Trainer.Config with the device's defaults, then the --section.option flags, applied.

    Needs the device to be set. A wrong flag ends the process with tyro's message, which suggests the near one.
    """
    import tyro
    from torchtitan.config.manager import ConfigManager, custom_registry
    from torchtitan.trainer import Trainer

    from ..config.device_defaults import apply_device_defaults
    from ..data.loader import heed_flags
    from ..models.spec import use_model
    from ..train.trainer import adopt

    config = load_recipe(options.recipe)()
    if not isinstance(config, Trainer.Config):
        raise UserError(
            f"Recipe {options.recipe.name!r} returned {type(config).__name__}; a recipe returns a TorchTitan Trainer.Config "
            "(use titan_recipes.train.trainer.Trainer.Config)."
        )
    config = adopt(config)
    if options.model or options.route:
        use_model(config, options.model, route=options.route)
    config.dump_folder = options.dump_folder
    for line in apply_device_defaults(config, options.device):
        say(f"{options.device}: {line}")
    ConfigManager()  # registers TorchTitan's parsing rules
    try:
        config = tyro.cli(
            type(config),
            args=list(options.titan_args),
            default=config,
            registry=custom_registry,
            prog=f"apps/train {options.recipe.name}",
            console_outputs=os.environ.get("RANK", "0") == "0",
        )
    except AssertionError as error:  # some of TorchTitan's configs refuse a value so; tyro itself reports ValueErrors
        raise UserError(f"An option has a value that TorchTitan refuses: {error}.") from None
    given = {argument.partition("=")[0].lstrip("-").replace("-", "_") for argument in options.titan_args}
    heed_flags(config.dataloader, given)
    if config.training.steps < 1:
        raise UserError(f"training.steps {config.training.steps} is no run; give 1 or more.")
    if options.profile:
        from ..train.profiler import TRACED_STEP, StepProfiler

        config.profiler = StepProfiler.Config()
        if config.training.steps < TRACED_STEP:
            raise UserError(f"--profile traces step {TRACED_STEP}; give it --training.steps {TRACED_STEP} or more.")
    if options.mode is not None:
        prepare(config, options.mode, None if "training.steps" in given else STEPS)
    return config


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


_BLOCKING = {"neuron": "NEURON_LAUNCH_BLOCKING", "cuda": "CUDA_LAUNCH_BLOCKING"}


def explain_late_error(error: BaseException, device: str) -> str:
    """A note for an error that a device may have reported late, else nothing. Accelerators run behind the host: an
    operation's error, out-of-memory included, surfaces where the host next waits for the device."""
    variable = _BLOCKING.get(device)
    if variable is None or not isinstance(error, RuntimeError) or os.environ.get(variable) == "1":
        return ""
    return (
        f"\nnote: the {device} device reports errors late. The operation that failed may lie before the last line above;\n"
        f"run again with {variable}=1 (slower) and the traceback ends at it."
    )


def _print_error(text: str) -> None:
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    head = f"[rank {rank} of {world}] " if world != "1" else ""
    sys.stderr.write(head + text.rstrip() + "\n")


def train_rank(options: Options) -> Outcome:
    """The whole of a rank's work. Expects RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them."""
    import torch

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    set_up_logging(Path(options.dump_folder) / "logs" / f"rank-{rank}.log", console=False)
    from ..device.select import set_device

    changes = set_device(options.device)
    if options.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or max(1, usable_cores() // local_world)))
    from torch import distributed as dist
    from torchtitan.components.metrics import _get_metrics_rank
    from torchtitan.distributed import ParallelDims

    config = build_config(options)
    dims = ParallelDims.from_config(config.parallelism, world)
    prints = rank == _get_metrics_rank(parallel_dims=dims, pp_schedule=config.parallelism.pipeline_parallel_schedule)
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
        folder = Path(options.dump_folder) / config.checkpoint.folder / f"step-{step}"
        where = (
            f"checkpoint: {folder}" if step and config.checkpoint.enable else "no step was finished, nothing to save"
        )
        say(f"\nstopped by {signal.Signals(stopped_by).name} after step {step}. {where}")
        if step and config.checkpoint.enable and not config.checkpoint.load_only:
            say(f"to go on:  {options.command}")
    elif prints and config.checkpoint.enable and not config.checkpoint.load_only:
        from ..publish.publish import publish

        publish(trainer)
    from torch._dynamo.utils import counters

    return Outcome(step, stopped_by, counters["stats"]["unique_graphs"])


def usable_cores() -> int:
    """Cores that this process may use: a container or taskset often allows fewer than the host has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
