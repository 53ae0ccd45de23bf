"""TorchTitan's trainer with hooks: progress, a stop between steps, assets in each checkpoint, held-out validation data."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torchtitan import trainer as titan
from torchtitan.components.validate import Validator
from torchtitan.config import TORCH_DTYPE_MAP

from .assets import write_assets
from .attention import MaskedQwen3Model
from .checkpoint import StepCheckpoints
from .data import TextDataLoader
from .logs import say
from .metrics import RunMetrics
from .spec import hf_config
from .stop import StopRequest

__all__ = ["Trainer"]


class Trainer(titan.Trainer):
    """The trainer that recipes use; its Config is TorchTitan's with our components as defaults."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):
        metrics: RunMetrics.Config = field(default_factory=RunMetrics.Config)
        dataloader: TextDataLoader.Config = field(default_factory=TextDataLoader.Config)
        checkpoint: StepCheckpoints.Config = field(default_factory=StepCheckpoints.Config)

    config: Config
    checkpointer: StepCheckpoints
    metrics_processor: RunMetrics

    def __init__(self, config: Config) -> None:
        config.validator.dataloader = validation_data(config)
        assert config.model_spec is not None
        model = config.model_spec.model
        # TorchTitan shortens the RoPE table to seq_len while it builds; the exported config keeps the model's own length.
        self.hf_config = (
            hf_config(model, dtype=TORCH_DTYPE_MAP[config.training.dtype])
            if isinstance(model, MaskedQwen3Model.Config)
            else None
        )
        super().__init__(config)
        self.stop = StopRequest()
        self.validated_step = -1
        self.recipe: dict[str, object] | None = None  # set by the runner: what built this config
        self.recipe_source: Path | None = None
        if config.checkpoint.enable:
            self.checkpointer.write_assets = self._write_assets
        if config.validator.enable:
            validate = self.validator.validate
            self.validator.validate = self._remembering(validate)
        parameters = sum(p.numel() for p in self.model_parts[0].parameters())
        trainable = sum(p.numel() for p in self.model_parts[0].parameters() if p.requires_grad)
        say_once = say if self.metrics_processor.prints else (lambda text: None)
        pp = " in this pipeline stage" if self.parallel_dims.pp_enabled else ""
        say_once(f"model: {config.model_spec.flavor}, {parameters:,} parameters{pp}, {trainable:,} trainable")

    def _remembering(self, validate: Callable[..., None]) -> Callable[..., None]:
        def run(model_parts: list[torch.nn.Module], step: int) -> None:
            validate(model_parts, step)
            self.validated_step = step

        return run

    def train(self) -> None:
        """Train to the last step or to a signal; then checkpoint (if interrupted) or validate (if finished)."""
        self.stop.install()
        super().train()
        if self.stop.signal is not None and not self.finished:
            if self.step > 0:
                self.checkpointer.save_now(self.step)
        elif self.config.validator.enable and self.validated_step != self.step:
            self.validator.validate(self.model_parts, self.step)
        if self.config.checkpoint.enable:
            self.checkpointer.maybe_wait_for_saving()

    @property
    def finished(self) -> bool:
        """True once the last step is done, False after an interruption."""
        return self.step >= self.config.training.steps

    def should_continue_training(self) -> bool:
        if self.metrics_processor.total_steps == 0:  # first call: weights are loaded, no step was made
            self.metrics_processor.start(self.step, self.config.training.steps)
        return not self.stop.agreed() and super().should_continue_training()

    def _write_assets(self, folder: Path) -> None:
        if self.hf_config is None:
            return
        eos = getattr(self.tokenizer, "eos_id", None)
        write_assets(
            folder,
            config=self.hf_config | {"eos_token_id": eos},
            tokenizer_folder=Path(self.config.hf_assets_path),
            eos_token_id=eos,
            recipe=self.recipe,
            recipe_source=self.recipe_source,
        )


def validation_data(config: Trainer.Config) -> object:
    """The held-out part of the training documents, unless the recipe gave the validator documents of its own."""
    own, train = config.validator.dataloader, config.dataloader
    if not isinstance(train, TextDataLoader.Config):
        return own
    if isinstance(own, TextDataLoader.Config) and (own.dataset_path or own.documents):
        return own
    default = Validator.Config().dataloader
    if isinstance(own, TextDataLoader.Config) or own == default:
        return replace(train, split="validation", infinite=False)
    return own
