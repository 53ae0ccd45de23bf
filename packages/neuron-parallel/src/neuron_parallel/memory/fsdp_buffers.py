"""What FSDP2 holds of a unit beside its sharded parameters: gathered parameters, flat buffers, gradients on their way.

lifetimes.py says when each of them lives. Where a group has one rank there is no flat buffer, but a cast of each
parameter in turn.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache

from neuron_parallel.memory.fsdp_units import Part, Unit
from neuron_parallel.memory.quantity import Quantity
from neuron_parallel.memory.snapshot import Entry, Group

__all__ = ["Buffers", "buffers", "reduction"]


class Buffers:
    """A unit's tensor groups for the bytes of a computed (a), reduced (r) and held (p) element."""

    def __init__(self, unit: Unit, a: int, r: int, p: int) -> None:
        self.unit = unit
        self.a, self.r, self.p = Quantity(a, "a"), Quantity(r, "r"), Quantity(p, "p")

    @cached_property
    def parameters(self) -> Group:
        """The shards of the parameters."""
        return Group.of(Entry("parameters", self.unit.name, self.unit.held(self.p)))

    @cached_property
    def moments(self) -> Group:
        """Adam's two moments of the shards."""
        return Group((2, Entry("moments", self.unit.name, self.unit.held(self.p))))

    @cached_property
    def roots(self) -> Group:
        """The square roots that a foreach optimizer makes of all second moments at once."""
        return Group.of(Entry("working", f"roots of {self.unit.name}'s second moments", self.unit.held(self.p)))

    @cached_property
    def gathered(self) -> Group:
        """The parameters as the unit computes with them."""
        return Group.of(*self._full(self.unit.parts))

    @cached_property
    def flat(self) -> Group:
        """The flat all-gather outputs of all parts."""
        return Group.of(*(self._flat(part) for part in self.unit.parts if part.ranks > 1))

    @cached_property
    def last_flat(self) -> Group:
        """The flat output of the unit's last all-gather."""
        return Group.of(self._flat(self.unit.parts[-1]))

    @cached_property
    def copied(self) -> Group:
        """Copies that live while the unit's last part is gathered.

        Experts that are divided by another dimension than the first are copied once more. Without a group, parameters
        are cast, one at a time.
        """
        return Group.of(*self._copied(self.unit.parts[-1]))

    @cached_property
    def gathering(self) -> list[Group]:
        """What lives while each part is gathered for the backward pass, where each flat buffer goes with its copy."""
        parts = self.unit.parts
        return [
            Group.of(
                *self._full(parts[: number + 1]), *(self._flat(other) for other in parts[number:]), *self._copied(part)
            )
            for number, part in enumerate(parts)
        ]

    @cached_property
    def ahead(self) -> Group:
        """What lives when the unit's all-gather has only begun: flat buffers, and a cast of this core's last share.

        The cast of a part goes when its own all-gather has begun.
        """
        last = [part for part in self.unit.parts if part.ranks > 1 and self.a.value != self.p.value][-1:]
        casts = (Entry("gathered parameters", f"cast of {part.name}", part.reduced(self.a)) for part in last)
        return Group((1, self.flat), *((1, entry) for entry in casts))

    @cached_property
    def unreduced(self) -> Group:
        """The gradients as autograd made them."""
        return Group.of(*(self._gradients(part, self.a) for part in self.unit.parts))

    @cached_property
    def summed(self) -> Group:
        """Gradients that a pipeline summed over its micro-batches, unsharded."""
        name = "unreduced gradients of"
        return Group.of(
            *(Entry("gradient buffers", f"{name} {part.name}", part.full(self.r)) for part in self.unit.parts)
        )

    @cached_property
    def inputs(self) -> Group:
        """Inputs of reduce-scatters."""
        return Group.of(*(self._input(part) for part in self.unit.parts))

    @cached_property
    def outputs(self) -> Group:
        """Reduce-scatter results, when they are not the gradient tensors themselves."""
        return Group.of(*(self._output(part) for part in self.unit.parts))

    @cached_property
    def reduced(self) -> Group:
        """The gradients of the shards."""
        return Group.of(*(Entry("gradients", part.name, part.reduced(self.p)) for part in self.unit.parts))

    def _reduction(self, each: Quantity, in_order: bool, new: bool, held: bool) -> list[tuple[str, Group]]:
        """The moments of `reduction`. `each`: bytes of an element of the gradients."""
        before: list[Entry] = []
        moments = []
        order = self.unit.parts if in_order else self.unit.parts[::-1]
        for number, part in enumerate(order):
            waiting = [self._gradients(other, each) for other in order[:number:-1]]
            gradients, copied = self._gradients(part, each), self._input(part)
            moments.append(("copy in", Group.of(*before, *waiting, gradients, copied)))
            out = self._output(part)
            if part.ranks == 1:  # no collective: a copy, divided
                other = Entry("gradient buffers", f"divided gradients of {part.name}", part.full(self.r))
            else:  # the last parameter's gradient is still referred to
                other = Entry("gradient buffers", f"gradient of the last of {part.name}", part.lasts(each))
            moments.append(("reduced", Group.of(*before, *waiting, other, out, copied)))
            before += [copied] if not in_order else []
            before += [Entry("gradients", part.name, part.reduced(self.p))] if new else []
            before += [out] if held else []
        return moments

    def _full(self, parts: Iterable[Part]) -> Iterator[Entry]:
        return (Entry("gathered parameters", part.name, part.full(self.a)) for part in parts)

    def _copied(self, part: Part) -> Iterator[Entry]:
        yield Entry("gathered parameters", f"split {part.name}", part.splits(self.a))
        if self.a.value != self.p.value and part.ranks == 1:
            yield Entry("gathered parameters", f"cast of a parameter of {part.name}", part.casts(self.a))

    def _output(self, part: Part) -> Entry:
        return Entry("gradient buffers", f"reduced gradients of {part.name}", part.reduced(self.r))

    def _flat(self, part: Part) -> Entry:
        return Entry("gathered parameters", f"{part.name}, as gathered", part.flat(self.a))

    def _gradients(self, part: Part, each: Quantity) -> Entry:
        return Entry("gradient buffers", f"gradients of {part.name}", part.full(each))

    def _input(self, part: Part) -> Entry:
        return Entry("gradient buffers", f"reduce-scatter input of {part.name}", part.full(self.r))


@lru_cache(maxsize=8192)
def buffers(unit: Unit, a: int, r: int, p: int) -> Buffers:
    """The buffers of a unit: one object for equal ones."""
    return Buffers(unit, a, r, p)


@lru_cache(maxsize=8192)
def reduction(of: Buffers, summed: bool = False, new: bool = True, held: bool = False) -> list[tuple[str, Group]]:
    """The moments of FSDP's post-backward: gradients are copied into a reduce-scatter's input, and reduced.

    Experts come first, and their input is in flight until both parts are reduced.

    Args:
        of: the unit's buffers.
        summed: gradients were added up in the reduced dtype before. Parts are then reduced in order.
        new: the gradients are not added to those of an earlier micro-batch.
        held: outputs outlive their reduction.

    Returns:
        (name, tensors) of each moment.
    """
    return of._reduction(of.r if summed else of.a, summed, new, held)
