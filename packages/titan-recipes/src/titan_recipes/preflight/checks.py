"""Everything that can be refused before a rank starts: one clear error each, read from the built config."""

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hf_ckpt_adapter.sources import ASSETS

from ..checkpoint.manager import complete_steps
from ..data.loader import TextDataLoader, check_parts, stores_of
from ..errors import UserError
from ..logs import say
from ..models.find import refuse_remote_code
from ..models.simple_fsdp import refuse_unfit
from ..models.spec import route_of
from ..moe.router import refuse_balance
from ..train.trainer import validation_data

__all__ = ["check", "check_layout", "world_size_of"]


def world_size_of(config: Any) -> int:
    """The ranks that a recipe's degrees ask for: their product, an unset (-1) dp_shard counting as 1."""
    p = config.parallelism
    return (
        p.data_parallel_replicate_degree
        * max(p.data_parallel_shard_degree, 1)
        * p.context_parallel_degree
        * p.tensor_parallel_degree
        * p.pipeline_parallel_degree
    )


def check(config: Any, world_size: int, *, resume: bool) -> None:
    """Raise UserError for the first thing that would make this run fail or mean something else than was asked."""
    _check_world_size(config, world_size)
    check_layout(config)
    _check_remote_code(config)
    _check_folder(config, resume)
    _check_weights(config, resume)
    _check_tokenizer(config)
    _check_data(config)


def check_layout(config: Any) -> None:
    """Raise UserError for a parallel layout that does not work, or would mean something else; of any number of ranks."""
    _check_shapes(config)
    _check_backend(config)
    _check_context_parallel(config)
    _check_pipeline(config)


def _check_world_size(config: Any, world_size: int) -> None:
    p = config.parallelism
    degrees = {
        "data_parallel_replicate_degree": p.data_parallel_replicate_degree,
        "data_parallel_shard_degree": p.data_parallel_shard_degree,
        "context_parallel_degree": p.context_parallel_degree,
        "tensor_parallel_degree": p.tensor_parallel_degree,
        "pipeline_parallel_degree": p.pipeline_parallel_degree,
    }
    fixed = math.prod(degree for degree in degrees.values() if degree > 0)
    inferred = p.data_parallel_shard_degree == -1
    if world_size % fixed if inferred else world_size != fixed:
        product = " x ".join(
            f"{name.removesuffix('_degree')} {degree}" for name, degree in degrees.items() if degree != 1
        )
        expected = f"a multiple of {fixed} (data_parallel_shard takes the rest)" if inferred else str(fixed)
        raise UserError(
            f"World size {world_size} does not match the recipe's degrees: {product or 'all 1'} needs {expected} ranks.\n"
            f"Pass --nproc {fixed} (or start that many with torchrun), or change --parallelism.*_degree."
        )
    ranks = world_size // (p.context_parallel_degree * p.tensor_parallel_degree * p.pipeline_parallel_degree)
    local, total = config.training.local_batch_size, config.training.global_batch_size
    if total > 0 and total % (local * ranks):
        raise UserError(
            f"training.global_batch_size {total} is not a multiple of local_batch_size {local} x {ranks} data-parallel ranks; "
            f"nearest: {max(1, round(total / (local * ranks))) * local * ranks}."
        )


def _check_shapes(config: Any) -> None:
    model, p, seq_len = config.model_spec.model, config.parallelism, config.training.seq_len
    if seq_len > model.max_seq_len:
        raise UserError(
            f"training.seq_len {seq_len} is over the model's RoPE table of {model.max_seq_len} positions.\n"
            f"Use --training.seq_len {model.max_seq_len} or less, or raise max_position_embeddings in the recipe."
        )
    multiple = p.tensor_parallel_degree if p.enable_sequence_parallel else 1
    multiple *= 2 * p.context_parallel_degree if p.context_parallel_degree > 1 else 1
    if seq_len % multiple:
        raise UserError(
            f"training.seq_len {seq_len} must be a multiple of {multiple} (tensor parallel {p.tensor_parallel_degree} with sequence "
            f"parallel, context parallel {p.context_parallel_degree}); nearest: {seq_len // multiple * multiple or multiple}."
        )
    tp = p.tensor_parallel_degree
    for name, heads in _heads(model).items():
        if heads % tp:
            valid = [d for d in range(1, heads + 1) if heads % d == 0]
            raise UserError(f"tensor_parallel_degree {tp} does not divide the {heads} {name}; valid degrees: {valid}.")


