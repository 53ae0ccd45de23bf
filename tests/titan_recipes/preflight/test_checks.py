"""Contract: a layout that cannot work, and what a run would not read, is refused before a rank starts, with the reason
and what to do instead."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from qwen3_core import Qwen3Config
from titan_recipes.cli import main
from titan_recipes.config.build import build_config, print_help
from titan_recipes.config.options import Options
from titan_recipes.data.loader import TextDataLoader
from titan_recipes.errors import UserError
from titan_recipes.models.simple_fsdp import simple_fsdp
from titan_recipes.models.spec import model_spec
from titan_recipes.moe.router import use_balance_loss
from titan_recipes.preflight.checks import check, check_layout
from titan_recipes.recipes import Recipe
from titan_recipes.train.trainer import Trainer

UNTIED = Qwen3Config(
    vocab_size=320,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=96,
    max_position_embeddings=128,
    rope_theta=1e6,
)


def config(route: str = "native", model: Qwen3Config = UNTIED, **parallelism: Any) -> Trainer.Config:
    found = Trainer.Config(model_spec=model_spec(model, route=route))
    found.training.seq_len = 64
    for name, value in parallelism.items():
        setattr(found.parallelism, name, value)
    return found


REFUSED = [
    ({"context_parallel_degree": 2, "spmd_backend": "partial_dtensor"}, "spmd_types' alone", "spmd_backend spmd_types"),
    ({"context_parallel_degree": 2, "context_parallel_load_balancer": "ptrr"}, "block masks", "headtail or None"),
    ({"context_parallel_degree": 3}, "multiple of 6", "nearest: 60 or 66"),
    ({"pipeline_parallel_degree": 5}, "pp 5 stages for 2 layers", "--parallelism.pipeline_parallel_degree"),
    (
        {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": "Interleaved1F1B"},
        "cannot be greater",
        "less_layers",
    ),
    (
        {"pipeline_parallel_degree": 2, "pipeline_parallel_layers_per_stage": 1},
        "exactly 1 stage per rank",
        "layers_per_stage",
    ),
    (
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "DualPipeV"},
        "loss on the first rank",
        "ZBVZeroBubble",
    ),
    (
        {"tensor_parallel_degree": 4},
        "tp 4 does not divide num_key_value_heads 2; 2 would",
        "--parallelism.tensor_parallel_degree",
    ),
]


@pytest.mark.parametrize(("parallelism", "reason", "instead"), REFUSED)
def test_a_layout_that_cannot_work_is_refused_with_reason_and_alternative(parallelism, reason, instead):
    with pytest.raises(UserError) as refused:
        check_layout(config(**parallelism))
    assert reason in str(refused.value) and instead in str(refused.value)


def test_a_schedule_that_cannot_validate_is_refused_with_validation_alone():
    asked = config(
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule="ZBVZeroBubble",
        pipeline_parallel_first_stage_less_layers=0,
    )
    asked.parallelism.pipeline_parallel_last_stage_less_layers = 0
    asked.model_spec = model_spec(replace(UNTIED, num_hidden_layers=4))
    check_layout(asked)
    asked.validator.enable = True
    with pytest.raises(UserError, match=r"(?s)as validation does.*validator.no-enable"):
        check_layout(asked)


def test_pipeline_parallel_with_tied_weights_is_refused_on_both_routes():
    for route in ("native", "transformers"):
        with pytest.raises(UserError, match=r"(?s)each train a copy.*tie_word_embeddings=False"):
            check_layout(config(route, replace(UNTIED, tie_word_embeddings=True), pipeline_parallel_degree=2))


@pytest.mark.parametrize(
    ("parallelism", "reason"),
    [
        ({"spmd_backend": "partial_dtensor"}, "knows 'spmd_types' alone"),
        ({"tensor_parallel_degree": 2, "enable_sequence_parallel": False}, "always splits the sequence"),
    ],
)
def test_what_torchtitans_transformers_backend_lacks_is_refused_and_the_native_route_has_it(parallelism, reason):
    with pytest.raises(UserError, match=rf"(?s){reason}.*--route native"):
        check_layout(config("transformers", **parallelism))
    check_layout(config("native", **parallelism))


@pytest.mark.parametrize("axis", ["context", "pipeline"])
def test_simple_fsdp_is_refused_with_context_and_pipeline_parallel(axis):
    asked = config(spmd_backend="partial_dtensor", **{f"{axis}_parallel_degree": 2})
    asked.model_spec = simple_fsdp(asked.model_spec)
    with pytest.raises(UserError, match=rf"{axis}_parallel 2"):
        check_layout(asked)


@pytest.mark.parametrize(
    ("parallelism", "reason"),
    [
        ({"pipeline_parallel_degree": 2}, "routing of all layers"),
        (
            {"tensor_parallel_degree": 2, "spmd_backend": "partial_dtensor"},
            "needs parallelism.spmd_backend 'spmd_types'",
        ),
    ],
)
def test_the_auxiliary_loss_is_refused_where_routers_cannot_share_it(parallelism, reason):
    asked = config(model=replace(UNTIED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32), **parallelism)
    check_layout(asked)  # without the loss it works
    use_balance_loss(asked.model_spec, 0.001)
    with pytest.raises(UserError, match=reason):
        check_layout(asked)


RECIPES = Path(__file__).parents[3] / "recipes"


def built(folder: Path, *arguments: str, name: str = "debug") -> Trainer.Config:
    """A debug recipe as the command line builds it."""
    recipe = Recipe(name, str(RECIPES / "debug.py"), name)
    return build_config(Options(recipe, arguments, "cpu", str(folder / "run"), ""))


@pytest.mark.parametrize(
    ("arguments", "resume", "reason"),
    [
        (("--checkpoint.initial_load_path", "/no/such/place"), False, "is no folder here"),
        (("--checkpoint.initial_load_path", "/"), False, r"no \.metadata\)\.\n.*add --checkpoint.initial_load_in_hf"),
        (("--checkpoint.initial_load_path", "/", "--checkpoint.no-enable"), False, "would not be read.*\n.*load_only"),
        (("--checkpoint.initial_load_in_hf", "--checkpoint.no-enable"), False, "debug_tokenizer would not be read"),
        (("--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"), False, "from which no run goes on"),
        (("--checkpoint.no-enable",), True, "--resume reads a checkpoint"),
        (("--checkpoint.load_step", "7"), True, "load_step 7 is no complete step in .*; there: 2, 4"),
        (("--dataloader.holdout", "0"), False, r"validation part of 'python_docs' is empty \(holdout=0.0\)"),
        (("--dataloader.holdout", "1.5"), False, "holdout 1.5 is no share"),
        (("--validator.dataloader.dataset_path", "nowhere.jsonl"), False, "'nowhere.jsonl' does not exist"),
        (("--validator.dataloader.seed", "3"), False, "settings but names no data"),
        (("--dataloader.format", "chat"), False, "built-in python-docs are plain texts"),
        (("--dataloader.hub_split", "test"), False, "hub_split are for a Hub dataset"),
    ],
)
def test_what_a_run_would_not_read_is_refused_instead_of_left_out(tmp_path, arguments, resume, reason):
    if resume:
        for step in (2, 4):
            (tmp_path / "run" / "checkpoint" / f"step-{step}").mkdir(parents=True)
            (tmp_path / "run" / "checkpoint" / f"step-{step}" / ".metadata").touch()
    with pytest.raises(UserError, match=reason):
        check(built(tmp_path, *arguments), 1, resume=resume)


def test_the_validators_data_on_the_command_line_are_read_whole_by_the_same_loader(tmp_path):
    """TorchTitan's default validator has a loader of its own, which knows C4 alone."""
    own = built(tmp_path, "--validator.dataloader.dataset_path", "held.jsonl").validator.dataloader
    assert type(own) is TextDataLoader.Config
    assert (own.dataset_path, own.split, own.holdout) == ("held.jsonl", "train", 0.0)


