"""How a model is laid out over cores, and every reason why a layout cannot work.

    plan = ParallelPlan(tp=4, seq_len=4096).resolve(64)         # dp_shard=-1 takes the rest: 16
    for finding in validate(plan, shape, Cluster(instance("trn2.48xlarge"))):
        print(finding)

Degrees have TorchTitan's names and meaning. Ranks are numbered as TorchTitan's meshes number them, the last axis
fastest:

    dense    pp, dp_replicate, dp_shard, cp, tp
    sparse   pp, dp_replicate, efsdp, ep            efsdp * ep == dp_shard * cp * tp

A finding is an error (the run would fail, or not be what was asked for) or a warning (it costs something). `origin`
says whose rule it is: torchtitan (its own checks or a crash in it), neuron (the device's, from documents and field
reports) or plan.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Literal

from neuron_parallel.hardware import Cluster
from neuron_parallel.model import ModelShape

__all__ = [
    "TORCHTITAN_NAMES",
    "Finding",
    "ParallelPlan",
    "Training",
    "as_run",
    "divisors",
    "errors",
    "expert_shard_dim",
    "stage_layers",
    "stays_gathered",
    "validate",
]

TORCHTITAN_NAMES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
    "sequence_parallel": "enable_sequence_parallel",
}
"""Fields of a plan, and of TorchTitan's ParallelismConfig."""


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Degrees and batch.

    `micro_batch`: sequences that a data-parallel rank computes at once. `global_batch`: sequences of one optimizer step
    over all ranks (-1: one micro-batch each).
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    sequence_parallel: bool = True
    micro_batch: int = 1
    global_batch: int = -1
    seq_len: int = 4096

    def resolve(self, cores: int) -> "ParallelPlan":
        """The plan with dp_shard=-1 and global_batch=-1 filled in, as TorchTitan does: cores // the other degrees, at
        least 1.
        """
        if self.dp_shard != -1 and self.global_batch != -1:
            return self
        shard = max(1, cores // self.others) if self.dp_shard == -1 and self.others > 0 else self.dp_shard
        batch = self.micro_batch * self.dp_replicate * shard if self.global_batch == -1 else self.global_batch
        return replace(self, dp_shard=shard, global_batch=batch)

    @property
    def dp(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks that share the dense parameters of one TP rank."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks that share the experts of one EP rank."""
        return self.inner // self.ep

    @property
    def inner(self) -> int:
        """Ranks of one replica of one pipeline stage, which both views of the ranks divide among their axes."""
        return self.dp_shard * self.cp * self.tp

    @property
    def others(self) -> int:
        """The product of all degrees but dp_shard."""
        return self.dp_replicate * self.cp * self.tp * self.pp

    @property
    def world(self) -> int:
        """Ranks of the run: the product of all degrees, without ep, whose ranks are those of the others."""
        return self.others * self.dp_shard

    @property
    def micro_batches(self) -> int:
        """Micro-batches that a rank computes in one optimizer step."""
        return max(1, self.global_batch // (self.micro_batch * self.dp))

    @cached_property
    def without_dp(self) -> "ParallelPlan":
        """One data-parallel rank of one stage alone: the key of all that does not depend on how many there are."""
        return _alone(self.cp, self.tp, self.ep, self.sequence_parallel, self.micro_batch, self.seq_len)

    @cached_property
    def without_ep(self) -> "ParallelPlan":
        """`without_dp` without expert parallel, the key of everything that is the same whatever the experts do."""
        return _alone(self.cp, self.tp, 1, self.sequence_parallel, self.micro_batch, self.seq_len)

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        """The hash is worked out once, because plans are keys of many look-ups."""
        return self._hash

    def strides(self) -> dict[str, tuple[int, int]]:
        """(size, distance between neighbouring members in ranks) of each axis with more than one member."""
        axes = {
            "tp": (self.tp, 1),
            "cp": (self.cp, self.tp),
            "fsdp": (self.fsdp, self.tp),
            "ep": (self.ep, 1),
            "efsdp": (self.efsdp if self.ep > 1 else 1, self.ep),
            "dp_replicate": (self.dp_replicate, self.inner),
            "pp": (self.pp, self.dp_replicate * self.inner),
        }
        return {name: axis for name, axis in axes.items() if axis[0] > 1}

    def __str__(self) -> str:
        degrees = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        named = [f"{name}={getattr(self, name)}" for name in degrees if getattr(self, name) != 1]
        return " ".join(named) or "one core"


@lru_cache(maxsize=8192)
def _alone(cp: int, tp: int, ep: int, sequence_parallel: bool, micro_batch: int, seq_len: int) -> ParallelPlan:
    """One object for equal ones: as keys of caches, the same objects are found without being compared."""
    return ParallelPlan(
        dp_shard=ep,
        cp=cp,
        tp=tp,
        ep=ep,
        sequence_parallel=sequence_parallel,
        micro_batch=micro_batch,
        seq_len=seq_len,
    )


@dataclass(frozen=True, kw_only=True)
class Training:
    """What else decides memory and speed. Bytes are per element."""

    checkpointing: Literal["none", "linears", "selective", "full"] = "selective"
    """selective: TorchTitan's, every second matrix product again. linears: no linear again (titan_recipes'
    SaveLinears).
    """
    attention: Literal["flash", "masked", "math"] = "flash"
    """flash: a fused causal kernel without a mask. masked: a fused kernel with a dense document mask. math: scores in
    memory.
    """
    param_bytes: int = 4
    """Sharded parameters, gradients and Adam's two moments, each: they are their own master weights."""
    compute_bytes: Literal[2, 4] = 2
    """Gathered parameters and activations (training.mixed_precision_param)."""
    reduce_bytes: int = 4
    """Gradient reduction (training.mixed_precision_reduce)."""
    optimizer: Literal["foreach", "fused"] = "foreach"
    loss_chunks: int = 1
    """Parts of the sequence that head and loss are computed for at a time (ChunkedLossWrapper)."""
    dispatcher: Literal["gather", "capacity", "all-to-all"] = "gather"
    """Expert exchange, as titan_recipes.moe.dispatchers names it: all tokens to all ranks, equal splits, or
    TorchTitan's, rows as routed.
    """
    capacity_factor: float = 1.25
    """capacity: rows that a rank may send to each rank, relative to balanced routing."""
    imbalance: float = 1.0
    """all-to-all: rows on the fullest rank, relative to balanced routing."""
    expert_bytes: Literal[2, 4] = 2
    """Experts' compute dtype; other than compute_bytes, casts are kept for the backward pass (TorchTitan:
    always BF16).
    """
    reshard: Literal["default", "always", "never"] = "default"
    """parallelism.fsdp_reshard_after_forward."""
    selective_keeps_attention: bool = True
    """Whether the attention kernel is on selective checkpointing's list.

    Device kernels are, torch's CPU kernel is not.
    """

    @cached_property
    def without_mode(self) -> "Training":
        """The same training without checkpointing, the key of everything that is the same in each mode."""
        return _same(replace(self, checkpointing="none"))

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        return self._hash


@lru_cache(maxsize=1024)
def _same(training: Training) -> Training:
    """One object for equal ones, see `_alone`."""
    return training


@dataclass(frozen=True)
class Finding:
    """One rule that a plan breaks (error) or pays for (warning)."""

    rule: str
    message: str
    severity: Literal["error", "warning"] = "error"
    origin: Literal["torchtitan", "neuron", "plan"] = "torchtitan"

    def __str__(self) -> str:
        return f"{self.severity}: {self.message}"


def errors(
    plan: ParallelPlan, shape: ModelShape, cluster: Cluster | int, training: Training | None = None
) -> list[Finding]:
    """The errors that `validate` finds, without its warnings."""
    found = validate(plan, shape, cluster, training, warnings=False)
    return [finding for finding in found if finding.severity == "error"]


def validate(
    plan: ParallelPlan,
    shape: ModelShape,
    cluster: Cluster | int,
    training: Training | None = None,
    warnings: bool = True,
) -> list[Finding]:
    """Every rule that the plan breaks, all at once, each with the numbers and the nearest valid values.

    `cluster` may be a plain number of cores: then the machine's rules are left out. Degrees that are no numbers end the
    check early, since nothing else can be said. `warnings=False` leaves out rules that only warn.
    """
    training = training or Training()
    nonsense = list(_degrees(plan, training))
    if nonsense:
        return nonsense
    cores = cluster if isinstance(cluster, int) else cluster.cores
    plan = plan.resolve(cores)
    found = [
        *_world(plan, cores),
        *_model(plan, shape),
        *_sequence(plan, shape, training),
        *_experts(plan, shape, training),
    ]
    found += [*_pipeline(plan, shape), *_batch(plan)]
    if not isinstance(cluster, int):
        found += [*_exchange(plan), *_groups(plan, cluster)]
        if warnings:
            found += [*_device(plan, shape, training), *_links(plan, cluster)]
    return found


def _degrees(plan: ParallelPlan, training: Training) -> Iterator[Finding]:
    for name in ("dp_replicate", "cp", "tp", "pp", "ep", "micro_batch", "seq_len"):
        value = getattr(plan, name)
        if type(value) is not int or value < 1:
            yield Finding("degree", f"{name} is {value!r}; expected an integer >= 1")
    if type(training.loss_chunks) is not int or training.loss_chunks < 1:
        yield Finding("degree", f"loss_chunks is {training.loss_chunks!r}; expected an integer >= 1")
    for name in ("dp_shard", "global_batch"):
        value = getattr(plan, name)
        if type(value) is not int or (value < 1 and value != -1):
            yield Finding("degree", f"{name} is {value!r}; expected an integer >= 1, or -1 for what is left")


def _world(plan: ParallelPlan, cores: int) -> Iterator[Finding]:
    if plan.world == cores:
        return
    others = plan.others
    product = " * ".join(
        f"{name} {getattr(plan, name)}"
        for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp")
        if getattr(plan, name) > 1
    )
    fix = (
        f"dp_shard {cores // others} would fit"
        if cores % others == 0
        else f"the other degrees make {others}, which does not divide {cores}; divisors near it: "
        f"{_near_divisors(cores, others)}"
    )
    yield Finding("world", f"{product or 'all degrees 1'} = {plan.world} cores, but there are {cores}; {fix}")


def _model(plan: ParallelPlan, shape: ModelShape) -> Iterator[Finding]:
    for name in ("num_attention_heads", "num_key_value_heads"):
        yield from _divides(name, getattr(shape, name), plan.tp, "torchtitan")
    # TorchTitan starts with these uneven, and its cores then wait for the one with the most; kernels take even tiles
    # only.
    yield from _divides("vocab_size", shape.vocab_size, plan.tp, "plan")
    if shape.moe_layers < shape.num_hidden_layers:
        yield from _divides("intermediate_size", shape.intermediate_size, plan.tp, "plan")
    if shape.num_experts and plan.ep == 1:
        yield from _divides("moe_intermediate_size", shape.moe_intermediate_size, plan.tp, "plan")
    if plan.seq_len > shape.max_position_embeddings:
        yield Finding(
            "positions",
            f"seq_len {plan.seq_len} is over max_position_embeddings {shape.max_position_embeddings}; use that or "
            "less, or extend the model (YaRN)",
        )


def _divides(name: str, size: int, tp: int, origin: Literal["torchtitan", "plan"]) -> Iterator[Finding]:
    if size % tp:
        message = f"tp {tp} does not divide {name} {size}; {_near_divisors(size, tp)} would"
        yield Finding(name, message, origin=origin)


def _sequence(plan: ParallelPlan, shape: ModelShape, training: Training) -> Iterator[Finding]:
    """TorchTitan asks for seq_len % (tp * 2 cp); the 2 is for its load balancer, which splits each rank's
    part in two.
    """
    multiple = (plan.tp if plan.sequence_parallel else 1) * (2 * plan.cp if plan.cp > 1 else 1)
    if plan.seq_len % multiple:
        yield Finding(
            "seq_len",
            f"seq_len {plan.seq_len} is not a multiple of {multiple} (tp {plan.tp if plan.sequence_parallel else 1} * "
            f"2 * cp {plan.cp})"
            f"; nearest: {_near_multiples(plan.seq_len, multiple)}"
            if plan.cp > 1
            else f"seq_len {plan.seq_len} is not a multiple of tp {plan.tp}, which sequence parallel splits it by; "
            f"nearest: {_near_multiples(plan.seq_len, multiple)}",
        )
    elif (plan.seq_len // plan.cp) % training.loss_chunks:
        yield Finding(
            "loss_chunks",
            f"loss_chunks {training.loss_chunks} does not divide the {plan.seq_len // plan.cp} positions of a rank",
        )
    if plan.ep > 1 and plan.tp > 1 and plan.seq_len % (plan.tp * plan.cp):
        multiple = plan.tp * plan.cp
        yield Finding(
            "moe_seq_len",
            f"with ep {plan.ep} the experts take seq_len {plan.seq_len} split by tp {plan.tp} * cp {plan.cp}; nearest: "
            f"{_near_multiples(plan.seq_len, multiple)}",
        )


def _experts(plan: ParallelPlan, shape: ModelShape, training: Training) -> Iterator[Finding]:
    if plan.ep > 1 and not shape.num_experts:
        yield Finding("ep", f"ep {plan.ep} with a dense model: it has no experts; use ep 1", origin="plan")
        return
    inner = plan.inner
    if inner % plan.ep:
        yield Finding(
            "sparse_mesh",
            f"ep {plan.ep} does not divide dp_shard {plan.dp_shard} * cp {plan.cp} * tp {plan.tp} = {inner}, so there "
            f"is no efsdp with efsdp * ep = {inner}; {_near_divisors(inner, plan.ep)} would",
        )
    if plan.ep > 1 and shape.num_experts % plan.ep:
        both = math.gcd(shape.num_experts, inner)
        yield Finding(
            "num_experts",
            f"ep {plan.ep} does not divide num_experts {shape.num_experts}; {_near_divisors(both, plan.ep)} would",
            origin="plan",  # TorchTitan starts, and fails in its first dispatch
        )
    if not shape.num_experts or inner % plan.ep:
        return
    size = plan.efsdp if plan.ep > 1 else plan.fsdp
    if _titan_expert_dim(plan, shape.num_experts) == 1 and size > 1:
        # FSDP2 shards no dimension but the first unevenly: w1 and w3 are [E, F, D], w2 is [E, D, F].
        hidden = shape.moe_intermediate_size // (plan.tp if plan.ep == 1 else 1)
        for name, dim in (("moe_intermediate_size", hidden), ("hidden_size", shape.hidden_size)):
            if dim % size:
                yield Finding(
                    "expert_shards",
                    f"{size} ranks share each expert along {name}, whose {dim} they do not divide; "
                    f"{_near_divisors(dim, size)} would (change ep or dp_shard)",
                )


def _titan_expert_dim(plan: ParallelPlan, num_experts: int) -> int:
    """The dimension TorchTitan 0.3.0 lets FSDP shard experts by. Without EP it counts the whole storage mesh, replicas
    and TP included, where the FSDP ranks are meant (see `expert_shard_dim`).
    """
    ranks = plan.efsdp * plan.ep if plan.ep > 1 else plan.dp_replicate * plan.fsdp * plan.tp
    return 1 if ranks > num_experts else 0


def expert_shard_dim(plan: ParallelPlan, num_experts: int) -> int:
    """The dimension by which FSDP should shard the stacked experts: 0 (whole experts) unless more ranks than experts
    share them.

    The ranks are those that hold different shards: efsdp * ep, or dp_shard * cp without EP. Replicas hold the same
    ones.
    """
    return 1 if (plan.efsdp * plan.ep if plan.ep > 1 else plan.fsdp) > num_experts else 0


def stays_gathered(plan: ParallelPlan, training: Training) -> bool:
    """Whether parameters stay gathered after their forward pass: until their unit's backward pass, in a pipeline until
    the step's end.

    TorchTitan's `default` policy reshards without a pipeline only (get_fsdp_reshard_after_forward_policy).
    """
    return training.reshard == "never" or (training.reshard == "default" and plan.pp > 1)


def as_run(plan: ParallelPlan, training: Training) -> Training:
    """The training as this toolkit runs it: with context parallel, attention always takes a document mask."""
    masked = plan.cp > 1 and training.attention == "flash"
    return replace(training, attention="masked") if masked else training


@lru_cache(maxsize=256)
def stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Decoder layers of each pipeline stage, as TorchTitan deals them: embedding and head count as a layer each.

    Raises ValueError when a stage would be empty.
    """
    if pp == 1:
        return (layers,)
    each, extra = divmod(layers + 2, pp)
    if each < 1:
        raise ValueError(f"{pp} stages for {layers} layers, the embedding and the head")
    counts = [each + (stage < extra) for stage in range(pp)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def _pipeline(plan: ParallelPlan, shape: ModelShape) -> Iterator[Finding]:
    if plan.pp == 1:
        return
    if shape.tie_word_embeddings:
        yield Finding(
            "tied_pp",
            f"pp {plan.pp} with tied embeddings is not supported: first and last stage would each train a copy. Use pp "
            "1",
        )
    if plan.pp > shape.num_hidden_layers + 2:
        yield Finding(
            "layers",
            f"pp {plan.pp} stages for {shape.num_hidden_layers} layers: each stage needs one of them, the embedding or "
            f"the head; at most {shape.num_hidden_layers + 2}",
        )
    if plan.micro_batches < plan.pp:
        yield Finding(
            "bubble",
            f"{plan.micro_batches} micro-batches over pp {plan.pp} stages leave cores idle "
            f"{(plan.pp - 1) / (plan.micro_batches + plan.pp - 1):.0%} "
            f"of the time; global_batch {plan.pp * plan.micro_batch * plan.dp} would fill the pipeline",
            "warning",
            "plan",
        )


def _batch(plan: ParallelPlan) -> Iterator[Finding]:
    each = plan.micro_batch * plan.dp
    if plan.global_batch % each:
        yield Finding(
            "global_batch",
            f"global_batch {plan.global_batch} is not a multiple of micro_batch {plan.micro_batch} * {plan.dp} "
            f"data-parallel ranks; nearest: {_near_multiples(plan.global_batch, each)}",
        )


def _device(plan: ParallelPlan, shape: ModelShape, training: Training) -> Iterator[Finding]:
    """What Neuron's kernels and collectives ask for.

    Field reports and pre-release sources: causes for care, not promises.
    """
    if training.attention == "flash":
        yield from _flash_attention(plan, shape)
    else:
        yield _dense_mask(plan, shape, training)
    if shape.num_experts:
        yield from _grouped_rows(plan, shape)
    if plan.ep > 1 and training.dispatcher == "all-to-all":
        yield _warning(
            "equal_splits",
            "Neuron's all_to_all_single takes equal splits only, routed rows are uneven: use gather or capacity",
        )
    if plan.pp > 1:
        yield _warning(
            "send_recv",
            "pipeline parallel needs send and recv, which TorchNeuron had not in April 2026 and lists since SDK 2.33",
        )
    yield from _large_gather(plan, shape, training)


def _warning(rule: str, message: str) -> Finding:
    return Finding(rule, message, "warning", "neuron")


def _flash_attention(plan: ParallelPlan, shape: ModelShape) -> Iterator[Finding]:
    queries = plan.seq_len // plan.cp
    if queries % 512 or plan.seq_len % 512:
        yield _warning(
            "flash_length",
            f"the fused attention kernel takes lengths that are multiples of 512 (128 when compiled), here {queries} "
            f"queries and {plan.seq_len} keys; others run a much slower path. Nearest seq_len: "
            f"{_near_multiples(plan.seq_len, 512 * plan.cp)}",
        )
    if shape.head_dim > 128:
        yield _warning(
            "flash_head_dim",
            f"head_dim {shape.head_dim} is over the 128 of the fused attention kernel: a much slower path runs",
        )


def _dense_mask(plan: ParallelPlan, shape: ModelShape, training: Training) -> Finding:
    entries = plan.micro_batch * (plan.seq_len // plan.cp) * plan.seq_len * training.compute_bytes
    heads = shape.num_attention_heads // plan.tp
    size, what = (
        (entries, "as an additive mask in each layer")
        if training.attention == "masked"
        else (entries * heads, f"of scores for {heads} heads in each layer")
    )
    return _warning(
        "dense_mask",
        f"attention {training.attention!r} keeps {size / (1 << 20):,.0f} MiB {what}, and Neuron's fused kernel takes "
        "no mask: document_mask='causal' runs on it",
    )


def _grouped_rows(plan: ParallelPlan, shape: ModelShape) -> Iterator[Finding]:
    split = plan.cp * (plan.tp if plan.ep > 1 else 1)
    rows = plan.micro_batch * plan.seq_len // split * shape.num_experts_per_tok
    if rows % 128:
        yield _warning(
            "grouped_rows",
            f"{rows} routed rows a core (micro_batch * seq_len / cp / tp * {shape.num_experts_per_tok}) are no "
            f"multiple of the 128 that grouped products take; nearest: {_near_multiples(rows, 128)}",
        )


def _large_gather(plan: ParallelPlan, shape: ModelShape, training: Training) -> Iterator[Finding]:
    table = shape.vocab_size * shape.hidden_size // plan.tp
    experts = 3 * shape.num_experts * shape.moe_intermediate_size * shape.hidden_size
    gathered = max(table, experts // (plan.ep if plan.ep > 1 else plan.tp)) * training.compute_bytes
    if max(plan.fsdp, plan.efsdp) > 1 and gathered > 4e9:
        yield _warning(
            "large_gather",
            f"one all-gather makes a tensor of {gathered / 1e9:.1f} GB; tensors of 4 to 5 GB failed in collectives. "
            f"Raise {'ep' if shape.num_experts else 'tp'}",
        )


def _exchange(plan: ParallelPlan) -> Iterator[Finding]:
    """Sizes of all-to-all groups that were refused on the device."""
    if plan.ep == 2:
        yield Finding(
            "ep_group",
            "ep 2: an all-to-all between two cores was refused at LNC=2; use 4, 8, 16 or 32",
            origin="neuron",
        )
    elif plan.ep & (plan.ep - 1):
        yield Finding(
            "ep_group",
            f"ep {plan.ep} does not tile the chips: all-to-all groups of 4, 8, 16 and 32 cores do",
            origin="neuron",
        )


def _groups(plan: ParallelPlan, cluster: Cluster) -> Iterator[Finding]:
    """A group inside a node has to tile the torus of chips; a group over nodes has to take each node alike."""
    for axis, (size, stride) in plan.strides().items():
        if axis in ("pp", "ep"):
            continue
        span = size * stride
        if span <= cluster.per_node and size & (size - 1) and size != cluster.per_node:
            yield Finding(
                "replica_group",
                f"{axis} groups of {size} cores do not tile the chips; sizes 4, 8, 16, 32 and larger powers of two do",
                origin="neuron",
            )
        elif span > cluster.per_node and span % cluster.per_node:
            yield Finding(
                "replica_group",
                f"{axis} groups of {size} cores (every {stride}) take {span} cores, no whole number of nodes of "
                f"{cluster.per_node}",
                origin="neuron",
            )


def _links(plan: ParallelPlan, cluster: Cluster) -> Iterator[Finding]:
    chip, node = cluster.cores_per_chip, cluster.per_node
    for axis in ("tp", "ep", "cp"):
        size, stride = plan.strides().get(axis, (1, 1))
        span = size * stride
        if span > chip and (axis == "tp" or span > node):
            rate, link = cluster.group_bandwidth(size, stride)
            where = f"nodes of {node}" if span > node else f"chips of {chip}"
            yield Finding(
                "crossing",
                f"{axis} groups of {size} cores (every {stride}) cross {where} cores: {rate / 1e9:,.1f} GB/s over "
                f"{link}",
                "warning",
                "plan",
            )


def _near_divisors(number: int, wanted: int) -> str:
    """The divisors of `number` next to `wanted`, as "2 or 4"."""
    below = [d for d in divisors(number) if d < wanted][-1:]
    above = [d for d in divisors(number) if d > wanted][:1]
    return " or ".join(map(str, below + above))


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(low + [number // d for d in reversed(low) if d * d != number])


def _near_multiples(number: int, of: int) -> str:
    below = number // of * of
    return " or ".join(str(n) for n in ([below] if below else []) + [below + of])
