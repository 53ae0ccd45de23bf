"""`plan MODEL`: which layouts of this machine work, fit and are fast; one of them in detail; its launch files."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from neuron_parallel.files import whole_file
from neuron_parallel.hardware import GIB, INSTANCES, Cluster, instance
from neuron_parallel.memory import ACCURACY, Memory, device_allowance
from neuron_parallel.model import ModelShape
from neuron_parallel.plan import ParallelPlan, Training, validate
from neuron_parallel.search import FIXABLE, MODES, Choice, Suggestions, suggest

__all__ = ["main", "memory_table"]

_EPILOG = """\
Without --fix for every degree, the best layouts are listed and the first is shown in detail. Examples:
  plan 8B
  plan 8B --fix tp=4 dp_shard=16 --checkpointing selective
  plan 30B-A3B --nodes 4 --launch launch/ -- apps/train qwen3_30b
All figures are modelled: memory from formulas (printed with --formulas), time from a roofline.
Nothing was measured on a device.
"""


def main(arguments: list[str] | None = None, models: Mapping[str, Mapping[str, Any]] | None = None) -> int:
    """Run `plan`; `models` are names with their config.json. Returns the exit code: 1 when nothing works or fits."""
    words = sys.argv[1:] if arguments is None else arguments
    end = words.index("--") if "--" in words else len(words)
    options = _parser(models or {}).parse_args(_one_fix_each(words[:end]))
    options.command = words[end + 1 :]
    try:
        code = _run(options, models or {})
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read the output has read enough (`plan ... | head`). Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _one_fix_each(words: Sequence[str]) -> list[str]:
    """`--fix a=1 b=2` as `--fix a=1 --fix b=2`: argparse's own way would take a model's name that follows
    for one more.
    """
    found: list[str] = []
    for word in words:
        more = len(found) > 1 and found[-2] == "--fix" and "=" in word and not word.startswith("-")
        found += ["--fix", word] if more else [word]
    return found


def _parser(models: Mapping[str, Mapping[str, Any]]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plan",
        description="Plan a training run on Trainium: which degrees, does it fit, what does it cost.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    known = f" or a name: {', '.join(models)}" if models else ""
    parser.add_argument("model", help=f"a config.json, its folder{known}")
    parser.add_argument("--instance", default="trn2.48xlarge", help=f"{', '.join(INSTANCES)} (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=1, help="instances (default: 1)")
    parser.add_argument("--cores", type=int, help="logical cores of one instance (default: all)")
    parser.add_argument("--lnc", type=int, default=2, help="physical cores in a logical one (default: 2)")
    parser.add_argument(
        "--fix", action="append", default=[], metavar="NAME=N ...", help=f"hold any of {', '.join(FIXABLE)}"
    )
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence (default: 4096)")
    parser.add_argument(
        "--global-batch", type=int, help="sequences of an optimizer step (default: one micro-batch a rank)"
    )
    parser.add_argument(
        "--checkpointing",
        choices=("none", "linears", "selective", "full"),
        help="default: the fastest of none, selective and full that fits",
    )
    parser.add_argument(
        "--attention", choices=("flash", "masked", "math"), default="flash", help="default: flash (no mask)"
    )
    parser.add_argument(
        "--loss-chunks", type=int, default=1, help="parts of the sequence for head and loss (default: 1)"
    )
    parser.add_argument(
        "--dispatcher",
        choices=("gather", "capacity", "all-to-all"),
        default="gather",
        help="expert exchange (default: %(default)s)",
    )
    parser.add_argument("--top", type=int, default=10, help="layouts to list (default: 10)")
    parser.add_argument("--formulas", action="store_true", help="every tensor of the largest moment, with its formula")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw the memory of the first layout")
    parser.add_argument(
        "--launch",
        type=Path,
        metavar="DIR",
        help="write launch files for the first layout; after -- the training script and its arguments",
    )
    return parser


def _run(options: argparse.Namespace, models: Mapping[str, Mapping[str, Any]]) -> int:
    if options.launch and not options.command:
        raise ValueError("--launch needs the training script: plan MODEL --launch DIR -- apps/train RECIPE")
    if options.figure and options.figure.suffix.lower() != ".png":
        raise ValueError(f"--figure {options.figure}: a PNG is written; give a name that ends in .png")
    if options.figure and find_spec("matplotlib") is None:
        raise ValueError("--figure needs matplotlib: pip install 'neuron-parallel[figure]'")
    shape = _shape(options.model, models)
    cluster = Cluster(instance(options.instance), options.nodes, options.lnc, options.cores)
    fixed = _fixed(options)
    training = Training(attention=options.attention, loss_chunks=options.loss_chunks, dispatcher=options.dispatcher)
    modes = (options.checkpointing,) if options.checkpointing else MODES
    print(_heading(options.model, shape, cluster))
    found = suggest(shape, cluster, fixed, training, modes)
    if not found.choices:
        return _explain_nothing(found, fixed, shape, cluster, training)
    _print_choices(found, max(1, options.top))
    best = found.choices[0]
    print(f"\nThe first: {best.plan}")
    print(memory_table(best.memory, cluster, formulas=options.formulas))
    for finding in validate(best.plan, shape, cluster, best.training):
        print(finding)
    if options.figure:
        _draw(options, best, cluster)
    if options.launch:
        _write_launch(options, best, cluster)
    return 0


def _heading(model: str, shape: ModelShape, cluster: Cluster) -> str:
    return (
        f"{model}: {shape.parameters / 1e9:.2f} billion parameters, {shape.active_parameters / 1e9:.2f} a token; "
        f"{cluster.cores} logical cores ({cluster.nodes} x {cluster.instance.name}, LNC={cluster.lnc}) of "
        f"{cluster.hbm_bytes / GIB:.0f} GiB and {cluster.peak_flops() / 1e12:.2f} BF16 TFLOPS each (the denominator "
        "of MFU)"
    )


def _print_choices(found: Suggestions, count: int) -> None:
    shown = found.choices[:count]
    which = "all" if len(shown) == len(found.choices) else f"the first {len(shown)}"
    print(
        f"{found.considered} layouts are valid, {len(found.choices)} of them fit; {which}, fastest first (modelled):\n"
    )
    rows = [("", "layout", "micro-batch", "checkpointing", "GiB", "step s", "tokens/s", "MFU", "why")]
    _print_table([*rows, *(_choice_row(number, choice) for number, choice in enumerate(shown, 1))])


def _choice_row(number: int, choice: Choice) -> tuple[str, ...]:
    time = choice.time
    return (
        str(number),
        str(choice.plan),
        str(choice.plan.micro_batch),
        choice.training.checkpointing,
        f"{choice.peak / GIB:.1f}",
        f"{time.seconds:.2f}",
        f"{time.tokens_per_second:,.0f}",
        f"{time.mfu:.0%}",
        choice.reason,
    )


def _draw(options: argparse.Namespace, best: Choice, cluster: Cluster) -> None:
    from neuron_parallel.memory.figure import draw_memory

    title = (
        f"{options.model} on {cluster.nodes} x {cluster.instance.name}: {best.plan}, "
        f"{best.training.checkpointing} checkpointing"
    )
    draw_memory(best.memory, options.figure, cluster.hbm_bytes, title, device_allowance(cluster))
    print(f"figure: {options.figure}")


def _write_launch(options: argparse.Namespace, best: Choice, cluster: Cluster) -> None:
    from neuron_parallel.launch_files import launch_files

    options.launch.mkdir(parents=True, exist_ok=True)
    files = launch_files(best.plan, cluster, options.command, folder=str(options.launch), training=best.training)
    for name, text in files.items():
        file = options.launch / name
        with whole_file(file) as temporary:
            temporary.write_text(text)
            if name.endswith(".sh"):
                temporary.chmod(0o755)
        print(f"launch: {file}")


def _shape(name: str, models: Mapping[str, Mapping[str, Any]]) -> ModelShape:
    known = _known_name(name, models)
    if known is not None:
        return ModelShape.from_hf(models[known])
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise ValueError(
            f"there is no model {name!r}: give a config.json, its folder, or one of {', '.join(models) or '(none)'}"
        )
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {type(config).__name__}, expected a config.json's object")
    try:
        return ModelShape.from_hf(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _known_name(name: str, models: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The model that a name means: 8B, 8b, Qwen3-8B or Qwen/Qwen3-8B. A file or folder of that name comes first."""
    if Path(name).exists():
        return None
    short = name.lower().removeprefix("qwen/").removeprefix("qwen3-")
    return next((known for known in models if known.lower() == short), None)