def test_data_named_on_the_command_line_are_read_in_the_place_of_the_recipes(tmp_path):
    """debug_finetune has a function of documents, which would win over a path."""
    plain = built(tmp_path, name="debug_finetune").dataloader
    assert plain.documents is not None
    for option in ("dataset_path", "dataset"):
        (source,) = built(
            tmp_path, f"--dataloader.{option}", "own/data", name="debug_finetune"
        ).dataloader.all_sources()
        assert (source.path or source.hub, source.documents, source.format) == ("own/data", None, "chat")
    for option in ("--dataloader.dataset", "--dataloader.dataset=python-docs"):
        arguments = (option,) if "=" in option else (option, "python-docs")
        assert built(tmp_path, *arguments, name="debug_finetune").dataloader.documents is None
    with pytest.raises(UserError, match="name one"):
        built(tmp_path, "--dataloader.dataset", "own/data", "--dataloader.dataset_path", "own/data")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--training.steps", "0"), "training.steps 0 is no run"),
        (("--validator.steps", "0"), "TorchTitan refuses: validation steps must be positive or -1"),
    ],
)
def test_a_value_that_is_no_run_is_one_error(tmp_path, arguments, reason):
    with pytest.raises(UserError, match=reason):
        built(tmp_path, *arguments)


def own_tokenizer(folder: Path, **changes: Any) -> Path:
    """The debug tokenizer in `folder`, with other entries in its tokenizer_config.json."""
    shutil.copytree(RECIPES / "debug_tokenizer", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | changes))
    return folder


def test_a_tokenizer_that_cannot_be_loaded_is_one_error_naming_its_folder(tmp_path):
    folder = own_tokenizer(tmp_path / "tok")
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    with pytest.raises(UserError, match=r"tok cannot be loaded"):
        check(built(tmp_path, "--hf_assets_path", str(folder)), 1, resume=False)


@pytest.mark.parametrize(
    "template",
    ["{% generation %}{% endgeneration %}", "{% no such thing %}", [{"name": "default", "template": "{{ x }}"}]],
)
def test_a_chat_template_of_any_kind_stops_no_run_on_texts(tmp_path, template):
    folder = own_tokenizer(tmp_path / "tok", chat_template=template)
    check(built(tmp_path, "--hf_assets_path", str(folder)), 1, resume=False)


