"""What to read and what to write: a conversion as data, made from names and shapes before a byte is read.

Everything that can be refused is refused here: unknown or missing tensors, a config that does not fit,
experts that are not all there. Then `convert.py` only moves rows.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .assets import Sizes, check_config, sizes_of, stored_dtype, tied
from .formats.tensors import WEIGHT_DTYPES, TensorInfo, TensorSource
from .names.read import Reading, missing_parts, read_names
from .names.rows import Piece, Shape
from .names.table import EMBED, HEAD, HUB_LAYOUTS, SPELLINGS, Layout
from .names.write import Target, write_names

__all__ = ["Options", "Output", "Plan", "Read", "make_plan", "refuse_unexpected", "resolve", "vocabulary"]

# The most rows that rounding a vocabulary up for tensor parallelism adds; more is not padding but a wrong
# config.
MAX_PADDING = 1024
EXPERTS = ("per-expert", "fused", "as-source")
HEADS = ("omit", "write")
ON_UNTIED = ("fail", "untie", "drop")


@dataclass(frozen=True)
class Options:
    """How to convert. Every field is a flag of `hf-ckpt convert`.

    dtype: cast floating tensors to this; None keeps the config's dtype on export and the stored one on
        import.
    experts: `per-expert`, `fused` or `as-source`, for a Hub folder.
    head: tied models: `omit` lm_head (as the config implies) or `write` it too.
    on_untied: tied by the config, but embedding and head differ: `fail`, `untie` (keep both, config says
        untied) or `drop` the head.
    allow_missing_head: accept a backbone without lm_head whose config is untied.
    fit_config: take sizes from the tensors where the config disagrees, instead of refusing.
    max_shard_bytes: largest output file, unless one tensor alone is larger.
    pad_vocab_to: round the vocabulary up to a multiple of this, with zero rows (import).
    """

    dtype: torch.dtype | None = None
    experts: str = "per-expert"
    head: str = "omit"
    on_untied: str = "fail"
    allow_missing_head: bool = False
    fit_config: bool = False
    max_shard_bytes: int = 5_000_000_000
    pad_vocab_to: int = 1

    def __post_init__(self) -> None:
        words = {"experts": EXPERTS, "head": HEADS, "on_untied": ON_UNTIED}
        for name, known in words.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")
        if self.dtype is not None and self.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"dtype is {self.dtype}; weights can be cast to {', '.join(map(str, WEIGHT_DTYPES))}")
        for name in ("max_shard_bytes", "pad_vocab_to"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")


@dataclass(frozen=True)
class Read:
    """The next `rows` rows: of stored tensor `tensor` from `row` on, or zeros when `tensor` is None."""

    tensor: str | None
    row: int
    rows: int


@dataclass(frozen=True)
class Output:
    """A tensor to write, and the reads that fill it. `witness` are reads of the same rows that must be
    equal."""

    name: str
    info: TensorInfo
    stored: torch.dtype
    reads: tuple[Read, ...]
    witness: tuple[Read, ...] = ()


@dataclass
class Plan:
    """A whole conversion. `aliases` are names that share another output's bytes (a tied head in DCP)."""

    layout: Layout
    config: dict[str, Any]
    tie: bool
    dtype: torch.dtype | None
    reading: Reading
    sizes: Sizes = field(default_factory=Sizes)
    outputs: list[Output] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    trimmed: dict[str, int] = field(default_factory=dict)
    cast: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def to_hub(self) -> bool:
        """Whether the layout is one of Hugging Face's."""
        return self.layout in HUB_LAYOUTS

    def check_side(self, state: Mapping[str, torch.Tensor]) -> None:
        """ValueError when native-only state is not of this model: one number for each expert of a MoE
        layer."""
        for name, tensor in state.items():
            layer = int(name.split(".")[1])
            if layer not in self.reading.experts or tuple(tensor.shape) != (self.sizes.num_experts,):
                raise ValueError(
                    f"native-only state {name!r} of shape {list(tensor.shape)} is not of this model, which "
                    f"has {self.sizes.num_experts} experts in layers {sorted(self.reading.experts)}"
                )

    def side_names(self, state: Mapping[str, torch.Tensor], *, fill: bool = True) -> dict[str, torch.Tensor]:
        """Native-only state under the names of a TorchTitan layout.

        With `fill`, a MoE layer without any gets a zero bias: TorchTitan's model has that buffer (moe.py,
        `load_balance_coeff`) and DCP refuses to load a model of which the checkpoint lacks a name.
        """
        layers = self.reading.experts if fill else ()
        full = {f"layers.{n}.moe.expert_bias_E": torch.zeros(self.sizes.num_experts) for n in layers}
        full.update(state)
        if self.layout is Layout.BACKEND:
            full = {re.sub(r"^layers\.(\d+)\.moe\.", r"model.model.layers.\1.mlp.", n): t for n, t in full.items()}
        return dict(sorted(full.items()))