def _check_backend(config: Any) -> None:
    p, spec = config.parallelism, config.model_spec
    refuse_unfit(spec, p)
    refuse_balance(spec, p)
    if not hasattr(spec.model, "qwen3") or route_of(spec) != "transformers":
        return
    if p.spmd_backend != "spmd_types":
        raise UserError(
            f"parallelism.spmd_backend is {p.spmd_backend!r}; TorchTitan's Transformers backend knows 'spmd_types' alone.\n"
            "Use --parallelism.spmd_backend spmd_types, or --route native."
        )
    if p.tensor_parallel_degree > 1 and not p.enable_sequence_parallel:
        raise UserError(
            "parallelism.enable_sequence_parallel is off, but TorchTitan's Transformers backend always splits the sequence with tensor "
            "parallel.\nLeave it on, or use --route native."
        )


def _check_context_parallel(config: Any) -> None:
    p = config.parallelism
    if p.context_parallel_degree == 1 or not hasattr(config.model_spec.model, "qwen3"):
        return
    if p.spmd_backend != "spmd_types":
        raise UserError(
            f"Context parallel under parallelism.spmd_backend {p.spmd_backend!r} is not supported: TorchTitan gathers the keys of all "
            "ranks for an attention of ours under 'spmd_types' alone.\n"
            "Use --parallelism.spmd_backend spmd_types, or --parallelism.context_parallel_degree 1."
        )
    if p.context_parallel_load_balancer not in (None, "headtail"):
        raise UserError(
            f"context_parallel_load_balancer {p.context_parallel_load_balancer!r} balances FlexAttention's block masks, which this "
            "toolkit's attention does not have.\nUse headtail or None: a dense mask gives every rank the same work."
        )


def _check_pipeline(config: Any) -> None:
    model, p = config.model_spec.model, config.parallelism
    if p.pipeline_parallel_degree == 1:
        return
    if _is_tied(model):
        raise UserError(
            "Pipeline parallel with tied embeddings is not supported: first and last stage would each train a copy.\n"
            "Use --parallelism.pipeline_parallel_degree 1, or tie_word_embeddings=False in the recipe."
        )
    if p.pipeline_parallel_schedule == "DualPipeV":
        raise UserError(
            "The DualPipeV schedule has the loss on the first rank, but TorchTitan's metrics are kept on the last.\n"
            "Use --parallelism.pipeline_parallel_schedule ZBVZeroBubble, whose loss they find, or Interleaved1F1B."
        )
    if p.pipeline_parallel_schedule == "ZBVZeroBubble" and config.validator.enable:
        raise UserError(
            "torch's pipelines cannot run the ZBVZeroBubble schedule without a backward pass, as validation does.\n"
            "Use --validator.no-enable, or another schedule, such as Interleaved1F1B."
        )
    try:
        _split_layers(p, model)
    except ValueError as error:
        raise UserError(
            f"{p.pipeline_parallel_degree} pipeline stages with the {p.pipeline_parallel_schedule} schedule do not fit the model: {error}\n"
            "Change pipeline_parallel_degree, pipeline_parallel_layers_per_stage or the stages' *_less_layers."
        ) from None


def _split_layers(parallelism: Any, model: Any) -> None:
    """TorchTitan's split into stages. Raises ValueError where the ranks would."""
    from torchtitan.distributed import pipeline_parallel as titan

    degree = SimpleNamespace(pp=parallelism.pipeline_parallel_degree)
    layers = SimpleNamespace(layers=range(model.qwen3.num_hidden_layers)) if hasattr(model, "qwen3") else model
    split = titan._get_pipeline_metadata(degree, parallelism, layers)
    if parallelism.module_fqns_per_model_part is None:
        titan._generate_llm_fqn_per_model_part(*split)


