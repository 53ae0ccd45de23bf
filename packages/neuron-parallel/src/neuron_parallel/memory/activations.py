"""What a decoder layer keeps and needs, and what final norm, head and loss do.

The figures are results of replaying operations (autograd.py). They depend on no data-parallel degree, so that they are
worked out once for many layouts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from neuron_parallel.memory.autograd import Moment, Op, Sizes, kept_sizes, replay_backward, replay_forward
from neuron_parallel.memory.layers import before_head, block, embedding, head_and_loss
from neuron_parallel.memory.snapshot import Entry, Group
from neuron_parallel.memory.symbols import Symbols
from neuron_parallel.model import ModelShape
from neuron_parallel.plan import ParallelPlan, Training

__all__ = [
    "Embedded",
    "Layer",
    "Loss",
    "embedded",
    "kept",
    "layer",
    "loss",
]


@dataclass(frozen=True)
class Layer:
    """A decoder layer: tensors of its largest moments, and the operations at which they are."""

    kept: Group
    """Tensors that it keeps between its forward pass and its backward pass."""
    keeps_input: bool
    """The layer's input "x" is among the tensors that it keeps."""
    forward: Group
    forward_at: str
    recompute: Group | None
    recompute_at: str
    backward: Group
    backward_at: str


def layer(plan: ParallelPlan, shape: ModelShape, training: Training, moe: bool) -> Layer:
    """One of a model's layers, with experts (`moe`) or without."""
    return _layer(plan.without_dp, shape.one_layer, training, moe)


def kept(plan: ParallelPlan, shape: ModelShape, training: Training, moe: bool) -> Group:
    """`layer(...).kept` for less work."""
    return _kept(plan.without_dp, shape.one_layer, training, moe)


def embedded(plan: ParallelPlan, shape: ModelShape, training: Training) -> "Embedded":
    """What the look-up of the embedding keeps and needs."""
    return _embedded(plan.without_ep, shape.one_layer, training.without_mode)


def loss(plan: ParallelPlan, shape: ModelShape, training: Training) -> "Loss":
    """What final norm, head and loss keep and need."""
    return _loss(plan.without_ep, shape.one_layer, training.without_mode, plan.pp > 1)


@dataclass(frozen=True)
class _Tape:
    """A layer played in every mode."""

    parts: dict[str, str]
    keeping: Moment
    """The forward pass, which keeps what the backward pass needs."""
    bare: Moment
    """The forward pass, which keeps nothing."""
    backward: Moment
    backward_group: Group
    recompute_group: Group


@lru_cache(maxsize=8192)
def _ops(plan: ParallelPlan, shape: ModelShape, training: Training, moe: bool) -> tuple[list[Op], Sizes]:
    """A layer's operations, the same in every mode (`training` has none), and its input."""
    s = Symbols.of(plan, shape, training)
    return block(s, training, moe), {"x": s.t * s.D * s.a}


@lru_cache(maxsize=8192)
def _tape(plan: ParallelPlan, shape: ModelShape, training: Training, moe: bool) -> _Tape:
    ops, x = _ops(plan, shape, training, moe)
    parts = _parts(ops)
    keeping, backward = replay_forward(ops, x, True, ("y",)), replay_backward(ops, x, "y")
    return _Tape(
        parts,
        keeping,
        replay_forward(ops, x, False, ("y",)),
        backward,
        _named(backward.live, parts, {*parts, "x"}, backward.bytes),
        _named(keeping.live, parts, parts, keeping.bytes),
    )


@lru_cache(maxsize=8192)
def _kept_sizes(plan: ParallelPlan, shape: ModelShape, training: Training, moe: bool) -> Sizes:
    ops, sizes = _ops(plan, shape, training.without_mode, moe)
    if training.checkpointing == "none":
        return kept_sizes(ops, sizes)
    if training.checkpointing == "full":
        return sizes
    linears = training.checkpointing == "linears"
    saved = [op for op in ops if op.selective or (op.linear and linears)]
    return sizes | {name: size for op in saved for name, size in op.makes.items()}


@lru_cache(maxsize=8192)
def _kept(plan: ParallelPlan, shape: ModelShape, training: Training, moe: bool) -> Group:
    sizes = _kept_sizes(plan, shape, training, moe)
    return _kept_group(sizes, lambda: _parts(_ops(plan, shape, training.without_mode, moe)[0]))


