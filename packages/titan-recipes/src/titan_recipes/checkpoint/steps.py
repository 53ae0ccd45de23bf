"""The folder of a training step: what it is called, what it holds, and when it is whole. No torch.

A step is whole when DCP's `.metadata` is in its folder, because DCP writes that file last, by rename. `assets/` in it
makes the step exportable alone. A step is written at .saving-step-N and renamed when it is whole; a step that it
replaces waits at .replaced-step-N until then. Other names are not ours: they are neither read nor deleted.
"""

import itertools
import re
import shutil
import time
from pathlib import Path

from hf_ckpt_adapter.formats.files import ASSETS, METADATA

__all__ = [
    "ASSETS",
    "complete_steps",
    "entries",
    "finish_step",
    "has_steps",
    "is_step",
    "purging",
    "recover",
    "saving_folder",
    "set_aside_later",
    "step_folder",
]

_SAVING, _REPLACED, _PURGING = ".saving-", ".replaced-", ".purging-"
_NAME = re.compile(r"step-(\d+)")


def step_folder(folder: Path, step: int) -> Path:
    """Return where step number `step` lies in a run's checkpoint folder."""
    return folder / f"step-{step}"


def is_step(folder: Path) -> bool:
    """Return whether `folder` is a whole TorchTitan step, whatever its name."""
    return (folder / METADATA).is_file()


def complete_steps(folder: Path) -> list[int]:
    """Return the steps that are whole, ascending, whether or not their last rename was made. No folder has none."""
    names = [path.name.removeprefix(_SAVING).removeprefix(_REPLACED) for path in entries(folder)]
    steps = {int(m[1]) for name in names if (m := _NAME.fullmatch(name))}
    return sorted(step for step in steps if any(is_step(path) for path in _places(folder, step)))


def _places(folder: Path, step: int) -> tuple[Path, Path, Path]:
    """Where a step may lie whole: newly saved, under its name, or set aside while the new one takes its name."""
    name = step_folder(folder, step).name
    return folder / f"{_SAVING}{name}", folder / name, folder / f"{_REPLACED}{name}"


def saving_folder(folder: Path, step: int) -> Path:
    """Return where step number `step` is written until it is whole."""
    return _places(folder, step)[0]


def finish_step(folder: Path, step: int) -> None:
    """Give a newly saved step its name, by rename. An older one of that name goes only after that."""
    new, target, old = _places(folder, step)
    if target.exists():
        _discard(old)
        target.rename(old)
    new.rename(target)
    _discard(old)


def recover(folder: Path) -> None:
    """Bring a folder in order after a kill: make the renames that are left, remove what is half-written or was going.

    The folder must have no other writer.
    """
    for path in entries(folder):
        if path.name.startswith(_PURGING):
            _discard(path)
        elif path.name.startswith(_SAVING) and (m := _NAME.fullmatch(path.name.removeprefix(_SAVING))):
            if is_step(path):
                finish_step(folder, int(m[1]))
            else:
                _discard(path)
    for path in entries(folder):
        if path.name.startswith(_REPLACED) and (m := _NAME.fullmatch(path.name.removeprefix(_REPLACED))):
            target = step_folder(folder, int(m[1]))
            if is_step(target) or not is_step(path):
                _discard(path)
            else:
                _discard(target)
                path.rename(target)


def set_aside_later(folder: Path, step: int) -> list[Path]:
    """Move the steps after `step` into a folder of their own, and return where they are now."""
    later = [number for number in complete_steps(folder) if number > step]
    if not later:
        return []
    name = f"rolled-back-{time.strftime('%Y%m%d-%H%M%S')}"
    # A second rollback in the same second gets a folder of its own.
    names = (name if count == 1 else f"{name}-{count}" for count in itertools.count(1))
    aside = next(folder / name for name in names if not (folder / name).exists())
    aside.mkdir()
    return [step_folder(folder, number).rename(step_folder(aside, number)) for number in later]


def purging(folder: Path, step: int) -> Path:
    """Take a step out of the folder's history, by rename, and return the path to remove."""
    target = step_folder(folder, step)
    return target.rename(folder / f"{_PURGING}{target.name}")


def _discard(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def has_steps(run: Path) -> bool:
    """Return whether a run's folder holds a whole step, whatever checkpoint.folder was."""
    return any(_NAME.fullmatch(file.parent.name) for file in run.glob(f"**/step-*/{METADATA}"))


def entries(folder: Path) -> list[Path]:
    """Return what lies in `folder`; nothing when it is not there."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