def _heads(model: Any) -> dict[str, int]:
    """Heads by kind, of a model spec of ours on any route, or of TorchTitan's own."""
    if hasattr(model, "qwen3"):
        heads, kv_heads = model.qwen3.num_attention_heads, model.qwen3.num_key_value_heads
    else:
        heads = model.first_attention.n_heads
        kv_heads = model.first_attention.n_kv_heads or heads
    return {"attention heads": heads, "KV heads": kv_heads}


def _is_tied(model: Any) -> bool:
    return bool(model.qwen3.tie_word_embeddings if hasattr(model, "qwen3") else model.enable_weight_tying)


def _check_remote_code(config: Any) -> None:
    """Folders that this run, or who loads its export, reads configuration from."""
    if getattr(config, "hf_model", ""):
        raise UserError(
            f"hf_model {config.hf_model!r}: TorchTitan reads that config with trust_remote_code=True, which runs code from its folder.\n"
            "Build the model spec with titan_recipes.models.spec.transformers(...) instead."
        )
    checkpoint = config.checkpoint
    for folder in (config.hf_assets_path, checkpoint.initial_load_path if checkpoint.enable else None):
        if folder:
            refuse_remote_code(Path(folder).expanduser())
            refuse_remote_code(Path(folder).expanduser() / ASSETS)


def _check_tokenizer(config: Any) -> None:
    folder = Path(config.hf_assets_path).expanduser()
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"There is no tokenizer.json in hf_assets_path {str(folder)!r}.\nPoint --hf_assets_path at a model folder."
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        ids = [
            *content["model"]["vocab"].values(),
            *(token["id"] for token in content.get("added_tokens", [])),
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a readable tokenizer: {error!r}.") from None
    decoder = folder / "tokenizer_config.json"
    if decoder.is_file():
        ids += [int(token) for token in json.loads(decoder.read_text(encoding="utf-8")).get("added_tokens_decoder", {})]
    rows = config.model_spec.model.vocab_size
    if max(ids) >= rows:
        raise UserError(
            f"The tokenizer in {folder} has ids up to {max(ids)}, but the model has {rows} embedding rows (ids 0 to {rows - 1}).\n"
            f"Set vocab_size to at least {max(ids) + 1} in the recipe, or point --hf_assets_path at the model's own tokenizer."
        )


def _check_data(config: Any) -> None:
    """Tokenise what the run will read, unless that was done before, say how much it is, and that each part of it has some."""
    loaders = [config.dataloader, *([validation_data(config)] if config.validator.enable else [])]
    loaders = [loader for loader in loaders if isinstance(loader, TextDataLoader.Config)]
    if not loaders:
        return
    try:
        tokenizer = config.tokenizer.build(tokenizer_path=config.hf_assets_path)
    except Exception as error:  # whatever a file of another's, or a template in it, makes TorchTitan raise
        raise UserError(f"The tokenizer in {config.hf_assets_path} cannot be loaded: {error!r}.") from None
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
            "checkpoint.last_save_in_hf leaves a last step without config, tokenizer and optimizer, from which no run goes on.\n"
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
                f"The weights in {path or config.hf_assets_path} would not be read, since checkpoint.enable is off: the run would start "
                "from random ones.\nTo load them and save nothing: --checkpoint.load_only in the place of --checkpoint.no-enable."
            )
        return
    if not path or (resume and complete_steps(Path(config.dump_folder) / checkpoint.folder)):
        return
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(
            f"checkpoint.initial_load_path {path!r} is no folder here; weights come from a Hugging Face folder or a TorchTitan step.\n"
            "A Hub id in the local cache is found by --model."
        )
    if not checkpoint.initial_load_in_hf and not (folder / ".metadata").is_file():
        raise UserError(
            f"checkpoint.initial_load_path {path} is no TorchTitan step (it has no .metadata).\n"
            "For a Hugging Face folder add --checkpoint.initial_load_in_hf."
        )
