"""What the rank that prints does after training: the Hugging Face folder, its check in a fresh interpreter, the loss
curve and the summary.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from hf_ckpt_adapter import export_step
from safetensors.torch import save_file
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.spmd_types import set_spmd_meshes

from ..checkpoint.steps import step_folder
from ..data.loader import TextDataLoader, split_documents
from ..environment import without_ranks
from ..errors import UserError
from ..logs import say
from ..train.metrics import METRICS_FILE, read_metrics
from ..train.trainer import Trainer
from .baselines import bigram_cross_entropy, unigram_cross_entropy
from .loss_curve import draw_loss_curve

__all__ = ["Reload", "publish", "reload_in_fresh_interpreter"]

LOGITS_TOLERANCE = 1e-4
"""Largest float32 logit difference that two orders of the same sums explain at this size."""

COUNTED_TOKENS = 20_000_000
"""Training tokens up to which the reference losses are counted, in a minute or so; they are left out above."""


def publish(trainer: Trainer) -> None:
    """Export the last checkpoint to <run>/hf, check it, draw loss.png, print what the run left.

    One rank, after training.
    """
    config = trainer.config
    run = Path(config.dump_folder)
    # The step of this run, not the highest number in its folder.
    checkpoint = step_folder(run / config.checkpoint.folder, trainer.checkpointer.saved_step)
    references = _reference_losses(config, trainer.tokenizer)
    curve = draw_loss_curve(read_metrics(run / METRICS_FILE), run / "loss.png", references)
    say("")
    loss = trainer.metrics_processor.validation_loss
    if loss is not None and references:
        say(f"validation loss         {loss:.4f}  nats per token, held-out documents")
        for name, value in references.items():
            say(f"  {name:<22}{value:.4f}")
    say(f"checkpoint              {checkpoint}")
    wrong = False
    if trainer.hf_config is not None:
        hf = run / "hf"
        report = export_step(checkpoint, hf, overwrite=True)  # a resumed run replaces what it left before
        say(f"hugging face folder     {hf}")
        if trainer.published_dtype != TORCH_DTYPE_MAP[config.training.dtype]:
            say(f"  {trainer.published_dtype}, as the folder that training started from".replace("torch.", ""))
        if side := list(report.side_state):
            say(f"  {len(side)} tensors of the checkpoint have no place there, such as {side[0]}")
        for warning in report.warnings:
            say(f"  warning: {warning}")
        result = _check_reload(trainer, checkpoint, hf)
        say(f"  {_reload_text(result)}")
        wrong = not _is_good(result)
    say(f"loss curve              {curve}")
    say(f"metrics                 {run / METRICS_FILE}, TensorBoard in {run / config.metrics.save_tb_folder}")
    if wrong:
        raise UserError(f"{hf} is a wrong export, see above. The checkpoint is whole: {checkpoint}.")


class Reload(TypedDict):
    """What the fresh interpreter reports."""

    transformers: str
    missing: list[str]
    unexpected: list[str]
    max_difference: float


def _is_good(result: Reload) -> bool:
    # NaN is no difference that fits.
    return not result["missing"] and not result["unexpected"] and result["max_difference"] <= LOGITS_TOLERANCE


def _reload_text(result: Reload) -> str:
    missing, unexpected = result["missing"], result["unexpected"]
    text = (
        f"reloaded in Transformers {result['transformers']}: {len(missing)} missing keys, {len(unexpected)} "
        f"unexpected, largest float32 logit difference {result['max_difference']:.1e}"
    )
    if _is_good(result):
        return text
    details = "".join(
        f"\n    {kind}: {', '.join(keys[:5])}"
        for kind, keys in (("missing", missing), ("unexpected", unexpected))
        if keys
    )
    return f"WRONG EXPORT: {text} (at most {LOGITS_TOLERANCE:.0e} expected){details}"


def _reference_losses(config: Any, tokenizer: Any) -> dict[str, float]:
    if not config.validator.enable or not isinstance(config.dataloader, TextDataLoader.Config):
        return {}
    if config.validator.dataloader.split != "validation":
        return {}
    if config.dataloader.format != "text" or any(source.is_chat for source in config.dataloader.sources):
        return {}  # the loss is over assistant turns, the references over every token
    train, validation = split_documents(config.dataloader, tokenizer)
    if int(train.sizes_N.sum()) > COUNTED_TOKENS:
        return {}
    vocab_size = config.model_spec.model.vocab_size
    seen, held = ([documents.tokens(n) for n in range(len(documents))] for documents in (train, validation))
    return {
        "unigram, add-one": unigram_cross_entropy(seen, held, vocab_size),
        "bigram, interpolated": bigram_cross_entropy(seen, held, vocab_size),
    }


def _check_reload(trainer: Trainer, checkpoint: Path, hf: Path) -> Reload:
    """Logits of the trained weights through the native model, against those of `hf` in a fresh interpreter.

    The weights come from the checkpoint, not from the live model: it may be sharded over ranks that are gone.
    """
    model = _native_model(trainer, checkpoint)
    tokens_BL = _probe_tokens(trainer)
    set_spmd_meshes(dense_mesh=None, sparse_mesh=None)  # their groups are gone; experts would ask for them
    with torch.no_grad():
        logits_BLV = model(tokens_BL)
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.safetensors"
        save_file({"tokens": tokens_BL, "logits": logits_BLV.float().contiguous()}, probe)
        return reload_in_fresh_interpreter(hf, probe)


def _native_model(trainer: Trainer, checkpoint: Path) -> torch.nn.Module:
    with torch.device("meta"):
        model = trainer.model_config.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    state = model.state_dict()
    dcp.load(state, checkpoint_id=str(checkpoint), no_dist=True)
    model.load_state_dict(state)
    with torch.no_grad():
        for parameter in model.parameters():
            # What was published: rounded to its dtype, then computed with in float32 as it is in the fresh interpreter.
            parameter.data = parameter.data.to(trainer.published_dtype).float()
    return model.float().eval()


def _probe_tokens(trainer: Trainer) -> torch.Tensor:
    """Some of the ids that the model has, [2, L], the same in every run."""
    length = min(64, trainer.config.training.seq_len)
    ids = np.random.default_rng(0).integers(0, trainer.model_config.vocab_size, (2, length))
    return torch.from_numpy(ids)


def reload_in_fresh_interpreter(hf: Path, probe: Path) -> Reload:
    """Run `python -m titan_recipes.publish.reload` and return what it found.

    Fresh, because TorchTitan's Transformers backend patches `PreTrainedModel` for the whole process that imports it.
    Raises RuntimeError with the child's error text when it fails.
    """
    child = subprocess.run(
        [sys.executable, "-m", "titan_recipes.publish.reload", str(hf), str(probe)],
        env=without_ranks() | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode != 0:
        raise RuntimeError(f"{hf} does not reload in Transformers:\n{child.stderr.strip()[-4000:]}")
    report: Reload = json.loads(child.stdout.splitlines()[-1])
    return report
