"""Contract: what a user can get wrong is one error, before any rank starts, that says what was found and what to do."""

import json
import os
import shutil

import pytest

from integration.app import ROOT, fork_app, metrics, run_app

TOKENIZER = ROOT / "recipes" / "debug_tokenizer"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("debgu",), "Did you mean 'debug'"),
        (("debug", "--device", "neuron"), "torch-neuronx 2.14.3"),
        (("debug", "--nproc", "0"), "--nproc 0"),
        (("debug", "--resume"), "no run of 'debug' with a complete checkpoint"),
        (("debug", "--dataloader.dataset_path", "no/such/place"), "no/such/place' does not exist"),
        (("debug", "--dataloader.dataset_path", "empty"), "is empty"),
        (("debug", "--dataloader.dataset", "c4"), "python-docs"),
        (("debug", "--training.seq_len", "8192"), "seq_len 8192 is over max_position_embeddings 4096"),
        (
            ("debug", "--hf_assets_path", "big_tokenizer"),
            "but the model has 2048 embedding rows",
        ),
        (("debug", "--hf_assets_path", "empty"), "no tokenizer.json"),
        (("debug", "--nproc", "3", "--parallelism.tensor_parallel_degree", "2"), "make 2, which does not divide 3"),
        (("debug", "--nproc", "2", "--parallelism.data_parallel_shard_degree", "4"), "= 4 cores, but there are 2"),
        (
            ("debug", "--nproc", "4", "--parallelism.tensor_parallel_degree", "4"),
            "tp 4 does not divide num_key_value_heads 2",
        ),
        (
            (
                "debug",
                "--nproc",
                "2",
                "--parallelism.tensor_parallel_degree",
                "2",
                "--training.seq_len",
                "65",
            ),
            "seq_len 65 is not a multiple of tp 2",
        ),
        (("debug", "--nproc", "2", "--parallelism.pipeline_parallel_degree", "2"), "tied embeddings"),
        (("debug", "--training.global_batch_size", "10"), "nearest: 8"),
        (("mine.py:not_a_config",), "returned str"),
    ],
)
def test_a_mistake_is_one_error_before_any_rank_starts(tmp_path, arguments, expected):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine.py").write_text('def not_a_config() -> "Config":\n    return "text"\n')
    big = tmp_path / "big_tokenizer"
    shutil.copytree(TOKENIZER, big)
    content = json.loads((big / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 5000, "content": "<|far|>"})
    (big / "tokenizer.json").write_text(json.dumps(content))
    device = () if "--device" in arguments else ("--device", "cpu")
    ended = fork_app(*arguments, *device, cwd=tmp_path)
    assert ended.code == 2, ended.out
    assert expected in ended.out
    assert ended.out.count("error: ") == 1
    assert "Traceback" not in ended.out
    assert not (tmp_path / "outputs").exists()  # nothing was started, nothing was written


def test_a_mistyped_option_suggests_the_near_one(tmp_path):
    ended = fork_app("debug", "--device", "cpu", "--training.stepz", "3", cwd=tmp_path)
    assert ended.code == 2
    assert "--training.steps" in ended.out and "Traceback" not in ended.out
    assert not (tmp_path / "outputs").exists()


def test_an_untested_release_stops_unless_allowed(tmp_path, monkeypatch):
    import titan_recipes.versions as versions

    monkeypatch.setitem(versions.TESTED_MINORS, "torchtitan", "0.2")
    ended = fork_app("debug", "--device", "cpu", cwd=tmp_path)
    assert ended.code == 2
    assert "tested: 0.2.x" in ended.out and "--allow-untested" in ended.out


RECIPE = '''
from recipe_data import documents
from titan_recipes.data.loader import TextDataLoader
from qwen3_core import Qwen3Config
from titan_recipes.models.spec import native
from titan_recipes.train.trainer import Trainer
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from titan_recipes.checkpoint.manager import StepCheckpoints


def mine() -> Trainer.Config:
    """My own data."""
    return Trainer.Config(
        model_spec=native(
            Qwen3Config(
                vocab_size=2048, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                head_dim=32, intermediate_size=96, max_position_embeddings=256, rope_theta=1e6,
            ),
        ),
        hf_assets_path={tokenizer!r},
        dataloader=TextDataLoader.Config(documents=documents, holdout=0.2),
        validator=Validator.Config(enable=True, freq=2, steps=-1),
        training=TrainingConfig(local_batch_size=2, seq_len=32, steps=2),
        optimizer=default_adamw(lr=1e-3),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        activation_checkpoint=None,
        checkpoint=StepCheckpoints.Config(enable=True),
    )
'''


