"""Where each parameter lives: a table of tensors with the dimension that each axis divides, and what one core holds of
them.

A tensor is divided by tp (or ep) first, then by FSDP. A dimension that does not divide evenly goes to the first ranks
in chunks that are rounded up, as torch.chunk deals it, and FSDP pads its buffers to equal chunks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from neuron_parallel.model import ModelShape
from neuron_parallel.plan import ParallelPlan, expert_shard_dim

__all__ = ["Parameter", "UnitName", "local_shape", "parameters", "unit_numbers"]

UnitName = Literal["embedding", "layer", "head"]


@dataclass(frozen=True)
class Parameter:
    """One tensor of the model.

    `tp_dim`: the dimension that tp divides (None: each tp rank has all of it). Experts divide by ep instead.
    """

    name: str
    shape: tuple[int, ...]
    unit: UnitName
    tp_dim: int | None = None
    expert: bool = False
    part: Literal["embedding", "attention", "norm", "mlp", "router", "experts", "head"] = "mlp"


def parameters(shape: ModelShape, moe: bool | None = None) -> tuple[Parameter, ...]:
    """The tensors of the embedding, of one layer (`moe`: with experts) and of the head, with TorchTitan's names and
    placements.
    """
    return _parameters(shape, shape.num_experts > 0 if moe is None else moe)


@lru_cache(maxsize=64)
def _parameters(shape: ModelShape, moe: bool) -> tuple[Parameter, ...]:
    D, K, V = shape.hidden_size, shape.head_dim, shape.vocab_size
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    rows: list[Parameter] = []
    if not shape.tie_word_embeddings:
        rows.append(Parameter("tok_embeddings.weight", (V, D), "embedding", 0, part="embedding"))
    rows += [
        Parameter("attention_norm.weight", (D,), "layer", part="norm"),
        Parameter("attention.qkv_linear.wqkv.weight", ((heads + 2 * groups) * K, D), "layer", 0, part="attention"),
        Parameter("attention.q_norm.weight", (K,), "layer", part="norm"),
        Parameter("attention.k_norm.weight", (K,), "layer", part="norm"),
        Parameter("attention.wo.weight", (D, heads * K), "layer", 1, part="attention"),
        Parameter("ffn_norm.weight", (D,), "layer", part="norm"),
    ]
    if moe:
        E, M = shape.num_experts, shape.moe_intermediate_size
        rows += [
            Parameter("moe.router.gate.weight", (E, D), "layer", part="router"),
            Parameter("moe.routed_experts.inner_experts.w1_EFD", (E, M, D), "layer", 1, True, "experts"),
            Parameter("moe.routed_experts.inner_experts.w2_EDF", (E, D, M), "layer", 2, True, "experts"),
            Parameter("moe.routed_experts.inner_experts.w3_EFD", (E, M, D), "layer", 1, True, "experts"),
        ]
    else:
        F = shape.intermediate_size
        rows += [
            Parameter("feed_forward.w1.weight", (F, D), "layer", 0),
            Parameter("feed_forward.w2.weight", (D, F), "layer", 1),
            Parameter("feed_forward.w3.weight", (F, D), "layer", 0),
        ]
    rows += [
        Parameter("norm.weight", (D,), "head", part="norm"),
        Parameter("lm_head.weight", (V, D), "head", 0, part="head"),
    ]
    return tuple(rows)


def _before_fsdp(parameter: Parameter, plan: ParallelPlan) -> tuple[list[int], int, int]:
    """(shape on one tp or ep rank, FSDP ranks, dimension FSDP divides)."""
    shape = list(parameter.shape)
    if parameter.expert and plan.ep > 1:
        shape[0] = -(-shape[0] // plan.ep)
        return shape, plan.efsdp, expert_shard_dim(plan, parameter.shape[0])
    if parameter.tp_dim is not None:
        shape[parameter.tp_dim] = -(-shape[parameter.tp_dim] // plan.tp)
    return shape, plan.fsdp, expert_shard_dim(plan, parameter.shape[0]) if parameter.expert else 0


def local_shape(parameter: Parameter, plan: ParallelPlan, fsdp_rank: int = 0) -> tuple[int, ...]:
    """What rank `fsdp_rank` of the tensor's FSDP group holds of it. Rank 0 holds the most."""
    shape, ranks, dim = _before_fsdp(parameter, plan)
    chunk = -(-shape[dim] // ranks)
    shape[dim] = max(0, min(chunk, shape[dim] - fsdp_rank * chunk))
    return tuple(shape)


def unit_numbers(
    table: tuple[Parameter, ...], plan: ParallelPlan, unit: UnitName
) -> Iterator[tuple[Parameter, int, int]]:
    """(parameter, elements that rank 0 holds, elements when gathered and padded) for a unit of FSDP."""
    for parameter in table:
        if parameter.unit == unit:
            local = math.prod(local_shape(parameter, plan))
            yield parameter, local, local * _before_fsdp(parameter, plan)[1]
