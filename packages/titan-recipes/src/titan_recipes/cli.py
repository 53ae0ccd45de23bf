"""The command line of apps/train: parse, check, start the ranks. Nothing heavy is imported before it is needed."""

import argparse
import os
import signal
import socket
import sys
import textwrap
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from . import environment
from .config.options import OUTPUTS, Options
from .errors import UserError
from .recipes import Recipe, find_recipe, list_recipes, read_figures

__all__ = ["main"]

DEFAULT_RECIPE = "debug"

_EPILOG = """\
Every option of TorchTitan's config passes through as --section.option value, for instance
  apps/train debug --training.steps 50 --validator.no-enable
  apps/train debug --training.local_batch_size 4 --parallelism.tensor_parallel_degree 2
  apps/train debug --lr 3e-4 --steps 50 --batch 8 --seq 256 --data corpus.jsonl
--lr, --steps, --batch (sequences of a step), --seq and --data are short for options that everybody sets.
A recipe is a function that returns the whole config; apps/train RECIPE --help lists what can be set on it,
apps/train RECIPE --help SECTION one section of that, such as training, optimizer, dataloader or checkpoint.
Multi-node: torchrun --nnodes 4 --nproc-per-node 64 --rdzv-backend c10d --rdzv-endpoint HOST:29500 apps/train RECIPE ...
"""


def main(arguments: list[str], recipes: Path) -> int:
    """Run apps/train with `arguments`; `recipes` is the folder of short names. Returns the exit code."""
    try:
        return _main(arguments, recipes)
    except UserError as error:
        where = "" if environment.is_first() else f"[rank {environment.rank()} on {socket.gethostname()}] "
        print(f"{where}error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted before training began", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read our output has enough of it; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="apps/train",
        usage="apps/train [RECIPE] [--nproc N] [--device D] [--resume] [--section.option value ...]",
        description="Train a Qwen3 with TorchTitan. RECIPE is a name from --list, module:function, or "
        f"path/to/file.py:function; without one, {DEFAULT_RECIPE!r}.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "-h",
        "--help",
        action="store_true",
        help="this text; after a RECIPE, all options of its config; --help SECTION: those of one section",
    )
    parser.add_argument("--list", action="store_true", help="list the recipes, one line each")
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="ranks on this host (default: the product of the recipe's degrees)",
    )
    parser.add_argument("--device", default="auto", help="auto (default), neuron, cuda or cpu")
    parser.add_argument(
        "--emulate",
        action="store_true",
        help="with --device neuron: on an emulated device (package neuron-emu), on CPU",
    )
    parser.add_argument(
        "--model",
        metavar="M",
        help="instead of the recipe's: a folder (its weights are where training starts), a Hub id in the local cache, "
        "or a name",
    )
    parser.add_argument(
        "--route", metavar="R", help="instead of the recipe's: native, transformers, or kernels (see docs/routes.md)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last good checkpoint in --dump_folder, or in this recipe's newest run",
    )
    parser.add_argument(
        "--strict-resume",
        action="store_true",
        help="with --resume: stop when the newest step is damaged, instead of going on from the last good one",
    )
    parser.add_argument(
        "--dump_folder", metavar="DIR", help=f"where the run writes (default: {OUTPUTS}/RECIPE-DATE-TIME)"
    )
    parser.add_argument(
        "--compare-modes",
        action="store_true",
        help="run a few steps eagerly and compiled, and print losses, step times, graphs and where they part",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="no device, no training: print mesh, memory and shapes as planned"
    )
    parser.add_argument(
        "--instance",
        metavar="X",
        help="the machine that memory is checked for (default: the one this is, else trn2.48xlarge)",
    )
    parser.add_argument("--profile", action="store_true", help="write a torch profiler trace of one step")
    parser.add_argument(
        "--allow-untested",
        action="store_true",
        help="run with untested torch, torchtitan or transformers minors",
    )
    return parser


def _main(arguments: list[str], recipes: Path) -> int:
    asked, rest = _parser().parse_known_args(arguments)
    named = bool(rest) and not rest[0].startswith("-")
    if asked.help and not named:
        _parser().print_help()
        return 0
    if asked.list:
        _print_list(recipes)
        return 0
    name = rest.pop(0) if named else DEFAULT_RECIPE
    _refuse_unheeded(asked)
    if environment.is_restart() and not (asked.dry_run or asked.compare_modes):
        asked.resume = True
    recipe = find_recipe(name, recipes)
    _warn_of_untested(asked.allow_untested)
    if environment.is_first():
        print(f"{recipe.name}: loading torch and TorchTitan ...", flush=True)
    options = _options(asked, recipe, rest, arguments)
    if asked.help and rest and not rest[0].startswith("-"):
        from .config.build import print_help

        print_help(replace(options, titan_args=()), rest[0])
    if asked.help:
        from .config.build import build_config

        build_config(replace(options, titan_args=(*rest, "--help")))
    if asked.dry_run:
        return _dry_run(asked, options)
    try:
        return _train(asked, options)
    finally:
        with suppress(OSError):  # a folder that was made for this run goes if nothing was written to it
            Path(options.dump_folder).rmdir()
            Path(OUTPUTS).rmdir()


def _warn_of_untested(allowed: bool) -> None:
    from .versions import check_versions

    for mismatch in check_versions(allowed):
        print(f"warning: untested {mismatch}", file=sys.stderr)


