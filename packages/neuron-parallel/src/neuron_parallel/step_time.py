"""A step's time from first principles: which resource is the longest busy. Estimated, never measured on a device.

    step = (max(compute, memory, fsdp) + tp + cp + ep) * (1 + (pp - 1) / micro-batches) + replicas + optimizer

    compute    3 forward passes' FLOPs (one forward, two backward) and those that checkpointing repeats / (peak * efficiency)
    memory     weights read 3 times and kept activations written and read / HBM bandwidth
    fsdp       two all-gathers and one reduce-scatter of every layer, hidden behind compute as far as it goes
    tp cp ep   all-gathers, reduce-scatters and all-to-alls that the next product waits for
    replicas   all-reduce of the sharded gradients       optimizer   7 passes over the sharded state

A ring of n ranks moves (n-1)/n of the gathered bytes over its slowest link (`Cluster.group_bandwidth`). Latency is left out, so
small messages look better than they are.
"""

from dataclasses import dataclass
from functools import lru_cache

from neuron_parallel.hardware import Cluster
from neuron_parallel.memory.symbols import Symbols
from neuron_parallel.model import ModelShape
from neuron_parallel.parameters import parameters, unit_numbers
from neuron_parallel.plan import ParallelPlan, Training, stage_layers

__all__ = ["EFFICIENCY", "StepTime", "step_time"]

EFFICIENCY = 0.5
"""Share of the data-sheet peak that matrix products are taken to reach. The best whole run that was published had 46 % MFU."""

_RECOMPUTED = {"none": 0.0, "linears": 0.0, "selective": 0.5, "full": 1.0}
"""Forward passes repeated: selective checkpointing repeats every second product, "linears" none (expert products aside)."""


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
    """Of one core's peak per second, times cores: the MFU denominator."""
    model_flops: float

    @property
    def seconds(self) -> float:
        busy = max(self.compute, self.memory, self.fsdp) + self.tp + self.cp + self.ep
        return busy + self.bubble + self.replicas + self.optimizer

    @property
    def tokens_per_second(self) -> float:
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
    """The estimate for a resolved plan."""
    s = Symbols.of(plan, shape, training)
    repeats = _RECOMPUTED[training.checkpointing]
    layers = max(stage_layers(shape.num_hidden_layers, plan.pp))
    micro = plan.micro_batches
    tokens = plan.global_batch * plan.seq_len
    flops = 3 * shape.flops_per_token(plan.seq_len) * tokens
    peak = cluster.peak_flops("bf16" if training.compute_bytes == 2 else "fp32")
    balance = layers * plan.pp / shape.num_hidden_layers if plan.pp > 1 else 1.0
    compute = flops * (3 + repeats) / 3 * balance / (plan.world * peak * efficiency)

    local, dense, experts, other = _elements(shape, plan.dp_shard, plan.cp, plan.tp, plan.ep)
    a, r, p = training.compute_bytes, training.reduce_bytes, training.param_bytes
    weights = layers * (dense + experts) + other
    activations = layers * _activation_bytes(s)
    memory = micro * (3 * weights * a + 4 * activations) / cluster.hbm_bandwidth

    strides = plan.strides()

    def seconds(axis: str, size: float) -> float:
        """A ring pass over `size` gathered bytes."""
        if axis not in strides:
            return 0.0
        n, stride = strides[axis]
        return size * (n - 1) / n / cluster.group_bandwidth(n, stride)[0]

    gathers = 1 if training.reshard == "never" or (training.reshard == "default" and plan.pp > 1) else 2 * micro
    reduces = 1 if plan.pp > 1 else micro
    each = gathers * a + reduces * r
    expert_axis = "efsdp" if plan.ep > 1 else "fsdp"
    fsdp = seconds("fsdp", each * (layers * dense + other)) + seconds(expert_axis, each * layers * experts)

    T, D = s.T.value, s.D.value
    passes = 2 + (1 if repeats == 1 else 0)
    tp = micro * layers * passes * 4 * seconds("tp", T * D * a)
    if shape.num_experts and plan.ep > 1:
        tp /= 2  # experts take the tokens as they are split
    cp = micro * layers * (passes + 1) * 2 * seconds("cp", T * plan.cp * s.G.value * s.K.value * a)
    exchanged = plan.ep * s.m.value if training.dispatcher == "gather" else s.R.value
    ep = micro * layers * passes * 2 * seconds("ep", exchanged * D * a) if shape.num_experts else 0.0
    busy = max(compute, memory, fsdp) + tp + cp + ep
    bubble = busy * (plan.pp - 1) / micro
    replicas = 2 * seconds("dp_replicate", layers * local * r)
    optimizer = 7 * layers * local * p / cluster.hbm_bandwidth
    return StepTime(
        compute,
        memory,
        fsdp,
        tp,
        cp,
        ep,
        replicas,
        optimizer,
        bubble,
        tokens,
        plan.world * cluster.peak_flops("bf16"),
        flops,
    )


@lru_cache(maxsize=8192)
def _elements(shape: ModelShape, dp_shard: int, cp: int, tp: int, ep: int) -> tuple[int, int, int, int]:
    """(held a layer, gathered a layer dense and experts, gathered embedding and head)."""
    plan = ParallelPlan(dp_shard=dp_shard, cp=cp, tp=tp, ep=ep)
    table = parameters(shape)
    layer = list(unit_numbers(table, plan, "layer"))
    dense = sum(full for row, _, full in layer if not row.expert)
    experts = sum(full for row, _, full in layer if row.expert)
    other = sum(full for name in ("embedding", "head") for _, _, full in unit_numbers(table, plan, name))
    return sum(held for _, held, _ in layer), dense, experts, other


def _activation_bytes(s: Symbols) -> float:
    """What a layer writes: q, k, v, attention's output, both products of the MLP, residual and norms."""
    T, H, G, K, D, a = (q.value for q in (s.T, s.H, s.G, s.K, s.D, s.a))
    wide = s.R.value * (3 * s.M.value + 2 * D) if s.E.value else T * 3 * s.F.value
    return float((T * (2 * H + 2 * G) * K + 6 * s.t.value * D + wide) * a)
