"""Contract: the planner and TorchTitan agree. What is refused for one of TorchTitan's rules fails there as well, what is accepted
starts: ParallelDims builds its meshes on a fake process group of the plan's world, the model is configured and parallelised on meta."""

import copy
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from neuron_parallel.mesh import mesh_shapes
from neuron_parallel.plan import ParallelPlan, Training, errors

from integration.memory_runs import DENSE, MOE, TIED, config_of


def drawn(seed, count):
    """(plan, shape, world): half valid, half with TorchTitan's own errors alone."""
    draw = random.Random(seed)
    good, bad = [], []
    degrees = [1, 1, 1, 2, 2, 3, 4, 8]
    while len(good) < count or len(bad) < count:
        shape = draw.choice([DENSE, MOE, TIED])
        world = draw.choice([1, 2, 4, 8, 16])
        plan = ParallelPlan(
            dp_replicate=draw.choice(degrees), dp_shard=draw.choice([-1, -1, 1, 2, 4]), tp=draw.choice(degrees),
            ep=draw.choice(degrees) if shape.num_experts else 1, sequence_parallel=draw.random() < 0.7,
            seq_len=draw.choice([64, 66, 128]), global_batch=draw.choice([-1, -1, 12]),
        )  # fmt: skip
        found = errors(plan, shape, world)
        if any(finding.origin != "torchtitan" for finding in found):
            continue
        (bad if found else good).append((plan, shape, world))
    return good[:count], bad[:count]


def starts(plan, shape, world):
    """TorchTitan's own checks, its meshes and its parallelisation of the model, for rank 0 of `world`; raises what it raises."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as titan_utils

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        config = config_of(plan, shape, Training(), "unused")
        dims = ParallelDims.from_config(config.parallelism, world)
        dims.build_mesh()
        divisor = (dims.tp if config.parallelism.enable_sequence_parallel else 1) * (2 * dims.cp if dims.cp > 1 else 1)
        if plan.seq_len % divisor:
            raise ValueError(
                "seq_len"
            )  # TorchTitan's Trainer.__init__ says so in these words, before it builds anything
        batch = config.training.local_batch_size * dims.dp_replicate * dims.dp_shard
        if config.training.global_batch_size > 0:
            assert config.training.global_batch_size % batch == 0  # as its Trainer asserts
        titan_utils.set_spmd_backend(config.parallelism.spmd_backend)
        model_config = copy.deepcopy(config.model_spec.model)
        model_config.update_from_config(config=config)
        with torch.device("meta"):
            model = model_config.build()
        config.model_spec.parallelize_fn(
            model, parallel_dims=dims, training=config.training, parallelism=config.parallelism,
            compile_config=config.compile, ac_config=None, dump_folder="unused",
        )  # fmt: skip
        return {
            name: dims.get_optional_mesh(name, include_singleton_axes=True).size()
            for name in ("tp", "ep", "efsdp", "cp", "pp")
        }
    finally:
        dist.destroy_process_group()


GOOD, BAD = drawn(3, 12)


def described(case):
    plan, shape, world = case
    return f"{plan} of {world}, {'moe' if shape.num_experts else 'tied' if shape.tie_word_embeddings else 'dense'}"


@pytest.mark.parametrize("case", GOOD, ids=described)
def test_an_accepted_plan_starts_in_torchtitan_with_the_same_axes(case):
    plan, shape, world = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        axes = starts(plan.resolve(world), shape, world)
    shapes = mesh_shapes(plan.resolve(world))
    assert axes == {name: {**shapes["dense"], **shapes["sparse"]}[name] for name in axes}


@pytest.mark.parametrize("case", BAD, ids=described)
def test_a_plan_refused_for_torchtitans_rules_fails_in_torchtitan(case):
    plan, shape, world = case
    with pytest.raises((AssertionError, ValueError, RuntimeError, NotImplementedError)):
        starts(plan, shape, world)
