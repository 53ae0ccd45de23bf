"""Everything that can be refused before a rank starts: one clear error each, read from the built config."""

import importlib.util
import os
from pathlib import Path
from typing import Any

from .. import environment
from ..checkpoint.steps import ASSETS, complete_steps, is_step
from ..data.loader import TextDataLoader, check_parts, stores_of
from ..errors import UserError
from ..logs import say
from ..models.find import missing_shards, refuse_remote_code, unreadable_weights
from ..train.validation import validation_data
from .layout import check_layout

__all__ = ["check"]


def check(config: Any, world_size: int, *, resume: bool) -> None:
    """Raise UserError for the first thing that would make this run fail or mean something else than was asked."""
    check_layout(config, world_size)
    _check_remote_code(config)
    _check_wandb(config)
    _check_folder(config, resume)
    _check_weights(config, resume)
    _check_data(config, _check_tokenizer(config))


def _check_remote_code(config: Any) -> None:
    """Folders that this run, or who loads its export, reads configuration from."""
    if getattr(config, "hf_model", ""):
        raise UserError(
            f"hf_model {config.hf_model!r}: TorchTitan reads that config with trust_remote_code=True, which runs code "
            "from its folder.\n"
            "Build the model spec with titan_recipes.transformers(...) instead."
        )
    checkpoint = config.checkpoint
    for folder in (config.hf_assets_path, checkpoint.initial_load_path if checkpoint.enable else None):
        if folder:
            refuse_remote_code(Path(folder).expanduser())
            refuse_remote_code(Path(folder).expanduser() / ASSETS)


def _check_wandb(config: Any) -> None:
    """Weights & Biases can be reached as asked: TorchTitan prints that it cannot, and trains on without it."""
    if not getattr(config.metrics, "enable_wandb", False):
        return
    off = "or leave --metrics.enable_wandb out"
    if importlib.util.find_spec("wandb") is None:
        raise UserError(f"metrics.enable_wandb is on, but wandb is not installed: uv pip install wandb, {off}.")
    if not environment.has_wandb_login():
        raise UserError(
            "metrics.enable_wandb is on, but there is no login: wandb login, or WANDB_API_KEY, or WANDB_MODE=offline, "
            f"{off}."
        )


def _check_tokenizer(config: Any) -> Any:
    """Load the tokenizer and return it, once every id that it can give has a row in the model."""
    folder = Path(config.hf_assets_path).expanduser()
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"There is no tokenizer.json in hf_assets_path {str(folder)!r}.\nPoint --hf_assets_path at a model folder."
        )
    try:
        tokenizer = config.tokenizer.build(tokenizer_path=str(folder))
    except UserError:
        raise
    except Exception as error:  # whatever a file of another's makes the tokenizers library or TorchTitan raise
        raise UserError(
            f"The tokenizer in {folder} cannot be loaded, it is not a readable tokenizer: {error!r}."
        ) from None
    rows = config.model_spec.model.vocab_size
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= rows:
        raise UserError(
            f"The tokenizer in {folder} has ids up to {largest}, but the model has {rows} embedding rows (ids 0 "
            f"to {rows - 1}).\n"
            f"Set vocab_size to at least {largest + 1} in the recipe, or point --hf_assets_path at the model's "
            "own tokenizer."
        )
    return tokenizer


def _check_data(config: Any, tokenizer: Any) -> None:
    """Tokenise what the run will read, unless that was done before, say how much it is, and that each part of it has
    some.
    """
    loaders = [config.dataloader, *([validation_data(config)] if config.validator.enable else [])]
    loaders = [loader for loader in loaders if isinstance(loader, TextDataLoader.Config)]
    if not loaders:
        return
    for line in dict.fromkeys(store.summary for loader in loaders for _, store in stores_of(loader, tokenizer)):
        say(f"data: {line}")
    for loader in loaders:
        check_parts(loader, tokenizer, config.training.seq_len)
    # Ranks may be forked from here: the tokenizer's threads would be dead in theirs, and it would say so.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _check_folder(config: Any, resume: bool) -> None:
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        if resume:
            raise UserError("--resume reads a checkpoint, but checkpoint.enable is off: leave one of the two out.")
        return
    if checkpoint.last_save_in_hf:
        raise UserError(
            "checkpoint.last_save_in_hf leaves a last step without config, tokenizer and optimizer, from which no run "
            "goes on.\n"
            "Leave it out: every run writes the Hugging Face folder, hf/, by itself."
        )
    folder = Path(config.dump_folder) / checkpoint.folder
    steps = complete_steps(folder)
    if steps and not resume:
        raise UserError(
            f"{folder} already holds a checkpoint of step {steps[-1]}.\n"
            "Pass --resume to continue from it, or another --dump_folder to start anew."
        )
    if checkpoint.load_step not in (-1, *steps):
        raise UserError(
            f"checkpoint.load_step {checkpoint.load_step} is no complete step in {folder}; there: "
            f"{', '.join(map(str, steps)) or 'none'}."
        )


def _check_weights(config: Any, resume: bool) -> None:
    """What checkpoint.initial_load_path names is there, can be read as it is asked for, and is read at all."""
    checkpoint, path = config.checkpoint, config.checkpoint.initial_load_path
    if not checkpoint.enable:
        if path or checkpoint.initial_load_in_hf:
            raise UserError(
                f"The weights in {path or config.hf_assets_path} would not be read, since checkpoint.enable is off: "
                "the run would start from random ones.\nTo load them and save nothing: --checkpoint.load_only in the "
                "place of --checkpoint.no-enable."
            )
        return
    if not path or (resume and complete_steps(Path(config.dump_folder) / checkpoint.folder)):
        return
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(
            f"checkpoint.initial_load_path {path!r} is no folder here; weights come from a Hugging Face folder or a "
            "TorchTitan step.\n"
            "A Hub id in the local cache is found by --model."
        )
    if not checkpoint.initial_load_in_hf and not is_step(folder):
        raise UserError(
            f"checkpoint.initial_load_path {path} is no TorchTitan step (it has no .metadata).\n"
            "For a Hugging Face folder add --checkpoint.initial_load_in_hf."
        )
    if is_step(folder):
        return
    if not any(folder.glob("*.safetensors")):
        found = "".join(f"\n  {line}" for line in unreadable_weights(folder))
        raise UserError(
            f"checkpoint.initial_load_path {path} has no weights that can be read: neither *.safetensors nor a "
            "TorchTitan step."
            f"{' There:' if found else ''}{found}"
        )
    if missing := missing_shards(folder):
        raise UserError(
            f"{path} lacks {len(missing)} of the files that its index names: {', '.join(missing[:3])}. Download "
            "it again."
        )
