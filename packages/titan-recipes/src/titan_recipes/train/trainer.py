"""TorchTitan's trainer with hooks: progress, a stop between steps, assets in each checkpoint, held-out
validation data.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from qwen3_core.loss import ExpectedLoss
from torchtitan import trainer as titan
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed.utils import dist_sum
from torchtitan.tools.utils import device_type

from ..checkpoint.assets import write_assets
from ..checkpoint.completeness import check_written, guard_initialisation, states_of
from ..checkpoint.manager import StepCheckpoints
from ..data.loader import TextDataLoader
from ..data.taught import taught
from ..data.tokenizer import TrainingTokenizer
from ..errors import UserError
from ..logs import say
from ..models.spec import hf_config, is_tied, published_dtype, swaps
from ..moe.kernels import check_overrides
from ..moe.router import RoutingWatch
from .first_loss import random_loss, report_first_loss
from .metrics import RunMetrics
from .stop import StopRequest
from .validation import validation_data, without_labels_no_loss
from .watches import LossWatch, ShapeWatch

__all__ = ["Trainer"]

log = logging.getLogger(__name__)


class Trainer(titan.Trainer):
    """The trainer that recipes use; its Config is TorchTitan's with our components as defaults."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):
        metrics: MetricsProcessor.Config = field(default_factory=RunMetrics.Config)
        dataloader: BaseDataLoader.Config = field(default_factory=TextDataLoader.Config)
        checkpoint: BaseCheckpointManager.Config = field(default_factory=StepCheckpoints.Config)
        tokenizer: BaseTokenizer.Config = field(default_factory=TrainingTokenizer.Config)

        expected_trainable: int | None = None
        """Number of parameters that must train; a recipe that freezes some says how many are left.

        None: not checked.
        """

    config: Config
    checkpointer: StepCheckpoints
    metrics_processor: RunMetrics

    def __init__(self, config: Config) -> None:
        config.validator.dataloader = validation_data(config)
        assert config.model_spec is not None
        self.published_dtype = published_dtype(config)
        self.hf_config = hf_config(config.model_spec.model, dtype=self.published_dtype)
        check_overrides(config, device_type)
        config.model_spec = guard_initialisation(config.model_spec)
        super().__init__(config)
        for line in swaps(config.model_spec):  # overrides included
            log.info("swap: %s", line)
        self._check_ties()
        self.stop = StopRequest()
        self.losses = LossWatch()
        self.expected_loss: ExpectedLoss | None = None
        self.validated_step = -1
        self.finished_step = 0
        self.recipe: dict[str, object] | None = None  # set by the runner: what built this config
        self.recipe_source: Path | None = None
        if config.checkpoint.enable:
            self.checkpointer.write_assets = self._write_assets
            self.checkpointer.before_save = self._check_finite
        if config.validator.enable:
            self.validator.validate = without_labels_no_loss(self.validator.validate, self._remember_validation)
        self._pad_data_to_whole_steps()
        self.shapes = ShapeWatch()
        self.metrics_processor.more = RoutingWatch(self.model_config, self.model_parts).record
        self._report_parameters()

    def _report_parameters(self) -> None:
        """Say how many parameters there are and how many train, of all pipeline stages; UserError if a recipe expects
        others.
        """
        parameters = [p for part in self.model_parts for p in part.parameters()]
        counts = torch.tensor(
            [sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)]
        )
        if self.parallel_dims.pp_enabled:
            counts = counts.to(self.device)
            torch.distributed.all_reduce(counts, group=self.parallel_dims.get_mesh("pp").get_group())
        total, trainable = counts.tolist()
        assert self.config.model_spec is not None
        say(f"model: {self.config.model_spec.flavor}, {total:,} parameters, {trainable:,} trainable")
        if self.config.expected_trainable not in (None, trainable):
            raise UserError(
                f"The recipe expects {self.config.expected_trainable:,} trainable parameters; {trainable:,} of "
                f"{total:,} would train."
            )

    def _pad_data_to_whole_steps(self) -> None:
        """TorchTitan drops a step whose batches the data cannot fill: have the loaders pad the last one."""
        microbatches = self.num_pipeline_parallel_microbatches
        if isinstance(self.dataloader, TextDataLoader):
            self.dataloader.batches_per_step = self.gradient_accumulation_steps * microbatches
        if self.config.validator.enable and isinstance(self.validator.dl_config, TextDataLoader.Config):
            self.validator.dl_config = replace(self.validator.dl_config, batches_per_step=microbatches)

    def _check_ties(self) -> None:
        """Tied weights are one parameter in this layout, or it is refused."""
        if not is_tied(self.model_config):
            return
        for part in self.model_parts:
            ends = [getattr(getattr(part, name, None), "weight", None) for name in ("tok_embeddings", "lm_head")]
            if ends[0] is not ends[1]:
                raise UserError(
                    "The model ties its head to its embedding, but in this layout they are two parameters that would "
                    "train apart.\n"
                    "Choose another layout (no pipeline parallelism), or tie_word_embeddings=False."
                )

    def _check_finite(self) -> None:
        """No loss since the last look, and no weight, is NaN: such a step is not saved."""
        self.losses.check(self.stop.highest)
        check_written(states_of(self.model_parts), f"step {self.step}")

    def _remember_validation(self, step: int) -> None:
        self.validated_step = step

    def train(self) -> None:
        """Train to the last step, a signal or the end of the data; leave a checkpoint of the last finished step and,
        unless interrupted, a validation loss.
        """
        self.stop.install()
        super().train()
        self.step = self.finished_step  # TorchTitan counts the step that ran out of data
        if not self.finished and self.step > 0:
            if self.stop.signal is None:
                log.warning("the data ended after step %d of %d", self.step, self.config.training.steps)
            self.checkpointer.save_now(self.step)
        if self.stop.signal is None and self.config.validator.enable and self.validated_step != self.step:
            self.validator.validate(self.model_parts, self.step)
        if self.config.checkpoint.enable:
            self.checkpointer.maybe_wait_for_saving()

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        """Take one step; a loss that is not finite ends the run with its step."""
        not_finite: RuntimeError | None = None
        try:
            super().train_step(data_iterator)
        except RuntimeError as error:
            if not str(error).startswith("Loss is not finite"):
                self.losses.check()
                raise
            not_finite = error  # TorchTitan looks where the loss is; pipeline stages without one learn of it below
        if not_finite is not None or self.metrics_processor.should_log(self.step):
            self.losses.check(self.stop.highest)
        if not_finite is not None:
            raise not_finite
        self.finished_step = self.step
        if self.expected_loss is not None:
            self._report_first_loss(self.expected_loss)
            self.expected_loss = None

    def forward_backward_step(self, *, global_valid_tokens: torch.Tensor, **batch: Any) -> torch.Tensor:
        """TorchTitan's, which divides by the number of labels: a step without any has loss and gradients 0, not NaN."""
        loss = super().forward_backward_step(global_valid_tokens=global_valid_tokens.clamp(min=1), **batch)
        self.losses.add(self.step, loss)
        return loss

    def _report_first_loss(self, expected: ExpectedLoss) -> None:
        total = self.losses.first
        mesh = self.parallel_dims.get_optional_mesh("loss") if self.parallel_dims.dp_cp_enabled else None
        loss = dist_sum(total, mesh) if mesh is not None else float(total)
        report_first_loss(loss, expected, self.model_config.vocab_size, self.checkpointer.loaded)

    def state_dict(self) -> dict[str, int]:
        """TorchTitan's, with the tokens that all ranks saw: its own per-rank count is wrong on another
        number of ranks.
        """
        return {"step": self.step, "ntokens_seen": self.ntokens_seen * self._data_ranks}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from a step, on any number of data-parallel ranks."""
        self.step = state_dict["step"]
        self.ntokens_seen = state_dict["ntokens_seen"] // self._data_ranks

    @property
    def _data_ranks(self) -> int:
        """Ranks that see different tokens (data and context parallel)."""
        mesh = self.parallel_dims.get_optional_mesh("loss") if self.parallel_dims.dp_cp_enabled else None
        return mesh.size() if mesh is not None else 1

    @property
    def finished(self) -> bool:
        """True once the last step is done, False after an interruption."""
        return self.step >= self.config.training.steps

    def should_continue_training(self) -> bool:
        """Say whether to take another step: not after a signal, nor after the last."""
        if self.metrics_processor.total_steps == 0:  # first call: weights are loaded, no step was made
            self.metrics_processor.start(self.step, self.config.training.steps)
            self.finished_step = self.step
            training = self.config.training
            batch = training.local_batch_size * self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard
            tokens = self.gradient_accumulation_steps * batch * training.seq_len
            self.expected_loss = random_loss(self.model_parts, self.model_config.vocab_size, tokens)
        return not self.stop.agreed() and super().should_continue_training()

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Look at the batch's shapes, then do what TorchTitan does."""
        self.shapes.see({**input_dict, "labels": labels})
        return super().post_dataloading_process(input_dict, labels)

    def _write_assets(self, folder: Path) -> None:
        if self.hf_config is None:
            return
        eos = getattr(self.tokenizer, "eos_id", None)
        write_assets(
            folder,
            config={"eos_token_id": eos} | self.hf_config,  # a published model names its own
            tokenizer_folder=Path(self.config.hf_assets_path),
            eos_token_id=eos,
            taught=taught(self.config.dataloader, self.tokenizer),
            recipe=self.recipe,
            recipe_source=self.recipe_source,
        )