def test_a_recipe_outside_the_repository_trains_on_its_own_documents(tmp_path):
    # It computes, too: an OpenMP pool left in the launcher would hang the forked rank.
    compute = "import torch\n\ntorch.ones(1 << 20).sum()\n"
    (tmp_path / "mine.py").write_text(compute + RECIPE.format(tokenizer=str(TOKENIZER)))
    (tmp_path / "recipe_data.py").write_text(
        'def documents():\n    return [f"document {i} " * 20 for i in range(20)]\n'
    )
    ended = fork_app("mine.py:mine", "--device", "cpu", cwd=tmp_path)
    assert ended.code == 0, ended.out
    (run,) = (tmp_path / "outputs").iterdir()
    assert run.name.startswith("mine-")
    assert "0 missing keys, 0 unexpected" in ended.out  # untied, 2 layers
    assert (run / "checkpoint" / "step-2" / "assets" / "recipe.py").read_text() == (tmp_path / "mine.py").read_text()


def test_finite_data_ends_on_both_ranks_together_with_a_checkpoint_and_an_export(tmp_path):
    (tmp_path / "mine.py").write_text(RECIPE.format(tokenizer=str(TOKENIZER)))
    (tmp_path / "recipe_data.py").write_text(
        'def documents():\n    return [f"{i} " + "a b " * 60 for i in range(20)]\n'
    )
    ended = fork_app(
        "mine.py:mine",
        "--device",
        "cpu",
        "--nproc",
        "2",
        "--training.local_batch_size",
        "1",
        "--training.steps",
        "500",
        "--dataloader.no-infinite",
        "--metrics.log_freq",
        "1",
        "--dump_folder",
        "run",
        cwd=tmp_path,
    )
    assert ended.code == 0, ended.out
    last = max(r["step"] for r in metrics(tmp_path / "run") if "loss" in r)
    assert 1 < last < 500
    assert f"the data ended after step {last} of 500" in ended.out
    assert (tmp_path / "run" / "checkpoint" / f"step-{last}" / ".metadata").exists()
    assert "0 missing keys, 0 unexpected" in ended.out


CRASH = """
from titan_recipes.data import loader as data


def documents():
    return [f"document {i} " * 20 for i in range(20)]


class Broken(data.TextDataLoader):
    def __iter__(self):
        import os
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("planted on rank 1")
        yield from super().__iter__()
"""


def test_a_failing_rank_prints_its_own_traceback_first(tmp_path):
    recipe = RECIPE.replace(
        "from recipe_data import documents",
        "from dataclasses import dataclass\nfrom recipe_data import documents, Broken",
    )
    recipe = recipe.replace(
        "\n\ndef mine",
        """

class Loader(Broken):
    @dataclass(kw_only=True, slots=True)
    class Config(TextDataLoader.Config):
        pass


def mine""",
    ).replace("dataloader=TextDataLoader.Config", "dataloader=Loader.Config")
    (tmp_path / "mine.py").write_text(recipe.format(tokenizer=str(TOKENIZER)))
    (tmp_path / "recipe_data.py").write_text(CRASH)
    ended = fork_app("mine.py:mine", "--device", "cpu", "--nproc", "2", cwd=tmp_path)
    assert ended.code == 1, ended.out
    assert "planted on rank 1" in ended.out
    head = ended.out[ended.out.index("[rank") :]
    assert head.startswith("[rank 1 of 2] Traceback"), head
    assert "ChildFailedError" not in ended.out and "elastic_launch" not in ended.out
    assert "error: training failed on rank" in ended.out and ended.out.count("error: ") == 1


def test_torchrun_ranks_run_as_they_are(tmp_path):
    import sys

    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    os.environ.pop("OMP_NUM_THREADS", None)
    ended = run_app(
        "--device", "cpu", "--training.steps", "2", "--validator.no-enable", cwd=tmp_path, launcher=torchrun
    )
    assert ended.code == 0, ended.out
    assert len(list((tmp_path / "outputs").iterdir())) == 1  # both ranks agreed on the folder
    assert list(ended.losses) == [1, 2] and ended.out.count("step 2/2  loss") == 1
    assert "0 missing keys, 0 unexpected" in ended.out