def test_a_token_past_the_models_rows_is_refused_wherever_it_is_named(tmp_path):
    """It would be an index error on a device in step 1."""
    folder = own_tokenizer(tmp_path / "tok", pad_token="<|one more|>")
    with pytest.raises(UserError, match=r"tok has ids up to 2048, but the model has 2048 embedding rows"):
        check(built(tmp_path, "--hf_assets_path", str(folder)), 1, resume=False)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--dry-run", "--profile"), "trains nothing: leave --profile out"),
        (("--dry-run", "--compare-modes"), "trains nothing: leave --compare-modes out"),
        (("--compare-modes", "--resume"), "starts both modes anew: leave --resume out"),
    ],
)
def test_a_flag_that_would_have_no_effect_is_refused(capsys, flags, reason):
    assert main(["debug", *flags], RECIPES) == 2
    assert reason in capsys.readouterr().err


def test_another_number_of_ranks_than_torchrun_started_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["debug", "--nproc", "4"], RECIPES) == 2
    assert "--nproc 4, but torchrun started 2 ranks" in capsys.readouterr().err


def test_what_works_is_not_refused():
    for route in ("native", "transformers"):
        check_layout(config(route, context_parallel_degree=2, pipeline_parallel_degree=2, tensor_parallel_degree=2))
        check_layout(config(route, context_parallel_degree=4, context_parallel_load_balancer=None))


def test_a_folder_named_for_its_weights_has_them_whole(tmp_path):
    (tmp_path / "m").mkdir()
    asked = built(tmp_path, "--checkpoint.initial_load_path", str(tmp_path / "m"), "--checkpoint.initial_load_in_hf")
    (tmp_path / "m" / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"(?s)has no weights that can be read.*pytorch_model\.bin: PyTorch's pickled"):
        check(asked, 1, resume=False)
    (tmp_path / "m" / "model-00001-of-00002.safetensors").touch()
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(UserError, match=r"lacks 1 of the files that its index names: model-00002-of-00002"):
        check(asked, 1, resume=False)


def test_short_names_reach_the_config_of_a_recipe(tmp_path):
    asked = built(tmp_path, "--lr", "2e-4", "--steps=7", "--batch", "8", "--seq", "64", "--data", "own/corpus")
    assert [group.optimizer_kwargs["lr"] for group in asked.optimizer.param_groups] == [2e-4]
    training = asked.training
    assert (training.steps, training.global_batch_size, training.seq_len) == (7, 8, 64)
    assert asked.dataloader.all_sources()[0].hub == "own/corpus"


def test_every_place_that_a_hint_names_is_an_option(tmp_path, capsys):
    """A hint to an option that there is not would be worse than none."""
    import re

    from titan_recipes.config.short_names import OTHERS

    with pytest.raises(SystemExit):
        built(tmp_path, "--help")
    text = re.sub(r"-(?=[a-z])", "_", capsys.readouterr().out)
    of_the_app = {"--model", "--dump_folder", "--list", "--lr", "--steps", "--batch", "--seq", "--data"}
    for place in OTHERS.values():
        for option in re.findall(r"--[\w.-]+", place):
            assert option in of_the_app or option[2:].replace("-", "_") in text, option


def test_help_of_one_section_is_that_section_alone(tmp_path, capsys):
    options = Options(Recipe("debug", str(RECIPES / "debug.py"), "debug"), (), "cpu", str(tmp_path / "run"), "")
    with pytest.raises(SystemExit):
        print_help(options, "training")
    text = capsys.readouterr().out
    assert "--training.steps" in text and "--training.seq-len" in text
    assert "--checkpoint" not in text and len(text.splitlines()) < 150
    with pytest.raises(UserError, match=r"There is no section 'trainning'. Did you mean 'training'\?\nSections: "):
        print_help(options, "trainning")


def test_what_the_command_line_says_is_not_announced_as_the_devices(tmp_path, capsys, caplog):
    """It said float32 and ran bfloat16."""
    caplog.set_level("INFO")
    asked = built(tmp_path, "--training.mixed_precision_param", "bfloat16")
    assert asked.training.mixed_precision_param == "bfloat16"
    assert "mixed_precision_param" not in caplog.text + capsys.readouterr().out
    assert built(tmp_path).training.mixed_precision_param == "float32"
    assert "mixed_precision_param" in caplog.text + capsys.readouterr().out


def test_weights_and_biases_without_a_login_is_refused_before_the_start(tmp_path, monkeypatch):
    import importlib.machinery
    import importlib.util

    asked = built(tmp_path, "--metrics.enable_wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name))
    with pytest.raises(UserError, match="wandb is not installed"):
        check(asked, 1, resume=False)
    there = importlib.machinery.ModuleSpec("wandb", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there if name == "wandb" else real(name))
    with pytest.raises(UserError, match="there is no login: wandb login, or WANDB_API_KEY"):
        check(asked, 1, resume=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    check(asked, 1, resume=False)
