"""A step's time from first principles: which resource is the longest busy. Estimated, never measured on a device.

    step = (max(compute, memory, fsdp) + tp + cp + ep) * (1 + (pp - 1) / micro-batches) + replicas + optimizer

    compute    3 forward passes' FLOPs (1 forward, 2 backward) and those that checkpointing repeats / (peak*efficiency)
    memory     weights read 3 times and kept activations written and read / HBM bandwidth
    fsdp       two all-gathers and one reduce-scatter of every layer, hidden behind compute as far as it goes
    tp cp ep   all-gathers, reduce-scatters and all-to-alls that the next product waits for
    replicas   all-reduce of the sharded gradients       optimizer   7 passes over the sharded state

A ring of n ranks moves (n-1)/n of the gathered bytes over its slowest link (`Cluster.group_bandwidth`). Latency is left
out, so small messages look better than they are.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from neuron_parallel.hardware import Cluster
from neuron_parallel.memory.symbols import Symbols
from neuron_parallel.model import ModelShape
from neuron_parallel.parameters import parameters, unit_numbers
from neuron_parallel.plan import ParallelPlan, Training, stage_layers, stays_gathered

__all__ = ["EFFICIENCY", "StepTime", "step_time"]

EFFICIENCY = 0.5
"""Share of the data-sheet peak that matrix products are taken to reach.

The best whole run that was published had 46 % MFU.
"""

_RECOMPUTED = {"none": 0.0, "linears": 0.0, "selective": 0.5, "full": 1.0}
"""Forward passes repeated: selective checkpointing repeats every second product, "linears" none (expert products
aside).
"""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by resource, and what they give."""

    compute: float
    memory: float
    fsdp: float
    tp: float
    cp: float
    ep: float
    replicas: float
    optimizer: float
    bubble: float
    """Idle seconds of the pipeline."""
    tokens: int
    flops: float
    """Peak FLOP/s of all cores together: the denominator of MFU."""
    model_flops: float
    """FLOPs of the model's forward and backward pass, without recomputation."""

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        busy = max(self.compute, self.memory, self.fsdp) + self.tp + self.cp + self.ep
        return busy + self.bubble + self.replicas + self.optimizer

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks, per second."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs (no recomputation) per second over all cores' peak."""
        return self.model_flops / self.seconds / self.flops

    def shares(self) -> dict[str, float]:
        """Share of the step by cause, largest first; what hides behind compute counts as far as it sticks out."""
        bound = max((self.compute, "compute"), (self.memory, "HBM"), (self.fsdp, "fsdp"))
        causes = {
            "compute": self.compute,
            f"{bound[1]} beyond compute": bound[0] - self.compute,
            "tp": self.tp,
            "cp": self.cp,
            "ep": self.ep,
            "pipeline bubble": self.bubble,
            "replicas": self.replicas,
            "optimizer": self.optimizer,
        }
        total = self.seconds
        shares = {name: value / total for name, value in causes.items() if value > 0}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


def step_time(
    plan: ParallelPlan, shape: ModelShape, cluster: Cluster, training: Training, efficiency: float = EFFICIENCY
) -> StepTime:
    """Estimate a step's time.

    Args:
        plan: a resolved plan.
        shape: the model's sizes.
        cluster: the machine.
        training: checkpointing, dtypes, dispatcher.
        efficiency: share of the peak FLOP/s that matrix products reach, 0 to 1.

    Returns:
        Seconds by resource.
    """
    work = _Work(plan, shape, cluster, training, efficiency)
    compute, memory, fsdp = work.compute(), work.memory(), work.fsdp()
    tp, cp, ep = work.tensor_parallel(), work.context_parallel(), work.expert_parallel()
    busy = max(compute, memory, fsdp) + tp + cp + ep
    held = work.layers * work.elements.held
    return StepTime(
        compute=compute,
        memory=memory,
        fsdp=fsdp,
        tp=tp,
        cp=cp,
        ep=ep,
        replicas=2 * work.ring("dp_replicate", held * training.reduce_bytes),
        optimizer=7 * held * training.param_bytes / cluster.hbm_bandwidth,
        bubble=busy * (plan.pp - 1) / plan.micro_batches,
        tokens=plan.global_batch * plan.seq_len,
        flops=plan.world * cluster.peak_flops("bf16"),
        model_flops=work.model_flops,
    )


class _Elements(NamedTuple):
    """Parameters of a model, in elements on one core."""

    held: int
    """Shards of one layer."""
    dense: int
    experts: int
    """Experts of one layer, gathered; `dense` are its other parameters."""
    other: int
    """Embedding, final norm and head, gathered."""


