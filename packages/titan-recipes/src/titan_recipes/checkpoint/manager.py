"""TorchTitan's checkpoint manager, made safe to kill and to export from.

Each step also carries `assets/`, written before its tensors, so that it can be exported from its folder alone.
"""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.tools import utils

from ..errors import UserError
from ..logs import say
from .completeness import CountingPlanner, check_written, poison, states_of
from .damage import damage
from .failed_save import explain_failed_save
from .steps import (
    ASSETS,
    complete_steps,
    entries,
    finish_step,
    purging,
    recover,
    saving_folder,
    set_aside_later,
    step_folder,
)
from .strict import compare_with_checkpoint, zero_biases

__all__ = ["StepCheckpoints"]

log = logging.getLogger(__name__)


class StepCheckpoints(CheckpointManager):
    """Checkpoints under <run>/checkpoint/step-N, each with assets/."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        last_save_model_only: bool = False
        """Whether the final checkpoint contains only model state; False keeps it resumable."""

        strict_resume: bool = False
        """Stop when the newest step is damaged, instead of going on from the last good one."""

        resume_check: Literal["size", "checksum"] = "size"
        """How a step is checked before it is resumed: the sizes of its files, or the CRC of every record."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.write_assets: Callable[[Path], None] | None = None  # set by the trainer
        self.before_save: Callable[[], None] | None = (
            None  # set by the trainer: raises if there is nothing worth saving
        )
        self.strict_resume, self.resume_check = config.strict_resume, config.resume_check
        self.saved_step = -1
        """The step on disk that has this run's state: the last one saved, or the one loaded."""
        self.loaded = False
        self._saving: int | None = None

    def save_now(self, step: int) -> None:
        """A full, resumable checkpoint at `step`, whatever the interval. Collective."""
        if self.enable and self.saved_step != step:
            self.maybe_wait_for_saving()
            self.last_save_model_only, keep = False, self.last_save_model_only
            self._save(step, last_step=True)
            self.last_save_model_only = keep

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        if self.before_save is not None:
            self.before_save()
        self.maybe_wait_for_saving()
        saving = saving_folder(Path(self.folder), curr_step)
        if dist.get_rank() == 0:
            shutil.rmtree(saving, ignore_errors=True)  # of a process that was killed
            try:
                if self.write_assets is not None:
                    self.write_assets(saving / ASSETS)
            except OSError as error:
                raise UserError(explain_failed_save(Path(self.folder), curr_step, error)) from error
        if dist.get_world_size() > 1:
            dist.barrier()
        self._saving = curr_step
        try:
            saved = super()._save(curr_step, last_step)
            if self.save_future is None:
                self._finish()
        except (OSError, CheckpointException) as error:
            raise UserError(explain_failed_save(Path(self.folder), curr_step, error)) from error
        return saved

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        """TorchTitan's, but a step that is being saved has another name until it is whole."""
        if step == self._saving and not folder:
            return str(saving_folder(Path(self.folder), step))
        return super()._create_checkpoint_id(step, folder)

    def _wait_for_saving(self) -> None:
        assert self._saving is not None
        try:
            super()._wait_for_saving()
        except (OSError, CheckpointException) as error:
            raise UserError(explain_failed_save(Path(self.folder), self._saving, error)) from error
        self._finish()

    def _finish(self) -> None:
        """Give the step that was saved its name. On every rank, once its tensors are written."""
        assert self._saving is not None
        step, self._saving = self._saving, None
        if dist.get_rank() == 0:
            finish_step(Path(self.folder), step)
        self.saved_step = step
        self._purge_stale_checkpoints()  # TorchTitan's own purge came before the step had its name

    def _load(self, step: int = -1) -> bool:
        """Load and say from where. A run's own checkpoints win over initial_load_path, as in TorchTitan."""
        folder = Path(self.folder)
        if dist.get_rank() == 0:
            recover(folder)
        if dist.get_world_size() > 1:
            dist.barrier()
        own = self._find_load_step() if step == -1 else self._whole(step)
        self.loaded = loaded = super()._load(own)
        initial = self.initial_load_path or ("hf_assets_path" if self.initial_load_in_hf else None)
        if own != -1:
            self.saved_step = own
            ignored = f"; {initial} was not read, since the run has a checkpoint" if initial else ""
            say(f"weights: resumed from {step_folder(folder, own)}{ignored}")
            self._set_aside_later(own)
        elif loaded:
            say(f"weights: loaded from {initial}")
        else:
            say("weights: random initialisation")
        return loaded

    def _set_aside_later(self, step: int) -> None:
        """Move steps of the history that a run left by going back to `step`: "newest" must not mean one of them."""
        if dist.get_rank() != 0 or self.load_only:
            return
        moved = set_aside_later(Path(self.folder), step)
        if moved:
            names = ", ".join(path.name for path in moved)
            say(f"{names}: set aside in {moved[0].parent}, since the run goes on from step {step}")

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """TorchTitan's load, strict: DCP fails on a missing key with its own words and passes extra keys unseen.

        Every element is written exactly once, or the run stops with the names (guard.py). A Hugging Face folder is read
        as if it had been saved from this model: no converted copy of it on any rank.
        """
        if from_quantized:
            raise UserError(
                "checkpoint.initial_load_in_hf_quantized is set: Qwen3 weights are read in bf16, fp16 or fp32."
            )
        model = self.states[MODEL]
        planner = CountingPlanner()
        try:
            if from_hf:
                reader = self.sd_adapter.reader(checkpoint_id)
                zeros, excluded = reader.zeros, ()
            else:
                reader, excluded = FileSystemReader(checkpoint_id), self.exclude_from_loading
                zeros = zero_biases(reader, state_dict)
            found = reader.read_metadata()
            for name in zeros - state_dict.keys():  # an expert bias of zero means none
                del found.state_dict_metadata[name]
            compare_with_checkpoint(state_dict, found, checkpoint_id, excluded)
            saved = model.state_dict()
            # Twice, since hooks may have copied what they split: what the model holds, and what DCP fills.
            poison(named for part in model.model for named in part.named_parameters())
            poison(saved.items())
            dcp.load(state_dict, storage_reader=reader, planner=planner)
        except (ValueError, FileNotFoundError) as error:
            raise UserError(f"{checkpoint_id}: {error}") from error
        except CheckpointException as error:  # what went wrong on each rank, wrapped by DCP
            cause = next(iter(error.failures.values()))[0]
            raise UserError(f"{checkpoint_id}: {cause}") from error
        planner.check(checkpoint_id)
        model.load_state_dict(state_dict)
        check_written(states_of(model.model), f"loading {checkpoint_id}")

    def _find_load_step(self, folder: str = "") -> int:
        """The newest good step, the same on every rank; -1 when there is none. Names what it skips, and why.

        Raises UserError when ranks see different folders, when every step is damaged, or, with strict_resume, when the
        newest one is.
        """
        root = Path(folder or self.folder)
        steps = complete_steps(root)
        for path in sorted(entries(root)):
            if path.name.startswith("step-") and path not in [step_folder(root, s) for s in steps]:
                log.warning("%s is not a complete checkpoint: ignored", path)
        latest = steps[-1] if steps else -1
        newest, oldest = self._highest(latest), -self._highest(-latest)
        if newest != oldest:
            raise UserError(
                f"Ranks disagree on the checkpoint to resume from: rank {dist.get_rank()} finds step {latest} in "
                f"{root}, the others between {oldest} and {newest} (-1: none).\nPut --dump_folder on a file system "
                "that all nodes share."
            )
        skipped: list[str] = []
        for step in reversed(steps):
            if (found := self._damage(root, step)) is None:
                for line in skipped:
                    say(f"skipped: {line}")
                return step
            skipped.append(f"{step_folder(root, step)} is damaged: {found}")
            if self.strict_resume:
                break
        if skipped:
            raise UserError(
                "No step can be resumed.\n  "
                + "\n  ".join(skipped)
                + "\n"
                + ("Leave --strict-resume out to go on from an older good step" if self.strict_resume else "Start anew")
                + ", or name another run's folder with --dump_folder."
            )
        return -1

    def _whole(self, step: int) -> int:
        """`step`, if it is not damaged. Raises UserError else, since another step is not what was asked for."""
        if (found := self._damage(Path(self.folder), step)) is not None:
            raise UserError(
                f"checkpoint.load_step {step} is damaged: {found}.\nName another step, or leave load_step out: the "
                "last good one is taken."
            )
        return step

    def _damage(self, root: Path, step: int) -> str | None:
        """What any rank finds wrong with a step. Collective."""
        part = (dist.get_rank(), dist.get_world_size())
        found = damage(step_folder(root, step), checksums=self.resume_check == "checksum", part=part)
        if not self._highest(int(found is not None)):
            return None
        return found or "another rank found a damaged record"

    def _highest(self, value: int) -> int:
        """The highest `value` of all ranks. Collective."""
        if dist.get_world_size() == 1:
            return value
        found = torch.tensor([value], device=utils.device_type)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)

    def _purge_stale_checkpoints(self) -> None:
        if self.keep_latest_k <= 0 or dist.get_rank() != 0:
            return
        folder = Path(self.folder)
        for step in complete_steps(folder)[: -self.keep_latest_k]:
            self.purge_queue.put(str(purging(folder, step)))