def _fixed(options: argparse.Namespace) -> dict[str, int]:
    fixed: dict[str, int] = {}
    for text in options.fix:
        name, equals, value = text.partition("=")
        try:
            fixed[name] = int(value)
        except ValueError:
            raise ValueError(f"--fix {text!r}: write NAME=N with a whole number") from None
        if not equals or name not in FIXABLE:
            raise ValueError(f"--fix {text!r}: known names are {', '.join(FIXABLE)}")
    for name in ("seq_len", "global_batch"):
        if getattr(options, name) is not None:
            fixed[name] = getattr(options, name)
    return fixed


def _explain_nothing(
    found: Suggestions, fixed: Mapping[str, int], shape: ModelShape, cluster: Cluster, training: Training
) -> int:
    """Why there is nothing to choose from."""
    if found.cut is None:
        names = {field.name for field in fields(ParallelPlan)}
        plan = ParallelPlan(**{name: value for name, value in fixed.items() if name in names})  # type: ignore[arg-type]
        print("No layout of these cores is valid. What stands against the degrees as given (all others 1):")
        for finding in validate(plan, shape, cluster, training):
            print(finding)
        return 1
    cut = found.cut
    print(
        f"{found.considered} layouts are valid, none fits: the least that a core needs is {cut.needed / GIB:.1f} GiB "
        f"(full checkpointing), it has {(cluster.hbm_bytes - device_allowance(cluster)) / GIB:.1f} GiB."
    )
    experts = f", or {cut.experts} of {shape.num_experts} experts," if cut.experts else ""
    chunks = "; so does --loss-chunks 8" if training.loss_chunks < 8 else ""
    print(f"{cut.layers} of {shape.num_hidden_layers} layers{experts} would fit. More nodes help{chunks}.")
    return 1


