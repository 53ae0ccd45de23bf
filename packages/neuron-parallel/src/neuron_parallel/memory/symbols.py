"""The letters of the memory formulas, with a plan's values (all per core, after the plan's division).

    S  positions of a sequence            B  sequences of a micro-batch         V  vocabulary       L  layers
    T  B*S/cp, tokens                     t  T/tp with sequence parallel, tokens between blocks
    D  hidden size                        K  head dim       H  query heads/tp   G  KV heads/tp
    F  MLP hidden size/tp                 E  experts        k  experts a token  M  expert hidden size (/tp without ep)
    m  tokens that a core routes          N  m*k, their copies                  R  rows that a core's experts get
    a  bytes of a computed element        c  bytes of an expert's computed element

R is N. With expert parallel it depends on the dispatcher:
    gather       ep*m*min(k, E/ep)        what the fullest routing needs of the group's ep*m tokens
    capacity     ep*ceil(f*N/ep)          f the capacity factor
    all-to-all   N * imbalance
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from neuron_parallel.memory.quantity import Quantity
from neuron_parallel.model import ModelShape
from neuron_parallel.plan import ParallelPlan, Training

__all__ = ["Symbols"]


@dataclass(frozen=True, eq=False)
class Symbols:
    """The letters above, with their values. There is one object for equal ones (`Symbols.of`)."""

    B: Quantity
    S: Quantity
    T: Quantity
    t: Quantity
    D: Quantity
    K: Quantity
    H: Quantity
    G: Quantity
    F: Quantity
    E: Quantity
    k: Quantity
    M: Quantity
    m: Quantity
    N: Quantity
    R: Quantity
    V: Quantity
    a: Quantity
    c: Quantity
    """Letters, see above."""
    cp: int
    tp: int
    ep: int
    split: bool
    """Activations between blocks are split by tp (sequence parallel)."""

    @classmethod
    def of(cls, plan: ParallelPlan, shape: ModelShape, training: Training) -> "Symbols":
        """`plan` resolved."""
        return _symbols(plan.without_dp, shape.one_layer, training.without_mode)


@lru_cache(maxsize=8192)
def _symbols(plan: ParallelPlan, shape: ModelShape, training: Training) -> Symbols:
    q = Quantity
    tokens = plan.micro_batch * plan.seq_len // plan.cp
    between = -(-tokens // plan.tp) if plan.sequence_parallel else tokens
    routed = -(-tokens // plan.tp) if plan.ep > 1 else tokens
    copies = routed * shape.num_experts_per_tok
    rows, text = _rows(plan, shape, training, routed)
    tp_experts = 1 if plan.ep > 1 else plan.tp
    return Symbols(
        B=q(plan.micro_batch, "B"),
        S=q(plan.seq_len, "S"),
        T=q(tokens, "T"),
        t=q(between, "t"),
        D=q(shape.hidden_size, "D"),
        K=q(shape.head_dim, "K"),
        H=q(shape.num_attention_heads // plan.tp, "H"),
        G=q(shape.num_key_value_heads // plan.tp, "G"),
        F=q(-(-shape.intermediate_size // plan.tp), "F"),
        E=q(shape.num_experts, "E"),
        k=q(shape.num_experts_per_tok, "k"),
        M=q(-(-shape.moe_intermediate_size // tp_experts), "M"),
        m=q(routed, "m"),
        N=q(copies, "N"),
        R=q(rows, text),
        V=q(-(-shape.vocab_size // plan.tp), "V"),
        a=q(training.compute_bytes, "a"),
        c=q(training.expert_bytes, "c"),
        cp=plan.cp,
        tp=plan.tp,
        ep=plan.ep,
        split=plan.sequence_parallel and plan.tp > 1,
    )


def _rows(plan: ParallelPlan, shape: ModelShape, training: Training, routed: int) -> tuple[int, str]:
    """R and its formula, for so many routed tokens."""
    k, ep = shape.num_experts_per_tok, plan.ep
    if ep == 1 or not k:
        return routed * k, "N"
    if training.dispatcher == "gather":
        local = shape.num_experts // ep
        return ep * routed * min(k, local), "ep*N" if k <= local else "m*E"
    if training.dispatcher == "capacity":
        capacity = math.ceil(training.capacity_factor * routed * k / ep)
        return ep * capacity, f"ep*{capacity}"
    if training.imbalance == 1:
        return routed * k, "N"
    return int(routed * k * training.imbalance), f"N*{training.imbalance}"
