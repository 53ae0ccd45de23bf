"""Contract: the planner and TorchTitan agree. What is refused for one of TorchTitan's rules fails there as well, what
is accepted
starts: ParallelDims builds its meshes on a fake process group of the plan's world, the model is configured and
parallelised on meta."""

import copy
import multiprocessing
import random
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import titan_recipes.models.spec
import titan_recipes.train.trainer  # noqa: F401  TorchTitan is loaded once, the forks inherit it
import torch
import torch.distributed as dist
import torchtitan.distributed.pipeline_parallel  # noqa: F401
from neuron_parallel.mesh import mesh_shapes
from neuron_parallel.plan import ParallelPlan, Training, errors

from integration.memory_runs import DENSE, MOE, TIED, config_of

ODD = replace(DENSE, vocab_size=2050, num_key_value_heads=8)
ODD_MLP = replace(DENSE, intermediate_size=150)
ODD_MOE = replace(MOE, moe_intermediate_size=42, num_experts=6)


def drawn(seed, good, each):
    """(plan, shape, world): so many valid ones, and up to `each` that break one of TorchTitan's rules and no other."""
    draw = random.Random(seed)
    fine, broken = [], {}
    degrees = [1, 1, 1, 2, 2, 3, 4, 8]
    for _ in range(6000):
        shape = draw.choice([DENSE, MOE, TIED, ODD, ODD_MLP, ODD_MOE])
        world = draw.choice([1, 2, 4, 8, 16])
        plan = ParallelPlan(
            dp_replicate=draw.choice(degrees),
            dp_shard=draw.choice([-1, -1, -1, 1, 2, 4]),
            tp=draw.choice(degrees),
            pp=draw.choice([1, 1, 1, 2, 8]),
            ep=draw.choice(degrees) if shape.num_experts else 1,
            sequence_parallel=draw.random() < 0.7,
            seq_len=draw.choice([64, 66, 128]),
            global_batch=draw.choice([-1, -1, 12]),
        )
        found = errors(plan, shape, world)
        if not found:
            fine.append((plan, shape, world))
        elif len(found) == 1 and found[0].origin == "torchtitan":
            broken.setdefault(found[0].rule, []).append((plan, shape, world))
    return draw.sample(fine, good), {rule: cases[:each] for rule, cases in sorted(broken.items())}


def starts(plan, shape, world):
    """TorchTitan's own checks, its meshes and its parallelisation of the model, for rank 0 of `world`; raises what it
    raises.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as titan_utils
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        config = config_of(plan, shape, Training(), "unused")
        dims = ParallelDims.from_config(config.parallelism, world)
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
        if dims.pp > 1:  # stages are dealt before each is parallelised
            _generate_llm_fqn_per_model_part(dims.pp, shape.num_hidden_layers)
        config.model_spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=None,
            dump_folder="unused",
        )
        return {
            name: dims.get_optional_mesh(name, include_singleton_axes=True).size()
            for name in ("tp", "ep", "efsdp", "cp", "pp")
        }
    finally:
        dist.destroy_process_group()


def in_child(plan, shape, world):
    """`starts` in a forked process: SPMD types remember meshes of process groups that are gone."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(starts, plan, shape, world).result(timeout=300)


GOOD, BAD = drawn(3, 16, 3)
REFUSED = [(rule, *case) for rule, cases in BAD.items() for case in cases]


def described(case):
    plan, shape, world = case
    return f"{plan} of {world}, {'moe' if shape.num_experts else 'tied' if shape.tie_word_embeddings else 'dense'}"


@pytest.mark.parametrize("case", GOOD, ids=described)
def test_an_accepted_plan_starts_in_torchtitan_with_the_same_axes(case):
    plan, shape, world = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        axes = in_child(plan.resolve(world), shape, world)
    shapes = mesh_shapes(plan.resolve(world))
    assert axes == {name: {**shapes["dense"], **shapes["sparse"]}[name] for name in axes}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0]}: {described(case[1:])}")
def test_a_plan_refused_for_one_of_torchtitans_rules_fails_in_torchtitan(case):
    _, plan, shape, world = case
    with pytest.raises((AssertionError, ValueError, RuntimeError, NotImplementedError)):
        in_child(plan, shape, world)


def test_most_of_torchtitans_rules_were_drawn():
    assert {
        "world",
        "seq_len",
        "sparse_mesh",
        "tied_pp",
        "layers",
        "global_batch",
    } <= set(BAD)