def refuse_unexpected(reading: Reading) -> None:
    if not reading.unexpected:
        return
    known = [s.name for s in SPELLINGS]
    shown = []
    for name in reading.unexpected[:5]:
        near = difflib.get_close_matches(name, known, 1, 0.4)
        shown.append(f"{name!r}" + (f" (nearest known: {near[0]!r})" if near else ""))
    raise ValueError(
        f"{len(reading.unexpected)} tensors that a Qwen3 ({reading.dialect} names) does not have: {', '.join(shown)}"
    )


def resolve(target: Target, reading: Reading) -> tuple[Read, ...]:
    """Turn pieces of parts into reads of stored tensors, neighbouring reads merged."""
    reads: list[Read] = []

    def add(tensor: str | None, row: int, rows: int) -> None:
        last = reads[-1] if reads else None
        if last and last.tensor == tensor and (tensor is None or last.row + last.rows == row):
            reads[-1] = Read(tensor, last.row, last.rows + rows)
        elif rows:
            reads.append(Read(tensor, row, rows))

    for piece in target.pieces:
        if piece.part is None:
            add(None, 0, piece.rows)
            continue
        row, left = piece.row, piece.rows
        for run in reading.runs[piece.part]:
            if left and run.part_row <= row < run.part_row + run.rows:
                take = min(left, run.part_row + run.rows - row)
                add(run.tensor, run.row + row - run.part_row, take)
                row, left = row + take, left - take
        assert left == 0, (target.name, piece, reading.runs[piece.part])
    return tuple(reads)


def _check_layers(config: Mapping[str, Any], reading: Reading) -> None:
    """Which layers are MoE, by the config's rule and by the tensors."""
    count = config.get("num_experts") or 0
    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    moe = config.get("model_type", "qwen3_moe" if count else "qwen3") == "qwen3_moe" and count > 0
    for layer in range(reading.layers):
        by_config = moe and layer not in dense and (layer + 1) % step == 0
        by_tensors = f"model.layers.{layer}.mlp.gate.weight" in reading.parts or layer in reading.experts
        if by_config != by_tensors:
            words = ("dense", "mixture-of-experts")
            raise ValueError(
                f"layer {layer} is {words[by_tensors]} by its tensors and {words[by_config]} by "
                f"config.json (model_type {config.get('model_type')!r}, num_experts {count})"
            )
    types = config.get("layer_types")
    if types is not None and len(types) != reading.layers:
        raise ValueError(f"config.json lists {len(types)} layer_types for {reading.layers} layers")


def fit_config(config: Mapping[str, Any], sizes: Sizes, vocab_size: int) -> dict[str, Any]:
    """`config` with every size replaced by what the tensors say; `layer_types` repeated when all are one
    kind."""
    told = {name: value for name, value in vars(sizes).items() if value}
    kind = "qwen3_moe" if sizes.num_experts else "qwen3"
    result = {**config, **told, "vocab_size": vocab_size, "model_type": kind}
    types = config.get("layer_types")
    if isinstance(types, list) and types and all(t == types[0] for t in types):
        result["layer_types"] = [types[0]] * sizes.num_hidden_layers
    return result


