"""TorchTitan's checkpoint manager, made safe to kill and to export from.

Each step also carries `assets/`, written before its tensors, so that it can be exported from its folder alone.
"""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from .steps import ASSETS, complete_steps, entries, step_folder
from .strict import compare_with_checkpoint, zero_biases

__all__ = ["StepCheckpoints"]

log = logging.getLogger(__name__)


class StepCheckpoints(CheckpointManager):
    """Checkpoints under <run>/checkpoint/step-N, each with assets/."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        last_save_model_only: bool = False
        """Whether the final checkpoint contains only model state; False keeps it resumable."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.write_assets: Callable[[Path], None] | None = None  # set by the trainer
        self.before_save: Callable[[], None] | None = (
            None  # set by the trainer: raises if there is nothing worth saving
        )
        self.saved_step = -1
        self.loaded = False

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
        target = step_folder(Path(self.folder), curr_step)
        if dist.get_rank() == 0:
            if (
                target.exists()
            ):  # half-written, or a step that is being redone: its .metadata must not vouch for new files
                shutil.rmtree(target)
            if self.write_assets is not None:
                self.write_assets(target / ASSETS)
        if dist.get_world_size() > 1:
            dist.barrier()
        saved = super()._save(curr_step, last_step)
        if last_step:  # TorchTitan leaves one more than keep_latest_k at the end
            self._purge_stale_checkpoints()
        self.saved_step = curr_step
        return saved

    def _load(self, step: int = -1) -> bool:
        """Load and say from where. A run's own checkpoints win over initial_load_path, as in TorchTitan."""
        self.loaded = loaded = super()._load(step)
        folder, own = Path(self.folder), self._find_load_step() if step == -1 else step
        initial = self.initial_load_path or ("hf_assets_path" if self.initial_load_in_hf else None)
        if own != -1:
            ignored = f"; {initial} was not read, since the run has a checkpoint" if initial else ""
            say(f"weights: resumed from {step_folder(folder, own)}{ignored}")
        elif loaded:
            say(f"weights: loaded from {initial}")
        else:
            say("weights: random initialisation")
        return loaded

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
        root = Path(folder or self.folder)
        steps = complete_steps(root)
        for path in sorted(entries(root)):
            if path.name.startswith("step-") and path not in [step_folder(root, s) for s in steps]:
                log.warning("%s is not a complete checkpoint: ignored", path)
        latest = steps[-1] if steps else -1
        # Every rank must start from the same step; one that cannot see the folder would train on alone.
        bounds = torch.tensor([latest, -latest], device=utils.device_type)
        if dist.get_world_size() > 1:
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        newest, oldest = int(bounds[0]), -int(bounds[1])
        if newest != oldest:
            raise UserError(
                f"Ranks disagree on the checkpoint to resume from: rank {dist.get_rank()} finds step {latest} in "
                f"{root}, the others between {oldest} and {newest} (-1: none).\nPut --dump_folder on a file system "
                "that all nodes share."
            )
        return latest

    def _purge_stale_checkpoints(self) -> None:
        if self.keep_latest_k <= 0 or dist.get_rank() != 0:
            return
        folder = Path(self.folder)
        for step in complete_steps(folder)[: -self.keep_latest_k]:
            self.purge_queue.put(str(step_folder(folder, step)))
