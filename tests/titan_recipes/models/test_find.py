"""Contract: a model is found by name, folder or cached Hub id, nothing is downloaded, and no folder's code
is ever run.
"""

import json
from pathlib import Path

import pytest
from qwen3_core import MODELS
from titan_recipes.errors import UserError
from titan_recipes.models.find import find_model, refuse_remote_code


def write(folder: Path, name: str = "debug", **extra: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name].to_hf() | extra))
    return folder


def test_a_name_is_sizes_without_a_folder():
    source = find_model("30B-A3B")
    assert (source.name, source.config, source.folder, source.weights) == ("30B-A3B", MODELS["30B-A3B"], None, None)


def test_a_config_stands_for_itself():
    assert find_model(MODELS["8B"]).config == MODELS["8B"]


@pytest.mark.parametrize("tail", ["", "/config.json"])
def test_a_folder_wins_over_a_name_and_tells_whether_it_has_weights_and_tokenizer(tmp_path, monkeypatch, tail):
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "8B", "debug-moe")
    source = find_model("8B" + tail)
    assert source.config == MODELS["debug-moe"]
    assert (source.folder, source.weights, source.tokenizer) == (folder, None, None)
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").touch()
    assert (source.weights, source.tokenizer) == (folder, folder)


def test_a_torchtitan_step_is_a_model_with_its_assets(tmp_path):
    write(tmp_path / "step-3" / "assets")
    (tmp_path / "step-3" / ".metadata").touch()
    (tmp_path / "step-3" / "assets" / "tokenizer.json").touch()
    source = find_model(tmp_path / "step-3")
    assert source.is_step and source.weights == tmp_path / "step-3"
    assert source.tokenizer == tmp_path / "step-3" / "assets"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    repository = tmp_path / "cache" / "models--Qwen--Qwen3-0.6B"
    folder = write(repository / "snapshots" / "abc123", "0.6B")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return folder


def test_a_hub_id_comes_from_the_cache(cache):
    source = find_model("Qwen/Qwen3-0.6B")
    assert (source.name, source.folder, source.config.hidden_size) == ("Qwen/Qwen3-0.6B", cache, 1024)


def test_a_hub_id_that_is_not_there_names_the_command_and_the_sizes(cache):
    with pytest.raises(UserError, match=r"(?s)hf download Qwen/Qwen3-8B.*model '8B'"):
        find_model("Qwen/Qwen3-8B")


def test_a_wrong_name_gets_the_near_one():
    with pytest.raises(UserError, match="Did you mean '30B-A3B'"):
        find_model("30B-A3")


def test_a_folder_of_another_architecture_is_refused(tmp_path):
    folder = write(tmp_path / "llama", model_type="llama")
    with pytest.raises(UserError, match="does not describe a Qwen3"):
        find_model(folder)


@pytest.mark.parametrize("extra", [{"auto_map": {"AutoConfig": "evil.Config"}}, {"text_config": {"auto_map": {}}}])
def test_auto_map_is_refused_at_any_depth(tmp_path, extra):
    folder = write(tmp_path / "m", **extra)
    with pytest.raises(UserError, match=r"config\.json has auto_map.*\n.*delete the auto_map"):
        find_model(folder)


@pytest.mark.parametrize("route", ["native", "transformers", "kernels"])
def test_auto_map_is_refused_on_every_route_and_the_recipe_stays_as_it_was(tmp_path, route):
    from titan_recipes.models.spec import native, use_model
    from titan_recipes.train.trainer import Trainer

    folder = write(tmp_path / "m", "debug-moe", auto_map={"AutoConfig": "evil.Config"})
    config = Trainer.Config(model_spec=native("debug-moe"))
    before = config.model_spec
    with pytest.raises(UserError, match="has auto_map"):
        use_model(config, folder, route=route)
    assert config.model_spec is before


def test_weights_without_a_tokenizer_are_trained_with_the_recipes_and_that_is_said(tmp_path, caplog):
    from titan_recipes.models.spec import native, use_model
    from titan_recipes.train.trainer import Trainer

    folder = write(tmp_path / "m")
    config = Trainer.Config(model_spec=native("debug"), hf_assets_path="recipes/own")
    use_model(config, folder)
    assert "tokenizer" not in caplog.text  # sizes alone: any tokenizer that fits will do
    (folder / "model.safetensors").touch()
    use_model(config, folder)
    assert f"{folder} has no tokenizer.json" in caplog.text and "(recipes/own)" in caplog.text


def test_another_model_keeps_how_a_recipe_parallelises_and_another_routes_code_is_refused():
    """Else `--model` would quietly take SimpleFSDP out of a recipe that is made for it."""
    from titan_recipes.models.simple_fsdp import simple_fsdp
    from titan_recipes.models.spec import native, use_model
    from titan_recipes.train.trainer import Trainer

    config = Trainer.Config(model_spec=simple_fsdp(native("debug")))
    ours = config.model_spec.parallelize_fn
    for change in ({"model": "0.6B"}, {"route": "native"}, {"model": "debug-moe", "route": "kernels"}):
        use_model(config, **change)
        assert config.model_spec.parallelize_fn is ours
    assert config.model_spec.model.qwen3 == MODELS["debug-moe"]
    with pytest.raises(
        UserError, match=r"function of its own \(titan_recipes\.models\.simple_fsdp\).*\n.*Keep the route"
    ):
        use_model(config, route="transformers")


