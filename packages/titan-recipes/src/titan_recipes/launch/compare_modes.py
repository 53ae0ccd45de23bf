"""`--compare-modes`: the same steps, eagerly and compiled, side by side on the chosen device.

Two short runs from the same seed, weights and data, one after the other; nothing is saved but their metrics.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..config.options import Mode, Options
from ..errors import RankFailed
from ..logs import say
from ..train.metrics import METRICS_FILE, read_metrics
from .elastic import launch

__all__ = ["compare_modes", "table"]

PARTED = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""Nats by which two orders of the same sums may differ after some steps, by the dtype that is computed in."""


@dataclass(frozen=True)
class Step:
    """One step of one mode."""

    step: int
    loss: float
    seconds: float


def compare_modes(options: Options, world_size: int, dtype: str) -> int:
    """Run both modes and print the comparison. 0 if both ran and stayed together, 1 if not."""
    runs: dict[Mode, list[Step]] = {}
    graphs: dict[Mode, int] = {}
    modes: tuple[Mode, ...] = ("eager", "compiled")
    for mode in modes:
        say(f"\n{mode}:")
        folder = f"{options.dump_folder}/{mode}"
        try:
            outcome = launch(replace(options, dump_folder=folder, mode=mode), world_size)
        except RankFailed as error:
            logging.getLogger(__name__).error("%s run: %s", mode, error)
            return error.exit_code
        if outcome.signal is not None:
            return 128 + outcome.signal
        runs[mode], graphs[mode] = _read(Path(folder)), outcome.graphs
    say("")
    for line in table(runs["eager"], runs["compiled"], PARTED[dtype]):
        say(line)
    say(f"graphs compiled on a rank: eager {graphs['eager']}, compiled {graphs['compiled']}")
    return 0 if parting_step(runs["eager"], runs["compiled"], PARTED[dtype]) is None else 1


def table(eager: Sequence[Step], compiled: Sequence[Step], bound: float) -> list[str]:
    """The lines of the comparison; `bound` in nats."""
    lines = ["step   eager loss   compiled loss   difference   eager s   compiled s"]
    lines += [
        f"{a.step:>4}   {a.loss:>10.6f}   {b.loss:>13.6f}   {b.loss - a.loss:>+10.1e}   {a.seconds:>7.2f}   "
        f"{b.seconds:>10.2f}"
        for a, b in zip(eager, compiled, strict=True)
    ]
    steady = [sorted(s.seconds for s in run[1:]) for run in (eager, compiled)]
    if steady[0]:
        medians = [seconds[len(seconds) // 2] for seconds in steady]
        lines.append(
            f"median step after the first: eager {medians[0]:.3f} s, compiled {medians[1]:.3f} s "
            f"({medians[0] / medians[1]:.2f}x); the first compiles"
        )
    parted = parting_step(eager, compiled, bound)
    lines.append(
        f"together: no loss differs by more than {bound:g}"
        if parted is None
        else f"they part at step {parted}: the losses differ by more than {bound:g}"
    )
    return lines


def parting_step(eager: Sequence[Step], compiled: Sequence[Step], bound: float) -> int | None:
    """The first step whose losses differ by more than `bound`; a NaN on one side differs."""
    return next((a.step for a, b in zip(eager, compiled, strict=True) if not abs(a.loss - b.loss) <= bound), None)


def _read(run: Path) -> list[Step]:
    steps, seen = [], 0
    for record in read_metrics(run / METRICS_FILE):
        tokens, seen = record["n_tokens_seen"] - seen, record["n_tokens_seen"]
        steps.append(Step(record["step"], record["loss"], tokens / record["tokens_per_second"]))
    return steps
