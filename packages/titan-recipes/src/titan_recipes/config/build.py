"""The config of one run, made of a recipe and a command line in one order: recipe, model, device, flags, mode."""

import difflib
from collections.abc import Collection, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Any

from ..environment import is_first
from ..errors import UserError
from ..logs import say
from ..recipes import load_recipe
from .options import Mode, Options
from .short_names import expand, name_of, refuse_others

__all__ = ["COMPARED_STEPS", "build_config", "prepare_mode", "print_help"]

COMPARED_STEPS = 6
"""Steps of each side of --compare-modes, unless the user gives a number."""


def build_config(options: Options) -> Any:
    """Return the recipe's Trainer.Config with the device's defaults, then the --section.option flags, applied.

    Needs the device to be set. A wrong flag ends the process with tyro's message, which suggests the near one.

    Raises:
        UserError: the recipe returns no Trainer.Config, or a setting makes no run.
    """
    refuse_others(options.titan_args)
    given = {name_of(argument) for argument in options.titan_args}
    config = _from_recipe(options, given)
    arguments = expand(options.titan_args, len(config.optimizer.param_groups))
    given = {name_of(argument) for argument in arguments}
    config = _with_flags(config, options, arguments)
    from ..data.loader import heed_flags

    heed_flags(config.dataloader, given)
    if config.training.steps < 1:
        raise UserError(f"training.steps {config.training.steps} is no run; give 1 or more.")
    if options.profile:
        _trace_one_step(config)
    if options.mode is not None:
        prepare_mode(config, options.mode, None if "training.steps" in given else COMPARED_STEPS)
    return config


def print_help(options: Options, section: str) -> None:
    """Print the options of one section of the recipe's config, such as `training`, with the recipe's values.

    Raises:
        UserError: there is no such section.
    """
    config = _from_recipe(options, ())
    sections = [field.name for field in fields(config) if is_dataclass(getattr(config, field.name))]
    if section not in sections:
        near = difflib.get_close_matches(section, sections, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UserError(f"There is no section {section!r}.{hint}\nSections: {', '.join(sections)}.")
    value = getattr(config, section)
    alone = make_dataclass(section, [(section, type(value), field(default_factory=lambda: value))], kw_only=True)
    _parse(alone, alone(), ["--help"], options.recipe.name)


def _from_recipe(options: Options, given: Collection[str]) -> Any:
    """The recipe's config as one of our trainer, with the model and the device's defaults that were asked for."""
    from torchtitan.trainer import Trainer

    from ..models.spec import use_model
    from .adopt import adopt
    from .device_defaults import apply_device_defaults

    config = load_recipe(options.recipe)()
    if not isinstance(config, Trainer.Config):
        raise UserError(
            f"Recipe {options.recipe.name!r} returned {type(config).__name__}; a recipe returns a TorchTitan "
            "Trainer.Config (use titan_recipes.Trainer.Config)."
        )
    config = adopt(config)
    if options.model or options.route:
        use_model(config, options.model, route=options.route)
    config.dump_folder = options.dump_folder
    for line in apply_device_defaults(config, options.device):
        if line.partition(" ")[0] not in given:  # what the command line names is as it says there
            say(f"{options.device}: {line}")
    return config


def _with_flags(config: Any, options: Options, arguments: Sequence[str]) -> Any:
    """`config` with TorchTitan's --section.option flags."""
    try:
        return _parse(type(config), config, arguments, options.recipe.name)
    except AssertionError as error:  # some of TorchTitan's configs refuse a value so; tyro itself reports ValueErrors
        raise UserError(f"An option has a value that TorchTitan refuses: {error}.") from None


def _parse(cls: type, default: Any, arguments: Sequence[str], recipe: str) -> Any:
    import tyro
    from torchtitan.config.manager import ConfigManager, custom_registry

    ConfigManager()  # registers TorchTitan's parsing rules
    return tyro.cli(
        cls,
        args=list(arguments),
        default=default,
        registry=custom_registry,
        prog=f"apps/train {recipe}",
        console_outputs=is_first(),
    )


def _trace_one_step(config: Any) -> None:
    from ..train.profiler import TRACED_STEP, StepProfiler

    config.profiler = StepProfiler.Config()
    if config.training.steps < TRACED_STEP:
        raise UserError(f"--profile traces step {TRACED_STEP}; give it --training.steps {TRACED_STEP} or more.")


def prepare_mode(config: Any, mode: Mode, steps: int | None) -> None:
    """Make `config` a run to compare: `steps` steps (None: as configured), each logged, none saved or validated."""
    config.compile.enable = mode == "compiled"
    config.metrics.log_freq = 1
    config.validator.enable = False
    config.checkpoint.load_only = True
    if config.debug.seed is None:
        config.debug.seed = 0  # both modes start from the same random weights
    if steps is not None:
        # The learning rate follows the recipe's schedule, not one of these few steps.
        config.lr_scheduler.total_steps = config.lr_scheduler.total_steps or config.training.steps
        config.training.steps = steps
