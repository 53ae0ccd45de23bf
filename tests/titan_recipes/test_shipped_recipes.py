"""Contract: every recipe builds at its own world size and takes a step there, and its figures are the truth about it.

Ranks are fake and tensors have shapes only. Steps that are equal (a recipe and its variant with another learning rate)
are taken once; of the layers, which are alike, the first is kept. The soak takes all of them and checks the memory
figures.
"""

import logging
import re
from pathlib import Path

import pytest
from neuron_parallel import core_memory
from titan_recipes.config.device_defaults import apply_device_defaults
from titan_recipes.moe.kernels import check_overrides, kernel
from titan_recipes.moe.router import BalancedRouter
from titan_recipes.preflight.figures import with_table
from titan_recipes.preflight.layout import world_size_of
from titan_recipes.preflight.plan import check_memory, plan_of
from titan_recipes.preflight.rehearsal import Peak, rehearse
from titan_recipes.recipes import Figures, list_recipes, load_recipe, read_figures
from torchtitan.models.common.moe import MoE

FOLDER = Path(__file__).parents[2] / "recipes"
FIGURES = read_figures(FOLDER)
RECIPES = {recipe.name: recipe for recipe in list_recipes(FOLDER)}
ON_TRN2 = [name for name, recipe in RECIPES.items() if Path(recipe.source).stem in ("qwen3", "qwen3_moe")]
CORE_GIB = 24
ROOM = 0.9

every = pytest.mark.parametrize("name", RECIPES)
on_trn2 = pytest.mark.parametrize("name", ON_TRN2)
STEPS: dict[str, str] = {}


def recipe(name):
    return load_recipe(RECIPES[name])


def step_of(config):
    """What a step depends on, as text."""
    spec, training = config.model_spec, config.training
    shape = (training.local_batch_size, training.seq_len, training.dtype, training.mixed_precision_param)
    parts = (config.parallelism, config.activation_checkpoint, config.override, config.loss, shape)
    step = (spec.model, spec.parallelize_fn, *parts)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(step))  # functions by name


@every
def test_a_recipe_takes_a_step_at_its_own_world_size(name):
    config = recipe(name)()
    step = step_of(config)
    if step in STEPS:
        return  # taken as STEPS[step]
    world = world_size_of(config)
    apply_device_defaults(config, "neuron" if name in ON_TRN2 else "cpu")
    rehearsed = rehearse(config, world_size=world, layers=1)
    STEPS[step] = name
    p = config.parallelism
    assert rehearsed.data_ranks == p.data_parallel_replicate_degree * max(p.data_parallel_shard_degree, 1)
    in_a_copy = world // p.data_parallel_replicate_degree
    # Norms are on every tensor-parallel rank, and the last shard of what does not divide is padded.
    assert (
        rehearsed.total_parameters / in_a_copy <= rehearsed.parameters <= 1.01 * rehearsed.total_parameters / in_a_copy
    )


@every
def test_a_recipes_figures_are_those_of_its_config(name):
    """Memory is held against formulas below and against a rehearsal at full depth in the soak."""
    config, said = recipe(name)(), FIGURES[name]
    world = world_size_of(config)
    sequences = config.training.global_batch_size
    if sequences <= 0:
        sequences = config.training.local_batch_size * world
    assert said._replace(memory_gib=None) == Figures(
        cores=world,
        memory_gib=None,
        tokens_per_step=sequences * config.training.seq_len,
        seq_len=config.training.seq_len,
        mask=config.model_spec.model.document_mask,
    )
    if name in ON_TRN2:
        assert world % 64 == 0 or (world == 4 and "one Trainium2 chip" in recipe(name).__doc__)
        assert said.memory_gib <= ROOM * CORE_GIB
        assert config.model_spec.flavor in recipe(name).__doc__ or "qwen3_8b_pretrain" in recipe(name).__doc__


def test_the_page_has_the_table_of_the_figures():
    page = (FOLDER.parent / "docs" / "recipes.md").read_text()
    assert with_table(page, FIGURES) == page, "run `nox -s figures`"


@on_trn2
def test_the_planner_accepts_a_recipe_and_its_formulas_give_the_memory_that_the_rehearsal_saw(name):
    """Two ways to the figure: tensors of a rehearsed step in figures.json, neuron-parallel's formulas here."""
    config = recipe(name)()
    apply_device_defaults(config, "neuron")
    world = world_size_of(config)
    check_memory(config, world)
    plan, shape, how = plan_of(config, world)
    said = FIGURES[name].memory_gib
    bound = 0.07 if "simple_fsdp" in name else 0.05  # SimpleFSDP is not modelled apart
    assert core_memory(plan, shape, how).peak.bytes / 2**30 == pytest.approx(said, rel=bound)