def _options(asked: argparse.Namespace, recipe: Recipe, rest: list[str], arguments: list[str]) -> Options:
    """The run that was asked for; its device is chosen and set."""
    from .device.emulate import emulate
    from .device.select import choose_device, set_device
    from .launch.command import resume_command
    from .launch.run_folder import run_folder
    from .logs import set_up_logging

    set_up_logging(None, console=environment.is_first())
    if asked.emulate:
        emulate(asked.device)
    device = choose_device("cpu" if asked.dry_run else asked.device)
    if asked.instance and not asked.dry_run and device != "neuron":
        raise UserError(f"--instance is for Neuron's memory, or a --dry-run; this run is on {device}.")
    trains = not (asked.help or asked.dry_run)
    folder = asked.dump_folder or (run_folder(recipe, resume=asked.resume) if trains else OUTPUTS)
    set_device(device)
    if device == "neuron":
        from neuron_parallel.launch_files import PROCESS_VARIABLES

        environment.set_where_unset({name: value for name, (value, _) in PROCESS_VARIABLES.items()})
    if device == "cpu":
        import torch

        # Ranks are forked: an OpenMP pool that a recipe's tensors made in this process would be dead in theirs, and
        # waited for. With one thread there is no pool; each rank sets its own number.
        torch.set_num_threads(1)
    if asked.strict_resume:
        rest = [*rest, "--checkpoint.strict_resume"]
    return Options(
        recipe=recipe,
        titan_args=tuple(rest),
        device=device,
        dump_folder=folder,
        command=resume_command(arguments, folder),
        model=asked.model,
        route=asked.route,
        profile=asked.profile,
    )


def _dry_run(asked: argparse.Namespace, options: Options) -> int:
    from .config.build import build_config
    from .preflight.dry_run import dry_run

    return dry_run(build_config(replace(options, device="neuron")), asked.nproc, asked.instance)


def _train(asked: argparse.Namespace, options: Options) -> int:
    """Check the run, say what it is, and start its ranks. Returns the exit code."""
    from .config.build import build_config
    from .moe.kernels import check_overrides
    from .preflight.checks import check
    from .preflight.layout import world_size_of
    from .preflight.plan import check_memory

    config = build_config(options)
    launched = environment.is_launched()
    world = environment.world_size() if launched else asked.nproc or world_size_of(config)
    overrides = check_overrides(config, options.device)
    check(config, world, resume=asked.resume)
    if options.device == "neuron":
        check_memory(config, world, asked.instance)
    if environment.is_first():
        chosen = " (chosen by auto)" if asked.device == "auto" else ""
        print(f"device: {options.device}{chosen}, {world} rank{'s' if world > 1 else ''}")
        for line in overrides:
            print(f"override: {line}")
        print(f"run folder: {options.dump_folder}", flush=True)
    if asked.compare_modes:
        from .launch.compare_modes import compare_modes

        return compare_modes(options, world, config.training.mixed_precision_param)
    from .launch.run_lock import run_lock

    # The launcher holds the run's folder, or rank 0 where another launcher started the ranks.
    with (
        run_lock(Path(options.dump_folder), wait=environment.is_restart()) if environment.is_first() else nullcontext()
    ):
        if launched:
            from .launch.rank import run_rank

            outcome = run_rank(options)
        else:
            from .launch.elastic import launch

            outcome = launch(options, world)
    return 0 if outcome.signal is None else 128 + outcome.signal


def _refuse_unheeded(options: argparse.Namespace) -> None:
    """UserError for a flag that could not have its effect, alone or beside another."""
    if options.nproc is not None and options.nproc < 1:
        raise UserError(f"--nproc {options.nproc} is not a number of ranks; give 1 or more.")
    if environment.is_launched() and options.nproc not in (None, environment.world_size()):
        raise UserError(
            f"--nproc {options.nproc}, but torchrun started {environment.world_size()} ranks: leave --nproc out."
        )
    if options.strict_resume and not options.resume:
        raise UserError("--strict-resume says how to resume: give --resume too, or leave it out.")
    if environment.is_launched() and options.compare_modes:
        raise UserError("--compare-modes starts its ranks itself, twice: run it without torchrun.")
    for flag, others in {"dry_run": ("compare_modes", "profile", "resume"), "compare_modes": ("resume",)}.items():
        for other in others:
            if getattr(options, flag) and getattr(options, other):
                what = {"dry_run": "trains nothing", "compare_modes": "starts both modes anew"}[flag]
                raise UserError(f"--{flag.replace('_', '-')} {what}: leave --{other.replace('_', '-')} out.")


def _print_list(recipes: Path) -> None:
    """Two lines a recipe, at most 100 columns: its figures, then what it is."""
    figures = read_figures(recipes)
    found = list_recipes(recipes)
    width = max((len(recipe.name) for recipe in found), default=0)
    print(f"{'recipe':<{width}}  {'cores':>5}  {'GiB/core':>8}  {'tokens/step':>11}   (memory is modelled)")
    for recipe in found:
        f = figures.get(recipe.name)
        memory = f"{f.memory_gib:.1f}" if f is not None and f.memory_gib is not None else "-"
        row = f"{f.cores:>5}  {memory:>8}  {f.tokens_per_step:>11,}" if f is not None else ""
        print(f"{recipe.name:<{width}}  {row}".rstrip())
        print(textwrap.fill(recipe.summary, 100, initial_indent="    ", subsequent_indent="    "))
