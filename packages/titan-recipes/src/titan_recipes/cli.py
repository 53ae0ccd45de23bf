"""The command line of apps/train: parse, check, start the ranks. Nothing heavy is imported before it is needed."""

import argparse
import os
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from .errors import UserError
from .recipes import Recipe, find_recipe, list_recipes

__all__ = ["main"]

DEFAULT_RECIPE = "debug"
OUTPUTS = "outputs"

_EPILOG = """\
Every option of TorchTitan's config passes through as --section.option value, for instance
  apps/train debug --training.steps 50 --validator.no-enable
  apps/train debug --training.local_batch_size 4 --parallelism.tensor_parallel_degree 2
A recipe is a function that returns the whole config; apps/train RECIPE --help lists what can be set on it.
Multi-node: torchrun --nnodes 4 --nproc-per-node 64 --rdzv-backend c10d --rdzv-endpoint HOST:29500 apps/train RECIPE ...
"""


def main(arguments: list[str], recipes: Path) -> int:
    """Run apps/train with `arguments`; `recipes` is the folder of short names. Returns the exit code."""
    try:
        return _main(arguments, recipes)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted before training began", file=sys.stderr)
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="apps/train",
        usage="apps/train [RECIPE] [--nproc N] [--device D] [--resume] [--section.option value ...]",
        description="Train a Qwen3 with TorchTitan. RECIPE is a name from --list, module:function, or path/to/file.py:function; "
        f"without one, {DEFAULT_RECIPE!r}.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "-h", "--help", action="store_true", help="this text; after a RECIPE, all options of TorchTitan's config"
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
        "--model",
        metavar="M",
        help="instead of the recipe's: a folder (its weights are where training starts), a Hub id in the local cache, or a name",
    )
    parser.add_argument(
        "--route", metavar="R", help="instead of the recipe's: native, transformers, or kernels (see docs/routes.md)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in --dump_folder, or in this recipe's newest run",
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
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    named = bool(rest) and not rest[0].startswith("-")
    if options.help and not named:
        parser.print_help()
        return 0
    if options.list:
        _print_list(recipes)
        return 0
    name = rest.pop(0) if named else DEFAULT_RECIPE
    if options.nproc is not None and options.nproc < 1:
        raise UserError(f"--nproc {options.nproc} is not a number of ranks; give 1 or more.")
    _refuse_unheeded(options)
    recipe = find_recipe(name, recipes)

    from .versions import check_versions

    for mismatch in check_versions(options.allow_untested):
        print(f"warning: untested {mismatch}", file=sys.stderr)

    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    first = os.environ.get("RANK", "0") == "0"
    if under_torchrun and options.nproc not in (None, int(os.environ["WORLD_SIZE"])):
        raise UserError(
            f"--nproc {options.nproc}, but torchrun started {os.environ['WORLD_SIZE']} ranks: leave --nproc out."
        )
    if first:
        print(f"{recipe.name}: loading torch and TorchTitan ...", flush=True)

    from .device.select import choose_device, set_device
    from .launch.compare_modes import compare_modes
    from .launch.rank import Options, build_config, run_rank
    from .logs import set_up_logging

    set_up_logging(None, console=first)

    device = choose_device("cpu" if options.dry_run else options.device)
    if options.instance and not options.dry_run and device != "neuron":
        raise UserError(f"--instance is for Neuron's memory, or a --dry-run; this run is on {device}.")
    folder = options.dump_folder or _run_folder(recipe, options.resume, under_torchrun)
    run_options = Options(
        recipe,
        tuple(rest),
        device,
        folder,
        _resume_command(arguments, recipe, folder),
        options.model,
        options.route,
        options.profile,
    )
    set_device(device)
    if device == "cpu":
        import torch

        # Ranks are forked: an OpenMP pool that a recipe's tensors made in this process would be dead in theirs, and waited
        # for. With one thread there is no pool; each rank sets its own number.
        torch.set_num_threads(1)
    if options.help:
        build_config(replace(run_options, titan_args=(*rest, "--help")))

    from .moe.kernels import check_overrides
    from .preflight.checks import check, world_size_of
    from .preflight.plan import check_plan, dry_run

    if options.dry_run:
        planned = build_config(replace(run_options, device="neuron"))
        return dry_run(planned, options.nproc, options.instance)
    config = build_config(run_options)
    world = int(os.environ["WORLD_SIZE"]) if under_torchrun else options.nproc or world_size_of(config)
    overrides = check_overrides(config, device)
    check(config, world, resume=options.resume)
    check_plan(config, world, device, options.instance)
    if first:
        print(
            f"device: {device}{' (chosen by auto)' if options.device == 'auto' else ''}, {world} rank{'s' if world > 1 else ''}"
        )
        for line in overrides:
            print(f"override: {line}")
        print(f"run folder: {folder}", flush=True)
    if options.compare_modes:
        if under_torchrun:
            raise UserError("--compare-modes starts its ranks itself, twice: run it without torchrun.")
        return compare_modes(run_options, world, config.training.mixed_precision_param)
    if under_torchrun:
        outcome = run_rank(run_options)
    else:
        from .launch.elastic import launch

        outcome = launch(run_options, world)
    return 0 if outcome.signal is None else 128 + outcome.signal


def _refuse_unheeded(options: argparse.Namespace) -> None:
    """UserError for two flags of which one would have no effect."""
    for flag, others in {"dry_run": ("compare_modes", "profile", "resume"), "compare_modes": ("resume",)}.items():
        for other in others:
            if getattr(options, flag) and getattr(options, other):
                what = {"dry_run": "trains nothing", "compare_modes": "starts both modes anew"}[flag]
                raise UserError(f"--{flag.replace('_', '-')} {what}: leave --{other.replace('_', '-')} out.")


def _print_list(recipes: Path) -> None:
    found = list_recipes(recipes)
    width = max((len(recipe.name) for recipe in found), default=0)
    for recipe in found:
        print(f"{recipe.name:<{width}}  {recipe.summary}")


def _run_folder(recipe: Recipe, resume: bool, under_torchrun: bool) -> str:
    if resume:
        runs = sorted(Path(OUTPUTS).glob(f"{recipe.function}-*"), key=lambda run: run.name)
        with_checkpoint = [run for run in runs if any(run.glob("checkpoint/step-*/.metadata"))]
        if not with_checkpoint:
            raise UserError(
                f"--resume: no run of {recipe.function!r} with a complete checkpoint in {OUTPUTS}/.\n"
                "Name the run with --dump_folder, or start without --resume."
            )
        return str(with_checkpoint[-1])
    name = f"{OUTPUTS}/{recipe.function}-{time.strftime('%Y%m%d-%H%M%S')}"
    return _same_on_all_ranks(name) if under_torchrun and os.environ["WORLD_SIZE"] != "1" else name


def _same_on_all_ranks(name: str) -> str:
    """Rank 0's `name`, through the store that torchrun keeps for the job."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UserError("Several ranks without torchrun's store: name the run's folder with --dump_folder.")
    from torch.distributed import PrefixStore, TCPStore

    agent = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = PrefixStore(f"titan-recipes-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", agent)
    if os.environ["RANK"] == "0":
        store.set("run", name)
    return bytes(store.get("run")).decode()


def _resume_command(arguments: list[str], recipe: Recipe, folder: str) -> str:
    """The same command, going on in the same folder."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != "--resume" and argument.partition("=")[0] != "--dump_folder":
            kept.append(argument)
        skip = argument == "--dump_folder"
    return f"uv run apps/train {shlex.join([*kept, '--resume', '--dump_folder', folder])}"