class _Work:
    """What a core does in a step; each method gives seconds."""

    def __init__(
        self, plan: ParallelPlan, shape: ModelShape, cluster: Cluster, training: Training, efficiency: float
    ) -> None:
        self.plan, self.shape, self.cluster, self.training, self.efficiency = plan, shape, cluster, training, efficiency
        self.s = Symbols.of(plan, shape, training)
        self.layers = max(stage_layers(shape.num_hidden_layers, plan.pp))
        self.elements = _elements(shape, plan.dp_shard, plan.cp, plan.tp, plan.ep)
        self.model_flops = 3 * shape.flops_per_token(plan.seq_len) * plan.global_batch * plan.seq_len
        self.repeats = _RECOMPUTED[training.checkpointing]
        self.passes = 3 if self.repeats == 1 else 2
        """Passes over the layers that exchange activations: forward, backward, and forward again with full
        checkpointing.
        """
        self._strides = plan.strides()

    def ring(self, axis: str, size: float) -> float:
        """A ring pass over `size` gathered bytes along an axis."""
        if axis not in self._strides:
            return 0.0
        n, stride = self._strides[axis]
        return size * (n - 1) / n / self.cluster.group_bandwidth(n, stride)[0]

    def compute(self) -> float:
        """Matrix products, with those that checkpointing repeats."""
        plan = self.plan
        peak = self.cluster.peak_flops("bf16" if self.training.compute_bytes == 2 else "fp32")
        # The stage with most layers sets the pace of a pipeline.
        balance = self.layers * plan.pp / self.shape.num_hidden_layers if plan.pp > 1 else 1.0
        return self._flops() * (3 + self.repeats) / 3 * balance / (plan.world * peak * self.efficiency)

    def _flops(self) -> float:
        """FLOPs of a forward and a backward pass. Only a causal kernel skips the masked half of the scores."""
        plan, shape = self.plan, self.shape
        if self.training.attention == "flash":
            return self.model_flops
        skipped = shape.num_hidden_layers * 2 * shape.num_attention_heads * shape.head_dim * plan.seq_len
        return self.model_flops + 3 * skipped * plan.global_batch * plan.seq_len

    def memory(self) -> float:
        """Weights read three times, kept activations written and read."""
        _, dense, experts, other = self.elements
        weights = (self.layers * (dense + experts) + other) * self.training.compute_bytes
        activations = self.layers * _activation_bytes(self.s)
        return self.plan.micro_batches * (3 * weights + 4 * activations) / self.cluster.hbm_bandwidth

    def fsdp(self) -> float:
        """All-gathers and reduce-scatters of the layers."""
        plan, how = self.plan, self.training
        _, dense, experts, other = self.elements
        gathers = 1 if stays_gathered(plan, how) else 2 * plan.micro_batches
        reduces = 1 if plan.pp > 1 else plan.micro_batches
        each = gathers * how.compute_bytes + reduces * how.reduce_bytes
        expert_axis = "efsdp" if plan.ep > 1 else "fsdp"
        return self.ring("fsdp", each * (self.layers * dense + other)) + self.ring(
            expert_axis, each * self.layers * experts
        )

    def tensor_parallel(self) -> float:
        """All-gathers and reduce-scatters of activations over tp."""
        size = self.s.T.value * self.s.D.value * self.training.compute_bytes
        seconds = self.plan.micro_batches * self.layers * self.passes * 4 * self.ring("tp", size)
        # With expert parallel the experts take the tokens as they are split: half of the exchanges are attention's.
        return seconds / 2 if self.shape.num_experts and self.plan.ep > 1 else seconds

    def context_parallel(self) -> float:
        """All-gathers of keys and values over cp, and their gradients back."""
        s = self.s
        size = s.T.value * self.plan.cp * s.G.value * s.K.value * self.training.compute_bytes
        return self.plan.micro_batches * self.layers * (self.passes + 1) * 2 * self.ring("cp", size)

    def expert_parallel(self) -> float:
        """Exchanges of rows with the ranks that have their experts."""
        if not self.shape.num_experts:
            return 0.0
        gather = self.training.dispatcher == "gather"
        rows = self.plan.ep * self.s.m.value if gather else self.s.R.value
        size = rows * self.s.D.value * self.training.compute_bytes
        return self.plan.micro_batches * self.layers * self.passes * 2 * self.ring("ep", size)


@lru_cache(maxsize=8192)
def _elements(shape: ModelShape, dp_shard: int, cp: int, tp: int, ep: int) -> _Elements:
    plan = ParallelPlan(dp_shard=dp_shard, cp=cp, tp=tp, ep=ep)
    table = parameters(shape)
    layer = list(unit_numbers(table, plan, "layer"))
    dense = sum(full for row, _, full in layer if not row.expert)
    experts = sum(full for row, _, full in layer if row.expert)
    other = sum(full for name in ("embedding", "head") for _, _, full in unit_numbers(table, plan, name))
    return _Elements(sum(held for _, held, _ in layer), dense, experts, other)


def _activation_bytes(s: Symbols) -> float:
    """What a layer writes: q, k, v, attention's output, both products of the MLP, residual and norms."""
    T, H, G, K, D, a = (q.value for q in (s.T, s.H, s.G, s.K, s.D, s.a))
    wide = s.R.value * (3 * s.M.value + 2 * D) if s.E.value else T * 3 * s.F.value
    return float((T * (2 * H + 2 * G) * K + 6 * s.t.value * D + wide) * a)