@lru_cache(maxsize=8192)
def _layer(plan: ParallelPlan, shape: ModelShape, training: Training, moe: bool) -> Layer:
    tape = _tape(plan, shape, training.without_mode, moe)
    none = training.checkpointing == "none"
    sizes = _kept_sizes(plan, shape, training, moe)
    forward = tape.keeping if none else tape.bare
    return Layer(
        kept=_kept(plan, shape, training, moe),
        keeps_input="x" in sizes,
        forward=_named(forward.live if none else sizes | forward.live, tape.parts, sizes),
        forward_at=forward.where,
        recompute=None if none else tape.recompute_group,
        recompute_at=tape.keeping.where,
        backward=tape.backward_group,
        backward_at=tape.backward.where,
    )


@dataclass(frozen=True)
class Embedded:
    """The embedding's look-up."""

    kept: tuple[Entry, ...]
    backward: Group
    """Tensors of its backward pass. FSDP has the gradient of the table."""


@lru_cache(maxsize=4096)
def _embedded(plan: ParallelPlan, shape: ModelShape, training: Training) -> Embedded:
    ops = embedding(Symbols.of(plan, shape, training))
    live = replay_backward(ops, {}, "x").live
    live = {name: size for name, size in live.items() if not name.startswith("parameter")}
    kept = tuple(Entry("activations", name, size) for name, size in kept_sizes(ops, {}).items())
    return Embedded(kept, _named(live, _parts(ops), ()))


@dataclass(frozen=True)
class Loss:
    """What final norm, head and loss keep and need."""

    kept: Group
    """Tensors that the final norm keeps, and the head's input. Logits are in the moments."""
    moments: tuple[tuple[str, Group], ...]
    after_forward: Group
    """What the model's own forward pass keeps. A chunked loss has not begun then."""


@lru_cache(maxsize=4096)
def _loss(plan: ParallelPlan, shape: ModelShape, training: Training, piped: bool) -> Loss:
    s = Symbols.of(plan, shape, training)
    before, ops = before_head(s, training), head_and_loss(s, training)
    if piped:  # a pipeline's schedule holds what a stage put out until its backward pass is done
        ops[0] = replace(ops[0], keeps=("logits",))
    parts = _parts(ops)
    saved = kept_sizes(before, {"y": s.t * s.D * s.a})
    logits = {} if training.loss_chunks > 1 else kept_sizes(ops, {})

    def group(sizes: Sizes) -> Group:
        return _kept_group(sizes, lambda: parts)

    logits_alone = {"logits": ops[0].makes["logits"]}
    still = replace(ops[1], keeps=(*ops[1].keeps, *ops[0].keeps))
    moments = (
        replay_forward(ops, {}, True),
        replay_backward([still, *ops[2:]], logits_alone, "loss"),
        replay_backward(ops, {}, "loss"),
    )
    return Loss(
        kept=group(saved),
        moments=tuple((moment.where, _named(moment.live, parts, parts, moment.bytes)) for moment in moments),
        after_forward=group({name: size for name, size in (saved | logits).items() if "chunks" not in name}),
    )


def _parts(ops: Iterable[Op]) -> dict[str, str]:
    return {name: op.part for op in ops for name in (*op.makes, *op.keeps_new)}


def _kept_group(sizes: Sizes, parts: Callable[[], Mapping[str, str]]) -> Group:
    def entries() -> list[Entry]:
        of = parts()
        return [Entry(of.get(name, "activations"), name, size) for name, size in sizes.items()]

    return Group.later(_sum(sizes), entries)


def _named(live: Sizes, parts: dict[str, str], kept: Iterable[str], size: float | None = None) -> Group:
    """A moment as a group of tensors, each under a part of the report.

    What is kept stands under its own part. Parameter gradients are gradient buffers. Tensors of the logits' size are
    logits. All others are working memory. `size`: the moment's bytes, if they are known.
    """

    def entries() -> list[Entry]:
        own = set(kept)
        found = []
        for name, size in live.items():
            if name.startswith("parameter gradient"):
                part = "gradient buffers"
            elif parts.get(name.removeprefix("gradient of ")) == "logits" or name.startswith("scratch of loss"):
                part = "logits"
            else:
                part = parts.get(name, "activations") if name in own else "working"
            found.append(Entry(part, name, size))
        return found

    return Group.later(_sum(live) if size is None else size, entries)


def _sum(sizes: Sizes) -> float:
    return sum([size.value for size in sizes.values()])
