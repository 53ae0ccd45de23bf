"""Which tensors live when, while a chain of operations runs forward and backward: the rules of eager autograd.

An operation allocates its outputs, and keeps for its backward pass what its derivative needs. A tensor is freed after
its last reader unless one keeps it. Backward, an operation's input gradients come into being while its output gradients
and kept tensors still live; then those are freed, kept tensors by the last operation (in backward order) that kept
them. A gradient from a second reader is added to the first one's: for a moment there are both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from neuron_parallel.memory.quantity import ZERO, Quantity

__all__ = ["Moment", "Op", "Sizes", "kept_sizes", "replay_backward", "replay_forward"]

Sizes = dict[str, Quantity]
"""Bytes by tensor name."""


@dataclass(slots=True)
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
    last = {name: i for i, op in enumerate(ops) for name in (*op.reads, *op.keeps)}
    stay = {*results, *(name for name in given if name not in last)}  # what nobody reads is held by the caller
    if keep:
        stay.update(name for op in ops for name in (*op.keeps, *op.keeps_new))
    born: list[Sizes] = [{**op.makes, **op.keeps_new} for op in ops]
    dies: list[Sizes] = [{} for _ in ops]
    for i, sizes in enumerate((given, *born)):
        for name, size in sizes.items():
            if name not in stay:
                dies[max(last.get(name, 0), i - 1)][name] = size
    total, most, at = _total(given), -1.0, 0
    for i, op in enumerate(ops):
        total += _total(born[i])
        if total + op.scratch.value > most:
            most, at = total + op.scratch.value, i
        total -= _total(dies[i])
    dead = {name for sizes in dies[:at] for name in sizes}
    live = {name: size for sizes in (given, *born[: at + 1]) for name, size in sizes.items() if name not in dead}
    if ops[at].scratch.value:
        live[f"scratch of {ops[at].name}"] = ops[at].scratch
    return Moment(ops[at].name, most, live)


def replay_backward(ops: Sequence[Op], given: Sizes, gradient: str) -> Moment:
    """The largest moment of the backward pass, from the gradient of tensor `gradient` to those of the first inputs.

    All kept tensors live at the start, parameter gradients until the end.
    """
    sizes = _all_sizes(ops, given)
    keepers: dict[str, int] = {}
    for i in range(len(ops) - 1, -1, -1):
        for name in (*ops[i].keeps, *ops[i].keeps_new):
            keepers[name] = i  # the first operation to keep it is the last to need it
    freed: list[list[str]] = [[] for _ in ops]
    for name, keeper in keepers.items():
        freed[keeper].append(name)
    live = _Live({name: sizes[name] for name in keepers})
    live.add(f"gradient of {gradient}", sizes[gradient])
    grads = {gradient}
    peak = Moment("", -1.0, {})
    for i in range(len(ops) - 1, -1, -1):
        op = ops[i]
        outs = [name for name in op.makes if name in grads]
        if outs or not op.makes:
            extra: Sizes = {f"scratch of {op.name} backward": op.scratch_backward}
            for name in op.reads:
                if name in grads:
                    extra[f"second gradient of {name}"] = sizes[name]
                else:
                    live.add(f"gradient of {name}", ZERO if op.alias else sizes[name])
                grads.add(name)
            if op.weight.value:
                live.add(f"parameter gradient of {op.name}", op.weight)
            peak = live.larger(peak, f"{op.name} backward", extra)
        for name in outs:
            size = live.drop(f"gradient of {name}")
            if op.alias and op.reads:  # the first input's is the output's
                live.add(f"gradient of {op.reads[0]}", live.drop(f"gradient of {op.reads[0]}") + size)
        for name in freed[i]:
            live.drop(name)
    return peak


class _Live:
    """The tensors that live, and their sum."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = dict(sizes)
        self.total = _total(sizes)

    def add(self, name: str, size: Quantity) -> None:
        """Let a tensor live."""
        self.drop(name)
        self.sizes[name] = size
        self.total += size.value

    def drop(self, name: str) -> Quantity:
        """Let a tensor go, and return its size: ZERO when it does not live."""
        size = self.sizes.pop(name, ZERO)
        self.total -= size.value
        return size

    def larger(self, peak: Moment, where: str, extra: Sizes) -> Moment:
        """The larger one of `peak` and this moment, in which `extra` lives too."""
        total = self.total + _total(extra)
        if total <= peak.bytes:
            return peak
        return Moment(where, total, {**self.sizes, **{name: size for name, size in extra.items() if size.value}})


def _total(sizes: Sizes) -> float:
    return sum([size.value for size in sizes.values()])


def _all_sizes(ops: Sequence[Op], given: Sizes) -> Sizes:
    sizes = dict(given)
    for op in ops:
        sizes.update(op.makes)
        sizes.update(op.keeps_new)
    return sizes