def test_a_name_has_no_weights_and_another_models_are_not_read_for_it(tmp_path, caplog):
    from titan_recipes.models.spec import native, use_model
    from titan_recipes.train.trainer import Trainer

    config = Trainer.Config(model_spec=native("debug"))
    config.checkpoint.initial_load_path, config.checkpoint.initial_load_in_hf = "/weights/of/debug", True
    use_model(config, "debug")
    assert config.checkpoint.initial_load_path == "/weights/of/debug"  # of these sizes
    use_model(config, "0.6B")
    assert (config.checkpoint.initial_load_path, config.checkpoint.initial_load_in_hf) == (None, False)
    assert "0.6B gives sizes alone: the recipe's weights (/weights/of/debug)" in caplog.text


def test_auto_map_in_a_tokenizers_config_is_refused(tmp_path):
    folder = write(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Tokenizer", null]}}')
    with pytest.raises(UserError, match=r"tokenizer_config\.json has auto_map"):
        refuse_remote_code(folder)


def test_a_folder_without_configuration_has_nothing_to_refuse(tmp_path):
    refuse_remote_code(tmp_path)
    refuse_remote_code(tmp_path / "nowhere")


def test_another_model_reaches_a_loss_that_wraps_another():
    from titan_recipes.models.spec import native, use_model
    from titan_recipes.train.trainer import Trainer
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

    loss = ChunkedLossWrapper.Config(num_chunks=2, loss_fn=CrossEntropyLoss.Config(global_vocab_size=1))
    config = Trainer.Config(model_spec=native("debug"), loss=loss)
    use_model(config, "0.6B")
    assert config.loss.loss_fn.global_vocab_size == 151936


WEIGHTLESS = {
    "pytorch_model.bin": "PyTorch's pickled format",
    "pytorch_model-00001-of-00002.bin": "PyTorch's pickled format",
    "consolidated.00.pth": "a pickled format",
    "model.Q4_K_M.gguf": "a quantised format",
    "model.safetensors.index.json": "an index whose files are not there",
    "model.safetensors.incomplete": "a download that did not end",
    ".cache/huggingface/download/abc.incomplete": "a download that did not end",
    "adapter_config.json": r"an adapter \(LoRA\) alone",
    "adapter_model.bin": r"an adapter \(LoRA\) alone",
    "__0_0.distcp": r"without \.metadata",
    "original/model.safetensors": "weights in a folder inside",
    "checkpoint/step-10/.metadata": "TorchTitan steps in a folder inside",
    "step-10/.metadata": "a TorchTitan step in a folder inside",
}


def with_files(folder, *names):
    write(folder)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def recipe(weights=None):
    from titan_recipes.models.spec import native
    from titan_recipes.train.trainer import Trainer

    config = Trainer.Config(model_spec=native("debug"))
    config.checkpoint.initial_load_path, config.checkpoint.initial_load_in_hf = weights, weights is not None
    config.checkpoint.enable = True
    return config


@pytest.mark.parametrize("name", WEIGHTLESS)
def test_weights_that_cannot_be_read_are_named_and_never_taken_for_none(tmp_path, name):
    """Else a run would train from random weights and say no more than "random initialisation"."""
    from titan_recipes.models.spec import use_model

    config = recipe()
    with pytest.raises(UserError, match=rf"(?s)has no weights that can be read.*{WEIGHTLESS[name]}"):
        use_model(config, with_files(tmp_path / "m", name))
    use_model(config, tmp_path / "m", weights=False)
    assert config.checkpoint.initial_load_path is None


def test_a_folder_of_sizes_alone_does_not_take_the_recipes_weights(tmp_path):
    """The run would have trained, with an equal config, the recipe's weights on the folder's tokenizer."""
    from titan_recipes.models.spec import use_model

    folder = with_files(tmp_path / "m", "tokenizer.json", "README.md", "generation_config.json")
    use_model(recipe(), folder)
    with pytest.raises(UserError, match=r"has no weights.*\n.*The recipe starts from weights \(/weights/of/debug\)"):
        use_model(recipe("/weights/of/debug"), folder)


@pytest.mark.parametrize("seed", range(40))
def test_any_folder_gives_its_weights_or_is_refused_when_something_says_it_should_have_some(tmp_path, seed):
    import random

    from titan_recipes.models.spec import use_model

    draw = random.Random(seed)
    harmless = ["tokenizer.json", "README.md", "LICENSE", "merges.txt", "figures/loss.png", ".gitattributes"]
    names = draw.sample(harmless, draw.randrange(4)) + draw.sample(sorted(WEIGHTLESS), draw.randrange(3))
    if draw.random() < 0.3:
        names.append("model.safetensors")
    folder, config = with_files(tmp_path / "m", *names), recipe()
    if "model.safetensors" in names:
        use_model(config, folder)
        assert config.checkpoint.initial_load_path == str(folder)
    elif any(name in WEIGHTLESS for name in names):
        with pytest.raises(UserError, match="has no weights that can be read"):
            use_model(config, folder)
    else:
        use_model(config, folder)
        assert config.checkpoint.initial_load_path is None


def test_an_export_has_the_dtype_of_the_folder_that_training_started_from(tmp_path):
    """Else fine-tuning a bfloat16 folder leaves one of twice its size."""
    import torch
    from titan_recipes.models.spec import published_dtype

    folder = with_files(tmp_path / "m", "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    for name in ("bfloat16", "float16", "float32"):
        for key in ("torch_dtype", "dtype"):
            others = {k: v for k, v in content.items() if k not in ("dtype", "torch_dtype")}
            (folder / "config.json").write_text(json.dumps(others | {key: name}))
            assert published_dtype(recipe(str(folder))) == getattr(torch, name)
    assert published_dtype(recipe()) == torch.float32
