"""Work a conversion out from names and shapes, before a byte is read.

Everything that can be refused is refused here: unknown or missing tensors, a config that does not fit, experts that are
not all there. What follows only moves rows.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch

from .config import check_config, check_layers, fit_config, stored_dtype, tied
from .formats.tensors import TensorInfo, TensorSource
from .names.read import Reading, missing_parts, read_names
from .names.rows import Piece, Shape
from .names.table import EMBED, HEAD, HUB_LAYOUTS, SPELLINGS, Layout
from .names.write import Target, write_names
from .options import Options
from .plan import Output, Plan, resolve
from .sizes import sizes_of
from .ties import settle_tie, with_witness
from .vocabulary import size_vocabulary

__all__ = ["make_plan", "refuse_unexpected"]


def make_plan(source: TensorSource, config: Mapping[str, Any], layout: Layout, options: Options) -> Plan:
    """Work out a conversion.

    Args:
        source: what is read; only its names, shapes and dtypes are used here.
        config: the model's `config.json`.
        layout: what is written.
        options: the caller's choices.

    Returns:
        Every output with its reads, and the config to publish.

    Raises:
        ValueError: tensors unknown, missing, doubled, of wrong shape, or in contradiction with the config.
    """
    tensors = source.tensors
    reading = read_names({name: info.shape for name, info in tensors.items()})
    refuse_unexpected(reading)
    parts = dict(reading.parts)
    wanted = options.dtype or (stored_dtype(config) if layout in HUB_LAYOUTS else None)
    plan = Plan(layout, config=dict(config), tie=tied(config), dtype=wanted, reading=reading)
    options.refuse_idle(layout)
    plan.notes += getattr(source, "notes", ())
    twin = settle_tie(plan, parts, options)
    plan.missing = _check_complete(parts, reading, plan.tie, options)
    plan.sizes = sizes_of(Reading(parts=parts))
    vocab = size_vocabulary(plan, parts, options)
    _settle_config(plan, vocab, options)

    plan.expert_layouts = _expert_layouts(reading, options)
    for target in write_names(parts, layout, expert_layouts=plan.expert_layouts):
        part = target.pieces[0].part or ""
        if part in (EMBED, HEAD):
            pieces = (Piece(part, 0, vocab), Piece(None, 0, target.shape[0] - vocab))
            target = Target(target.name, target.shape, pieces)
        output = _output(target, reading, tensors, wanted)
        if output.info.dtype != output.stored:
            cast = f"{str(output.stored)[6:]} -> {str(output.info.dtype)[6:]}"
            plan.cast[cast] = plan.cast.get(cast, 0) + 1
        if part == EMBED and twin is not None:
            output = with_witness(output, twin, vocab, source)
        plan.outputs.append(output)
    if plan.tie and not plan.to_hub:
        head, embed = (write_names({part: (1, 1)}, layout)[0].name for part in (HEAD, EMBED))
        plan.aliases[head] = embed
    return plan


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
            "this is a backbone without its head: lm_head.weight is absent and config.json does not tie it to the "
            "embedding (tie_word_embeddings is false, which it also is when absent). Correct that if the model is "
            "tied, or "
            "allow it with allow_missing_head (--allow-missing-head)."
        )
    if missing:
        shown = ", ".join(map(repr, missing[:5])) + (" ..." if len(missing) > 5 else "")
        raise ValueError(f"{len(missing)} tensors are missing: {shown}")
    return []


def _settle_config(plan: Plan, vocab: int, options: Options) -> None:
    """Check the config against the tensors and fill in what it leaves out."""
    if options.fit_config:
        plan.config = fit_config(plan.config, plan.sizes, vocab)
    plan.config = check_config(plan.config, plan.sizes, vocab_size=vocab)
    check_layers(plan.config, plan.reading)
    moe = plan.sizes.num_experts > 0
    plan.config.setdefault("model_type", "qwen3_moe" if moe else "qwen3")
    plan.config.setdefault("architectures", ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"])


def _expert_layouts(reading: Reading, options: Options) -> dict[int, str]:
    """Layer -> layout for `as-source`; a layer that was stacked by TorchTitan is written per expert."""
    if options.experts != "as-source":
        return {}
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


def refuse_unexpected(reading: Reading) -> None:
    """ValueError for tensors that the table does not know: how many, and for five of them the nearest known name."""
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
