"""FSDP's units: the parameters that are gathered, freed and reduced together, and their buffers' sizes.

TorchTitan makes a unit of the embedding, of each layer, and of final norm with head. With expert parallel a layer's
experts are a part of their own, which is gathered over other ranks. With tied weights embedding, norm and head are one
unit: FSDP2 gathers and reduces the shared table twice, once for each of its names.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from neuron_parallel.memory.quantity import ZERO, Quantity
from neuron_parallel.model import ModelShape
from neuron_parallel.parameters import UnitName, parameters, unit_numbers
from neuron_parallel.plan import ParallelPlan, expert_shard_dim

__all__ = ["Part", "Unit", "fsdp_unit"]


@dataclass(frozen=True)
class Part:
    """Parameters of a unit that one group of ranks shares.

    Sizes are in elements; gathered ones are padded to equal chunks.
    """

    name: str
    ranks: int
    held: int
    """Elements on this core."""
    gathered: int
    """Elements of all parameters when they are gathered."""
    last: int
    """Elements of the last parameter when it is gathered."""
    cast: int
    """Elements beyond the gathered ones, where parameters are cast and copied one by one."""
    split: int
    """Gathered elements of parameters divided by another dimension than the first: they are copied once more."""
    letter: str = "p"
    """The letter of `held` in formulas: q where a core's share of a reduction is not what it holds of the unit."""

    def full(self, bytes_each: Quantity) -> Quantity:
        """Bytes of the gathered parameters."""
        return Quantity(self.gathered, f"P({self.name})") * bytes_each

    def reduced(self, bytes_each: Quantity) -> Quantity:
        """Bytes of this core's share of a reduction."""
        return Quantity(self.held, f"{self.letter}({self.name})") * bytes_each

    def flat(self, bytes_each: Quantity) -> Quantity:
        """Bytes of the all-gather output before it is copied to the parameters. Without a group there is none."""
        return self.full(bytes_each) if self.ranks > 1 else ZERO

    def lasts(self, bytes_each: Quantity) -> Quantity:
        """Bytes of the last parameter when it is gathered."""
        return Quantity(self.last, f"P(last of {self.name})") * bytes_each

    def casts(self, bytes_each: Quantity) -> Quantity:
        """Bytes of `cast`."""
        return Quantity(self.cast, f"P(cast of {self.name})") * bytes_each

    def splits(self, bytes_each: Quantity) -> Quantity:
        """Bytes of `split`. Without a group nothing is copied."""
        return Quantity(self.split, f"P(split of {self.name})") * bytes_each if self.ranks > 1 and self.split else ZERO


@dataclass(frozen=True, eq=False)
class Unit:
    """A unit of FSDP.

    Its parts are the dense parameters, and with expert parallel the experts. `fsdp_unit` gives one object for equal
    ones.
    """

    name: str
    parts: tuple[Part, ...]
    owned: int
    """Elements of its parameters on this core: fewer than are reduced where a table has two names."""

    def held(self, bytes_each: Quantity) -> Quantity:
        """Bytes of the shards on this core."""
        return Quantity(self.owned, f"p({self.name})") * bytes_each

    @property
    def gathered(self) -> int:
        """Elements of all parameters when they are gathered."""
        return sum(part.gathered for part in self.parts)


def fsdp_unit(shape: ModelShape, plan: ParallelPlan, name: UnitName, moe: bool) -> Unit:
    """The unit of that name under a resolved plan."""
    return _unit(shape.one_layer, plan.dp_shard, plan.cp, plan.tp, plan.ep, name, moe)


@lru_cache(maxsize=8192)
def _unit(shape: ModelShape, dp_shard: int, cp: int, tp: int, ep: int, name: UnitName, moe: bool) -> Unit:
    plan = ParallelPlan(dp_shard=dp_shard, cp=cp, tp=tp, ep=ep)
    rows = list(unit_numbers(parameters(shape, moe), plan, name))
    owned = sum(held for _, held, _ in rows)
    if name == "head" and shape.tie_word_embeddings:
        rows.insert(0, next(row for row in rows if row[0].part == "head"))
    apart = plan.ep > 1
    split = expert_shard_dim(plan, shape.num_experts) if shape.num_experts else 0
    parts = []
    for experts in (False, True) if apart else (None,):
        own = [row for row in rows if experts is None or row[0].expert == experts]
        if own:
            gathered = [full for _, _, full in own]
            parts.append(
                Part(
                    f"{name} experts" if experts else name,
                    plan.efsdp if experts else plan.fsdp,
                    sum(held for _, held, _ in own),
                    sum(gathered),
                    gathered[-1],
                    max(so_far + full for so_far, full in zip(accumulate(gathered), gathered, strict=True))
                    - sum(gathered),
                    sum(full for row, _, full in own if row.expert and split),
                    "p" if sum(held for _, held, _ in own) == owned else "q",
                )
            )
    return Unit(name, tuple(parts), owned)
