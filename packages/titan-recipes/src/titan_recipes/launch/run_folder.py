"""The folder of a run: a new one named after recipe and time, or the newest that a resumed run can go on from."""

import itertools
import time
from pathlib import Path

from .. import environment
from ..checkpoint.steps import has_steps
from ..config.options import OUTPUTS
from ..errors import UserError
from ..recipes import Recipe

__all__ = ["run_folder"]


def run_folder(recipe: Recipe, *, resume: bool) -> str:
    """Return the folder of a run that names none, the same on every rank.

    Raises:
        UserError: there is no run to resume, or ranks have no store to agree by.
    """
    if environment.has_agent_store():
        return _same_on_all_ranks(recipe, resume)
    if environment.is_launched() and environment.world_size() > 1 and not resume:
        raise UserError("Several ranks without torchrun's store: name the run's folder with --dump_folder.")
    return _newest(recipe) if resume else _fresh(recipe)


def _fresh(recipe: Recipe) -> str:
    """Make a folder of this run's own: two starts in the same second get two."""
    name = f"{OUTPUTS}/{recipe.function}-{time.strftime('%Y%m%d-%H%M%S')}"
    Path(OUTPUTS).mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = name if number == 1 else f"{name}-{number}"
        try:
            Path(folder).mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("count() does not end")


def _newest(recipe: Recipe) -> str:
    runs = sorted(Path(OUTPUTS).glob(f"{recipe.function}-*"), key=lambda run: run.name)
    resumable = [run for run in runs if has_steps(run)]
    if not resumable and environment.is_restart():
        return _fresh(recipe)  # the job ended before it saved its first step
    if not resumable:
        raise UserError(
            f"--resume: no run of {recipe.function!r} with a complete checkpoint in {OUTPUTS}/.\n"
            "Name the run with --dump_folder, or start without --resume."
        )
    return str(resumable[-1])


def _same_on_all_ranks(recipe: Recipe, resume: bool) -> str:
    """Rank 0's choice when the job first started, through torchrun's store, which outlives the ranks."""
    from torch.distributed import PrefixStore, TCPStore

    agent = TCPStore(*environment.rendezvous_address(), is_master=False)
    store = PrefixStore("titan-recipes", agent)
    if environment.is_first() and not store.check(["run"]):
        store.set("run", _newest(recipe) if resume else _fresh(recipe))
    return bytes(store.get("run")).decode()
