"""Contract: `apps/train RECIPE --dry-run` needs no device: it prints the mesh, the memory and the shapes of the whole
planned world, and a plan that cannot work is refused with every reason before a rank starts."""

import re

import pytest
from titan_recipes.errors import UserError
from titan_recipes.preflight import dry_run
from titan_recipes.preflight import plan as planning

from integration.app import fork_app

DRY = ("debug", "--dry-run", "--validator.no-enable")


def test_a_dry_run_prints_mesh_memory_and_shapes_of_the_planned_world(tmp_path):
    ended = fork_app(*DRY, "--instance", "trn2.48xlarge", "--parallelism.tensor_parallel_degree", "2", cwd=tmp_path)
    assert ended.code == 0, ended.out
    assert "planned for 1 x trn2.48xlarge: 64 cores, dp_shard=32 tp=2" in ended.out
    assert "mesh: dp_shard 32, tp 2" in ended.out
    assert "all tensors" in ended.out and "fits" in ended.out
    assert "parameters have a gradient of their own shape" in ended.out
    assert "(4, 256) -> logits (4, 256, 1024)" in ended.out  # the vocabulary divided by tp
    shapes = re.findall(r"^  (\S+) +\(.*\) +-> .* a core$", ended.out, re.MULTILINE)
    assert "tok_embeddings.weight" in shapes and not any("lm_head" in name for name in shapes)  # tied: one parameter
    assert len(shapes) == len(set(shapes)) == 11  # of the first layer alone


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("layers.12._checkpoint_wrapped_module.attention.wo.weight", ("12", "attention.wo.weight")),
        ("model.model.layers.3.self_attn.o_proj.weight", ("3", "self_attn.o_proj.weight")),
        ("model.lm_head.weight", ("0", "lm_head.weight")),
        ("norm.weight", ("0", "norm.weight")),
    ],
)
def test_a_parameters_layer_is_known_by_its_name_in_either_model_code(name, place):
    assert dry_run._place(name) == place


def test_a_plan_that_cannot_work_is_refused_with_every_reason(tmp_path):
    ended = fork_app(
        *DRY,
        "--nproc",
        "64",
        "--parallelism.tensor_parallel_degree",
        "4",
        "--parallelism.pipeline_parallel_degree",
        "2",
        cwd=tmp_path,
    )
    assert ended.code == 2 and "Traceback" not in ended.out
    assert "tp 4 does not divide num_key_value_heads 2" in ended.out and "tied embeddings" in ended.out


def test_an_unknown_machine_is_refused_by_name_and_a_run_on_cpu_takes_none(tmp_path):
    ended = fork_app(*DRY, "--instance", "trn1.32xlarge", cwd=tmp_path)
    assert ended.code == 2 and "'trn1.32xlarge' is not in the table" in ended.out
    ended = fork_app("debug", "--instance", "trn2.48xlarge", cwd=tmp_path)
    assert ended.code == 2 and "--dry-run" in ended.out


def test_the_machine_whose_memory_counts_is_named_by_the_user_else_by_itself_else_said_to_be_assumed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(planning, "PRODUCT", tmp_path / "product_name")
    assert _said(None) == ("trn2.48xlarge", "assumed")
    (tmp_path / "product_name").write_text("trn2.3xlarge\n")
    assert _said(None) == ("trn2.3xlarge", "calls itself")
    assert _said("trn2-ultraserver") == ("trn2-ultraserver", "--instance")
    (tmp_path / "product_name").write_text("Standard PC\n")
    assert _said(None) == ("trn2.48xlarge", "assumed")
    with pytest.raises(UserError, match="not in the table"):
        planning._machine("trn9")


def _said(name):
    machine, source = planning._machine(name)
    return machine.name, next(
        word for word in ("assumed", "calls itself", "--instance says") if word in source
    ).removesuffix(" says")