def make_plan(source: TensorSource, config: Mapping[str, Any], layout: Layout, options: Options) -> Plan:
    """Work out a conversion.

    Args:
        source: what is read; only its names, shapes and dtypes are used here.
        config: the model's `config.json`.
        layout: what is written.

    Raises:
        ValueError: tensors unknown, missing, doubled, of wrong shape, or in contradiction with the config.
    """
    tensors = source.tensors
    reading = read_names({name: info.shape for name, info in tensors.items()})
    refuse_unexpected(reading)
    parts = dict(reading.parts)
    wanted = options.dtype or (stored_dtype(config) if layout in HUB_LAYOUTS else None)
    plan = Plan(layout, config=dict(config), tie=tied(config), dtype=wanted, reading=reading)
    _refuse_idle_options(plan, options)
    plan.notes += getattr(source, "notes", ())
    twin = _settle_tie(plan, parts, options)
    plan.missing = _check_complete(parts, reading, plan.tie, options)
    plan.sizes = sizes_of(Reading(parts=parts))
    vocab = _size_vocabulary(plan, parts, options)
    _settle_config(plan, vocab, options)

    for target in write_names(parts, layout, expert_layouts=_expert_layouts(reading, options)):
        part = target.pieces[0].part or ""
        if part in (EMBED, HEAD):
            pieces = (Piece(part, 0, vocab), Piece(None, 0, target.shape[0] - vocab))
            target = Target(target.name, target.shape, pieces)
        output = _output(target, reading, tensors, wanted)
        if output.info.dtype != output.stored:
            cast = f"{str(output.stored)[6:]} -> {str(output.info.dtype)[6:]}"
            plan.cast[cast] = plan.cast.get(cast, 0) + 1
        if part == EMBED and twin is not None:
            output = _with_witness(output, twin, vocab, source, reading)
        plan.outputs.append(output)
    if plan.tie and not plan.to_hub:
        head, embed = (write_names({part: (1, 1)}, layout)[0].name for part in (HEAD, EMBED))
        plan.aliases[head] = embed
    return plan


def _refuse_idle_options(plan: Plan, options: Options) -> None:
    """An option that could change nothing in this layout is a mistake to be told of."""
    idle = {
        "experts (--expert-layout)": options.experts != "per-expert" and not plan.to_hub,
        "head (--tied-head)": options.head != "omit" and not plan.to_hub,
        "pad_vocab_to (--pad-vocab-to)": options.pad_vocab_to != 1 and plan.to_hub,
    }
    for name, wrong in idle.items():
        if wrong:
            kind = "a Hugging Face folder, whose vocabulary is that of config.json" if plan.to_hub else "TorchTitan"
            raise ValueError(f"{name} has no meaning in layout {plan.layout.value!r}, for {kind}. Leave it out.")


def _settle_tie(plan: Plan, parts: dict[str, Shape], options: Options) -> str | None:
    """Decide whether the model is tied and which of the two matrices is written under its own bytes.

    Returns the head's stored name when the embedding has to be compared with it.
    """
    if not plan.tie or HEAD not in parts:
        if plan.tie and plan.to_hub and options.head == "write" and EMBED in parts:
            parts[HEAD], plan.reading.runs[HEAD] = parts[EMBED], plan.reading.runs[EMBED]
        return None
    if EMBED not in parts:
        parts[EMBED], plan.reading.runs[EMBED] = parts[HEAD], plan.reading.runs[HEAD]
        plan.notes.append("the embedding is absent; taken from the tied lm_head")
    elif parts[HEAD] != parts[EMBED]:
        shapes = f"lm_head is {list(parts[HEAD])} and the embedding {list(parts[EMBED])}"
        raise ValueError(f"config.json ties the head, but {shapes}")
    if options.on_untied == "untie":
        plan.tie = False
        return None
    if not (plan.to_hub and options.head == "write"):
        del parts[HEAD]
    elif options.on_untied == "drop":
        plan.reading.runs[HEAD] = plan.reading.runs[EMBED]
    return plan.reading.runs[HEAD][0].tensor if options.on_untied == "fail" else None


