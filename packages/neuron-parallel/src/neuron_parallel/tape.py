"""Which tensors live when, while a chain of operations runs forward and backward: the rules of eager autograd.

An operation allocates its outputs, and keeps for its backward pass what its derivative needs. A tensor is freed after its last reader
unless one keeps it. Backward, an operation's input gradients come into being while its output gradients and kept tensors still live;
then those are freed, kept tensors by the last operation (in backward order) that kept them. A gradient from a second reader is added
to the first one's: for a moment there are both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from neuron_parallel.quantity import ZERO, Quantity

__all__ = ["Moment", "Op", "Sizes", "kept_sizes", "replay_backward", "replay_forward"]

Sizes = dict[str, Quantity]
"""Bytes by tensor name."""


@dataclass(frozen=True)
class Op:
    """One operation. Names refer to tensors; sizes are in bytes."""

    name: str
    reads: tuple[str, ...] = ()
    """Inputs that get a gradient."""
    makes: Sizes = field(default_factory=dict)
    keeps: tuple[str, ...] = ()
    """Existing or made tensors that the backward pass needs."""
    keeps_new: Sizes = field(default_factory=dict)
    """Tensors that exist only for the backward pass."""
    weight: Quantity = ZERO
    """Bytes of the gradients of its parameters, unsharded."""
    scratch: Quantity = ZERO
    """Further bytes while the forward operation runs."""
    scratch_backward: Quantity = ZERO
    alias: bool = False
    """Its gradient is its output's gradient, not a new tensor (an addition)."""
    part: str = "activations"
    """Part of the report that what it makes and keeps belongs to."""
    selective: bool = False
    """Whether TorchTitan's selective checkpointing saves what it makes."""
    linear: bool = False
    """A linear's matrix product: selective checkpointing saves every second, "linears" all."""


@dataclass
class Moment:
    """The tensors that live at one moment, and their sum."""

    where: str
    bytes: float
    live: Sizes


def kept_sizes(ops: Sequence[Op], given: Sizes) -> Sizes:
    """What lives after the forward pass for the sake of the backward pass."""
    sizes = _all_sizes(ops, given)
    return {name: sizes[name] for op in ops for name in (*op.keeps, *op.keeps_new)}


def replay_forward(ops: Sequence[Op], given: Sizes, keep: bool, results: Iterable[str] = ()) -> Moment:
    """The largest moment of the forward pass. With keep=False nothing is kept (a checkpointed block, or evaluation)."""
    sizes = _all_sizes(ops, given)
    results = set(results)
    last = {name: i for i, op in enumerate(ops) for name in (*op.reads, *op.keeps)}
    kept: set[str] = set()
    live = dict(given)
    peak = Moment("", -1.0, {})
    for i, op in enumerate(ops):
        new = {**op.makes, **op.keeps_new}
        live.update(new)
        peak = _larger(peak, op.name, live, {f"scratch of {op.name}": op.scratch})
        if keep:
            kept.update(op.keeps, op.keeps_new)
        for name in [n for n in live if n not in kept and n not in results and last.get(n, -1) <= i and n in sizes]:
            if name in given and last.get(name, -1) < 0:
                continue  # nobody's input: held by the caller
            del live[name]
    return peak


def replay_backward(ops: Sequence[Op], given: Sizes, gradient: str) -> Moment:
    """The largest moment of the backward pass, from the gradient of tensor `gradient` to those of the first inputs.

    All kept tensors live at the start, parameter gradients until the end.
    """
    sizes = _all_sizes(ops, given)
    keepers: dict[str, int] = {}
    for i, op in reversed(list(enumerate(ops))):
        for name in (*op.keeps, *op.keeps_new):
            keepers[name] = i  # the first operation to keep it is the last to need it
    live: Sizes = {name: sizes[name] for name in keepers}
    live[f"gradient of {gradient}"] = sizes[gradient]
    grads = {gradient}
    shared: set[str] = set()
    peak = Moment("", -1.0, {})
    for i in range(len(ops) - 1, -1, -1):
        op = ops[i]
        outs = [name for name in op.makes if name in grads]
        if outs or not op.makes:
            extra: Sizes = {f"scratch of {op.name} backward": op.scratch_backward}
            for name in op.reads:
                if name in grads:
                    extra[f"second gradient of {name}"] = sizes[name]
                elif op.alias:
                    shared.add(name)
                    live[f"gradient of {name}"] = ZERO
                else:
                    live[f"gradient of {name}"] = sizes[name]
                grads.add(name)
            if op.weight.value:
                live[f"parameter gradient of {op.name}"] = op.weight
            peak = _larger(peak, f"{op.name} backward", live, extra)
        for name in outs:
            if op.alias and op.reads:
                live[f"gradient of {op.reads[0]}"] = live.get(f"gradient of {op.reads[0]}", ZERO) + live.pop(
                    f"gradient of {name}"
                )
            else:
                live.pop(f"gradient of {name}", None)
        for name in [n for n, keeper in keepers.items() if keeper == i]:
            live.pop(name, None)
    return peak


def _all_sizes(ops: Sequence[Op], given: Sizes) -> Sizes:
    sizes = dict(given)
    for op in ops:
        sizes.update(op.makes)
        sizes.update(op.keeps_new)
    return sizes


def _larger(peak: Moment, where: str, live: Sizes, extra: Sizes) -> Moment:
    total = sum(q.value for q in live.values()) + sum(q.value for q in extra.values())
    if total <= peak.bytes:
        return peak
    return Moment(where, total, {**live, **{name: q for name, q in extra.items() if q.value}})
