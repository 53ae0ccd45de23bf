"""Contract of apps/train on its routes: any recipe runs on each, from any model, and back to a Hugging Face folder;
what would run a folder's code, or train on a NaN, is stopped."""

import gzip
import json
import math
import re
import shutil

import pytest
from hf_ckpt_adapter import convert_checkpoint
from qwen3_core import MODELS

from integration.app import ROOT, fork_app, metrics

QUICK = (
    "debug",
    "--device",
    "cpu",
    "--training.seq_len",
    "128",
    "--training.local_batch_size",
    "2",
    "--metrics.log_freq",
    "1",
    "--lr_scheduler.warmup_steps",
    "0",
    "--dump_folder",
    "run",
)


def test_a_mixture_of_experts_trains_through_transformers_on_two_ranks_resumes_and_exports(tmp_path):
    moe = (
        *QUICK,
        "--training.seq_len",
        "64",
        "--model",
        "debug-moe",
        "--route",
        "transformers",
        "--nproc",
        "2",
        "--validator.no-enable",
        "--parallelism.data_parallel_shard_degree",
        "2",
        "--checkpoint.interval",
        "4",
        "--profile",
    )
    ended = fork_app(*moe, "--training.steps", "4", cwd=tmp_path)
    assert ended.code == 0, ended.out
    first = metrics(tmp_path / "run")[0]["loss"]
    assert f"first loss {first:.4f}; a random model of these sizes has" in ended.out
    assert first == pytest.approx(math.log(2048), abs=0.2)
    assert "0 missing keys, 0 unexpected" in ended.out and "WRONG EXPORT" not in ended.out
    config = json.loads((tmp_path / "run" / "hf" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"] and config["num_experts"] == 16
    for rank in range(2):
        trace = json.loads(gzip.decompress((tmp_path / "run" / "profile" / f"rank-{rank}.json.gz").read_bytes()))
        assert any("scaled_dot_product" in event["name"] for event in trace["traceEvents"] if "name" in event)
    more = fork_app(*moe, "--training.steps", "6", "--resume", "--checkpoint.load_only", cwd=tmp_path)
    assert more.code == 0, more.out
    assert "no trace was written: this process ended before its step 4" in more.out
    assert "resumed from run/checkpoint/step-4" in more.out and list(more.losses) == [5, 6]
    other = fork_app(
        *QUICK,
        "--model",
        "run/checkpoint/step-4",
        "--route",
        "native",
        "--training.steps",
        "1",
        "--validator.no-enable",
        "--checkpoint.load_only",
        "--dump_folder",
        "other",
        cwd=tmp_path,
    )
    assert other.code == 0, other.out
    assert other.losses[1] < first - 0.1  # these weights, on the other route
    swaps = [(tmp_path / run / "logs" / "rank-0.log").read_text() for run in ("run", "other")]
    assert "titan_recipes.models.transformers.SDPAKernel for HFFlexKernel" in swaps[0]
    assert "titan_recipes.models.attention.SDPAttention for torchtitan" in swaps[1]
    for text in swaps:  # each names what it stands for
        assert "titan_recipes.moe.layer.SameDtypeExperts for torchtitan.models.common.moe.GroupedExperts" in text
        assert "titan_recipes.moe.layer.Float32Linear for torchtitan.models.common.linear.Linear" in text


@pytest.mark.parametrize(("layout", "route"), [("native", "native"), ("backend", "transformers")])
def test_a_converted_mixture_of_experts_trains(tmp_path, layout, route):
    """Case 221: a conversion adds zero expert biases, which a recipe without load balancing has no buffer for."""
    moe = (*QUICK, "--model", "debug-moe", "--validator.no-enable", "--checkpoint.load_only", "--training.steps", "1")
    assert fork_app(*moe, "--checkpoint.no-load_only", "--dump_folder", "first", cwd=tmp_path).code == 0
    convert_checkpoint(tmp_path / "first" / "hf", tmp_path / "converted", layout)
    ways = {"a": ("--model", "converted"), "b": ("--checkpoint.initial_load_path", str(tmp_path / "converted"))}
    for run, model in ways.items():
        ended = fork_app(*moe, "--route", route, *model, "--dump_folder", run, cwd=tmp_path)
        assert ended.code == 0, ended.out
        assert "weights: loaded from" in ended.out


def test_both_modes_take_the_same_steps_and_stay_together(tmp_path):
    ended = fork_app(
        *QUICK,
        "--compare-modes",
        "--training.steps",
        "3",
        "--compile.backend",
        "aot_eager",
        "--route",
        "transformers",
        cwd=tmp_path,
    )
    assert ended.code == 0, ended.out
    assert "together: no loss differs" in ended.out
    assert re.search(r"graphs compiled on a rank: eager 0, compiled [1-9]", ended.out)
    eager, compiled = (metrics(tmp_path / "run" / mode) for mode in ("eager", "compiled"))
    assert [r["step"] for r in eager] == [r["step"] for r in compiled] == [1, 2, 3]
    assert not list((tmp_path / "run").rglob("*.distcp"))  # nothing was saved


@pytest.fixture
def trap(tmp_path):
    """A model folder whose config.json names code of its own, which leaves a mark when it runs."""
    folder = tmp_path / "trap"
    shutil.copytree(ROOT / "recipes" / "debug_tokenizer", folder)
    mark = tmp_path / "it-ran"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n\n\nclass Config:\n    pass\n")
    config = MODELS["debug"].to_hf() | {"auto_map": {"AutoConfig": "evil.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    yield folder
    assert not mark.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "trap"),
        ("--model", "trap", "--route", "transformers"),
        ("--hf_assets_path", "trap"),
        ("--checkpoint.initial_load_path", "{trap}", "--checkpoint.initial_load_in_hf"),
    ],
    ids=["native", "transformers", "tokenizer", "weights"],
)
def test_a_folder_with_auto_map_is_refused_before_anything_reads_it(trap, tmp_path, arguments):
    ended = fork_app(*QUICK, *(a.format(trap=trap) for a in arguments), cwd=tmp_path)
    assert ended.code == 2, ended.out
    assert "has auto_map" in ended.out and "Traceback" not in ended.out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "layout", [(), ("--nproc", "2", "--parallelism.pipeline_parallel_degree", "2")], ids=["alone", "pp2"]
)
def test_a_nan_batch_stops_the_run_with_its_step_and_is_not_saved(tmp_path, monkeypatch, layout):
    """The last stage alone sees it with pipeline parallel, and the others are told."""
    from titan_recipes.models.attention import MaskedQwen3Model
    from titan_recipes.train.trainer import Trainer

    forward, step, now = MaskedQwen3Model.forward, Trainer.train_step, []

    def remember(self, data):
        now[:] = [self.step]
        step(self, data)

    def planted(self, *args, **kwargs):
        return forward(self, *args, **kwargs) * (math.nan if self.lm_head is not None and now == [3] else 1.0)

    monkeypatch.setattr(Trainer, "train_step", remember)
    monkeypatch.setattr(MaskedQwen3Model, "forward", planted)
    ended = fork_app(
        *QUICK,
        "--model",
        "debug-moe",
        "--training.steps",
        "8",
        "--metrics.log_freq",
        "8",
        "--checkpoint.interval",
        "2",
        "--validator.no-enable",
        *layout,
        cwd=tmp_path,
    )
    assert ended.code == 1, ended.out
    assert "The loss of step 3 is not finite" in ended.out and "Traceback" not in ended.out
    assert [p.name for p in (tmp_path / "run" / "checkpoint").glob("step-*/.metadata")] == [".metadata"]
    assert (tmp_path / "run" / "checkpoint" / "step-2" / ".metadata").exists()


def test_an_unknown_route_and_a_recipe_without_one_are_one_error_each(tmp_path):
    ended = fork_app(*QUICK, "--route", "native2", cwd=tmp_path)
    assert ended.code == 2 and "choose one of native, transformers" in ended.out
    ended = fork_app(
        "torchtitan.models.qwen3.config_registry:qwen3_debugmodel", "--device", "cpu", "--route", "native", cwd=tmp_path
    )
    assert ended.code == 2 and "has no route to change" in ended.out