def memory_table(report: Memory, cluster: Cluster, formulas: bool = False) -> str:
    """The largest moment of one core by part, against its memory; with `formulas` every tensor and the
    symbols' values.
    """
    allowance = device_allowance(cluster)
    peak = report.peak
    lines = [
        f"memory of one core, modelled; largest moment: {peak.where}"
        + (f" (stage {report.stage})" if report.stage else "")
    ]
    if formulas:
        values = ", ".join(f"{name}={value:,.0f}" for name, value in report.symbols.items())
        lines += [peak.table(), f"with {values}"]
    else:
        lines += [f"  {part:<28}{size / GIB:8.2f} GiB" for part, size in peak.by_part().items() if size]
    used = peak.bytes + allowance
    verdict = "DOES NOT FIT"
    if used <= cluster.hbm_bytes:
        safe = used + ACCURACY * peak.bytes <= cluster.hbm_bytes
        verdict = "fits" if safe else f"fits only within the model's error of {ACCURACY:.0%}"
    lines += [
        f"  {'all tensors':<28}{peak.bytes / GIB:8.2f} GiB",
        f"  {'runtime, compiler (allowance)':<28}{allowance / GIB:7.2f} GiB",
        f"  {'together':<28}{used / GIB:8.2f} of {cluster.hbm_bytes / GIB:.0f} GiB: {verdict}",
    ]
    return "\n".join(lines)


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
