"""The folder of a training step: what it is called, what it holds, and when it is whole. No torch.

A step is whole when DCP's `.metadata` is in its folder, because DCP writes that file last, by rename. `assets/` in it
makes the step exportable alone. Names other than step-<number> are not ours: they are neither read nor deleted.
"""

import re
from pathlib import Path

from hf_ckpt_adapter.formats.files import ASSETS, METADATA

__all__ = ["ASSETS", "complete_steps", "entries", "has_steps", "is_step", "step_folder"]

_NAME = re.compile(r"step-(\d+)")


def step_folder(folder: Path, step: int) -> Path:
    """Return where step number `step` lies in a run's checkpoint folder."""
    return folder / f"step-{step}"


def is_step(folder: Path) -> bool:
    """Return whether `folder` is a whole TorchTitan step, whatever its name."""
    return (folder / METADATA).is_file()


def complete_steps(folder: Path) -> list[int]:
    """Return the steps whose folder is whole, ascending. A folder that is not there has none."""
    steps = [int(m[1]) for path in entries(folder) if (m := _NAME.fullmatch(path.name))]
    return sorted(step for step in steps if is_step(step_folder(folder, step)))


def has_steps(run: Path) -> bool:
    """Return whether a run's folder holds a whole step, whatever checkpoint.folder was."""
    return any(_NAME.fullmatch(file.parent.name) for file in run.glob(f"**/step-*/{METADATA}"))


def entries(folder: Path) -> list[Path]:
    """Return what lies in `folder`; nothing when it is not there."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