def _check_complete(parts: Mapping[str, Shape], reading: Reading, tie: bool, options: Options) -> list[str]:
    """Refuse a model with parts missing; returns those that are allowed to be."""
    numbers = {int(p.split(".")[5]) for p in parts if ".mlp.experts." in p}
    experts = max((shape[0] for p, shape in parts.items() if p.endswith(".mlp.gate.weight")), default=0)
    if numbers and max(numbers) >= experts:
        raise ValueError(f"there is an expert {max(numbers)}, but the router has {experts} rows")
    found = Reading(parts=dict(parts), experts=reading.experts)
    missing = missing_parts(found, layers=reading.layers, experts=experts, tied=tie)
    if missing == [HEAD]:
        if options.allow_missing_head:
            return missing
        raise ValueError(
            "this is a backbone without its head: lm_head.weight is absent and config.json does not tie "
            "it to the embedding. Allow that with allow_missing_head (--allow-missing-head)."
        )
    if missing:
        shown = ", ".join(map(repr, missing[:5])) + (" ..." if len(missing) > 5 else "")
        raise ValueError(f"{len(missing)} tensors are missing: {shown}")
    return []


def _size_vocabulary(plan: Plan, parts: dict[str, Shape], options: Options) -> int:
    """Trim embedding and head to the config's vocabulary and pad them to a multiple; the rows that come from
    the source."""
    stored = plan.sizes.vocab_size
    vocab = stored if options.fit_config else vocabulary(plan.config, stored)
    if vocab != stored:
        plan.trimmed = {p: stored - vocab for p in (EMBED, HEAD) if p in parts}
    padded = vocab + -vocab % options.pad_vocab_to
    if padded - vocab >= MAX_PADDING:
        raise ValueError(
            f"a vocabulary of {vocab} padded to a multiple of {options.pad_vocab_to} gets {padded - vocab} rows; an "
            f"export takes fewer than {MAX_PADDING} for padding. Choose a smaller multiple (pad_vocab_to)."
        )
    for part in (EMBED, HEAD):
        if part in parts:
            parts[part] = (padded, *parts[part][1:])
    return vocab


def vocabulary(config: Mapping[str, Any], rows: int) -> int:
    """Rows of a stored embedding or head that are vocabulary; the rest is padding."""
    stated = config.get("vocab_size")
    return stated if type(stated) is int and 0 < rows - stated < MAX_PADDING else rows


def _settle_config(plan: Plan, vocab: int, options: Options) -> None:
    """Check the config against the tensors and fill in what it leaves out."""
    if options.fit_config:
        plan.config = fit_config(plan.config, plan.sizes, vocab)
    plan.config = check_config(plan.config, plan.sizes, vocab_size=vocab)
    _check_layers(plan.config, plan.reading)
    moe = plan.sizes.num_experts > 0
    plan.config.setdefault("model_type", "qwen3_moe" if moe else "qwen3")
    plan.config.setdefault("architectures", ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"])


def _expert_layouts(reading: Reading, options: Options) -> dict[int, str] | None:
    """Layer -> layout for `as-source`; a layer that was stacked by TorchTitan is written per expert."""
    if options.experts != "as-source":
        return None
    return {layer: "fused" if kind == "fused" else "per-expert" for layer, kind in reading.experts.items()}


def _output(target: Target, reading: Reading, tensors: Mapping[str, TensorInfo], wanted: torch.dtype | None) -> Output:
    reads = resolve(target, reading)
    stored, *others = {tensors[r.tensor].dtype for r in reads if r.tensor is not None}
    if others:
        names = " and ".join(sorted(map(str, (stored, *others))))
        raise ValueError(f"{target.name!r} joins tensors of {names}; convert them to one dtype first")
    # Only floating tensors are cast.
    dtype = wanted if wanted is not None and stored.is_floating_point else stored
    return Output(target.name, TensorInfo(dtype, target.shape), stored, reads)


def _with_witness(output: Output, twin: str, vocab: int, source: TensorSource, reading: Reading) -> Output:
    """The embedding, to be compared with the stored head while it is read; as it is when both are one
    region."""
    info = source.tensors[twin]
    same = getattr(source, "same_bytes", None)
    stored = output.reads[0].tensor
    if stored == twin or (same is not None and same(stored, twin)):
        return output
    if info.dtype != output.stored:
        raise ValueError(
            f"config.json ties the head, but {stored!r} is {output.stored} and {twin!r} is {info.dtype}. "
            "Choose with on_untied (--on-untied): untie or drop."
        )
    return replace(output, witness=(Read(twin, 0, vocab),))
