"""What a save that failed says: what went wrong, where, how much is free and from which step the run goes on."""

import shutil
from pathlib import Path

from torch.distributed.checkpoint import CheckpointException

from .steps import complete_steps

__all__ = ["explain_failed_save"]

LITTLE = 64 << 20
"""Bytes free below which a failed write is put down to a full disk, because torch's zip writer names no cause."""


def explain_failed_save(folder: Path, step: int, error: BaseException) -> str:
    """Return the message for a step that could not be saved.

    Args:
        folder: the run's checkpoint folder, which need not exist.
        step: the step that was being saved.
        error: what was raised. DCP wraps what each rank raised; the lowest rank's is told.
    """
    text = str(error)
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items())
        text = f"rank {rank}: " + (str(cause).strip().splitlines() or [repr(cause)])[0]
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    full = "No space left on device; " if free < LITTLE and "No space" not in text else ""
    steps = complete_steps(folder)
    ending = f"--resume goes on from step {steps[-1]}" if steps else "no step was saved before it"
    return (
        f"Step {step} could not be saved in {folder}: {full}{text}.\n"
        f"{free / 2**30:.2f} GiB are free there; {ending}. Make room, or name another --dump_folder."
    )