@on_trn2
def test_a_trn2_recipe_keeps_to_what_the_kernels_take(name):
    config = recipe(name)()
    assert config.model_spec.model.document_mask == "causal"
    assert config.training.seq_len % 512 == 0
    loader = config.dataloader
    assert loader.format == "text" or loader.packing in (None, "none")  # padded: a causal mask is exact
    check_overrides(config, "neuron", planned=True)  # nor beyond what nki-moe's kernels take
    ranks = world_size_of(config) // config.parallelism.tensor_parallel_degree
    assert config.training.global_batch_size % (config.training.local_batch_size * ranks) == 0


def test_every_dense_size_is_there_in_three_forms_and_in_debug():
    sizes = ("0_6b", "1_7b", "4b", "8b", "14b", "32b")
    expected = {f"qwen3_{size}_{form}" for size in sizes for form in ("pretrain", "continued", "finetune")}
    assert expected <= set(ON_TRN2)
    assert {"debug", "debug_continued", "debug_finetune"} <= set(RECIPES)
    config = recipe("qwen3_8b_pretrain")()
    assert (config.parallelism.tensor_parallel_degree, config.parallelism.data_parallel_shard_degree) == (4, 16)


def test_the_mixtures_of_experts_are_there_with_their_experts_in_kernels_and_balanced_where_they_are_pretrained():
    expected = {
        "qwen3_30b_a3b_pretrain": (64, 4),
        "qwen3_30b_a3b_continued": (64, 4),
        "qwen3_30b_a3b_finetune": (64, 4),
        "qwen3_30b_a3b_one_chip": (4, 4),
        "qwen3_235b_a22b_pretrain_8_nodes": (512, 8),
        "qwen3_235b_a22b_finetune_8_nodes": (512, 8),
        "debug_moe": (1, 1),
    }
    for name, degrees in expected.items():
        config = recipe(name)()
        assert (world_size_of(config), config.parallelism.expert_parallel_degree) == degrees
        assert config.override.imports == [kernel("experts")]
        model = config.model_spec.model
        routers = [node for _, node, _, _ in model.traverse(BalancedRouter.Config)]
        tuned = "finetune" in name or name == "debug_moe"
        assert [r.balance_coefficient for r in routers] == [0.0 if tuned else 0.001] * model.qwen3.num_hidden_layers
        assert all(node.load_balance_coeff is None for _, node, _, _ in model.traverse(MoE.Config))


@pytest.mark.soak
@on_trn2
def test_the_memory_per_core_in_the_figures_is_what_a_rehearsal_at_full_depth_finds(name):
    config = recipe(name)()
    apply_device_defaults(config, "neuron")
    said = FIGURES[name].memory_gib
    assert rehearse(config, world_size=world_size_of(config)).peak_gib == pytest.approx(said, rel=0.02)


def test_a_layout_that_does_not_fit_the_model_fails_in_rehearsal():
    config = recipe("qwen3_8b_pretrain")()
    config.parallelism.tensor_parallel_degree, config.parallelism.data_parallel_shard_degree = 16, 4  # 8 KV heads
    with pytest.raises(Exception, match=r"8|16|divi"):
        rehearse(config, world_size=64, layers=1)


def test_compilation_is_left_out_of_a_rehearsal_and_that_is_said(caplog):
    assert recipe("qwen3_8b_pretrain_compiled")().compile.enable
    config = recipe("debug")()
    config.compile.enable = True
    with caplog.at_level(logging.WARNING):
        rehearse(config, world_size=1, layers=1)
    assert "torch.compile is left out" in caplog.text


def test_the_peak_counts_what_is_alive_what_is_freed_and_what_a_view_shares():
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), Peak() as peak:
        a = torch.empty(1000)
        b = a * 2
        view = a.view(10, 100)
        assert peak.now == 8000
        del b
        assert (peak.now, peak.peak) == (4000, 8000)
        del a
        assert peak.now == 4000
        view.untyped_storage().resize_(0)
        assert peak.now == 0
        view.untyped_storage().resize_(4000)
        del view
        assert (peak.now, peak.peak) == (0, 8000)
