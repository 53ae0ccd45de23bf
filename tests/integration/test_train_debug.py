"""Contract of the front page: `uv run apps/train` trains on real text, beats counting, and leaves what it says it
leaves.

One run of the default recipe in a fresh process; every test looks at what it left.
"""

import argparse
import inspect
import json
import math
import shutil
import subprocess
import sys

import pytest

from integration.app import APP, fork_app, metrics, run_app


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    ended = run_app("--device", "cpu", cwd=folder)
    assert ended.code == 0, ended.out
    (run,) = (folder / "outputs").iterdir()
    return ended, run


def test_the_loss_starts_at_ln_v_and_ends_half_a_nat_under_the_unigram(trained):
    ended, run = trained
    records = metrics(run)
    vocab = json.loads((run / "hf" / "config.json").read_text())["vocab_size"]
    assert records[0]["loss"] == pytest.approx(math.log(vocab), abs=0.15)
    validation = [r["validation_loss"] for r in records if "validation_loss" in r][-1]
    unigram = float(next(line.split()[-1] for line in ended.out.splitlines() if "unigram, add-one" in line))
    bigram = float(next(line.split()[-1] for line in ended.out.splitlines() if "bigram, interpolated" in line))
    assert bigram < unigram < math.log(vocab)
    assert validation <= unigram - 0.5


def test_the_folder_reloads_in_transformers_with_equal_logits(trained):
    ended, _ = trained
    line = next(line for line in ended.out.splitlines() if "reloaded in Transformers" in line)
    assert "0 missing keys, 0 unexpected" in line
    assert float(line.split()[-1]) <= 1e-4


def test_a_person_can_read_the_progress(trained):
    ended, _ = trained
    assert "tok/s" in ended.out and "GiB" in ended.out and " left" in ended.out
    assert "mfu" not in ended.out.lower() and "tflops" not in ended.out.lower()
    assert "Traceback" not in ended.out and "WARNING" not in ended.out
    assert ended.out.count("step   1/") == 2  # one training line, one validation line: one rank prints


def test_metrics_tensorboard_and_curve_are_written(trained):
    _, run = trained
    records = [r for r in metrics(run) if "loss" in r]
    assert [r["step"] for r in records][:3] == [1, 10, 20]
    assert all(r["tokens_per_second"] > 0 and r["memory_gib"] > 0.05 and "mfu_percent" not in r for r in records)
    assert any((run / "tb").rglob("events.out.tfevents.*"))
    assert (run / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_any_step_exports_from_its_folder_alone(trained, tmp_path):
    _, run = trained
    steps = sorted((run / "checkpoint").glob("step-*"))
    assert len(steps) >= 2
    step = tmp_path / steps[0].name
    shutil.copytree(steps[0], step)
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "recipe.py",
        "recipe.json",
    } <= {p.name for p in (step / "assets").iterdir()}
    code = f"from hf_ckpt_adapter import export_step; export_step({str(step)!r}, {str(tmp_path / 'hf')!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    from safetensors import safe_open

    with (
        safe_open(tmp_path / "hf" / "model.safetensors", "pt") as early,
        safe_open(run / "hf" / "model.safetensors", "pt") as late,
    ):
        assert set(early.keys()) == set(late.keys())
        name = "model.layers.0.self_attn.q_proj.weight"
        assert not (early.get_tensor(name) == late.get_tensor(name)).all()  # it is that step's weights


def test_the_tokenizer_in_the_folder_gives_transformers_the_ids_that_were_trained_on(trained):
    _, run = trained
    from titan_recipes.data.documents import python_docs
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from transformers import AutoTokenizer

    theirs, ours = (
        AutoTokenizer.from_pretrained(run / "hf"),
        HuggingFaceTokenizer(tokenizer_path=str(run / "hf")),
    )
    for text in (*python_docs()[:20], "Häuser, 1234 ≠ 'x'\n\n\tdef f(): ...  <|im_end|>"):
        assert theirs(text).input_ids == ours.encode(text, add_bos=False, add_eos=False)
    assert theirs.eos_token == "<|endoftext|>"
    chat = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_starting_again_in_a_used_folder_is_refused_with_the_two_ways_on(trained):
    _, run = trained
    ended = run_app("--device", "cpu", "--dump_folder", str(run), cwd=run.parent)
    assert ended.code == 2
    assert "already holds a checkpoint of step" in ended.out and "--resume" in ended.out


def test_a_fine_tune_of_the_folder_on_the_other_route_lowers_validation_loss_and_reloads(trained, tmp_path):
    _, run = trained
    corpus = tmp_path / "corpus"  # another kind of text: the standard library's own source
    corpus.mkdir()
    for module in (argparse, inspect, shutil, subprocess):
        text = inspect.getsource(module)
        for begin in range(0, 60_000, 4_000):
            (corpus / f"{module.__name__}-{begin}.txt").write_text(text[begin : begin + 4_000])
    ended = fork_app(
        "debug",
        "--device",
        "cpu",
        "--model",
        str(run / "hf"),
        "--route",
        "transformers",
        "--dataloader.dataset_path",
        str(corpus),
        "--training.steps",
        "12",
        "--training.local_batch_size",
        "2",
        "--lr_scheduler.warmup_steps",
        "0",
        "--dump_folder",
        "tuned",
        cwd=tmp_path,
    )
    assert ended.code == 0, ended.out
    assert f"weights: loaded from {run / 'hf'}" in ended.out
    before, *_, after = [r["validation_loss"] for r in metrics(tmp_path / "tuned") if "validation_loss" in r]
    assert after < before - 0.1  # after the first step, after the last
    assert "0 missing keys, 0 unexpected" in ended.out and "WRONG EXPORT" not in ended.out
    config = json.loads((tmp_path / "tuned" / "hf" / "config.json").read_text())
    assert config["head_dim"] == 64 and config["tie_word_embeddings"] is True


@pytest.mark.parametrize("flag", ["--help", "--list"])
def test_help_and_list_import_nothing_heavy(flag):
    code = f"""
import runpy, sys
sys.argv = ["apps/train", {flag!r}]
try:
    runpy.run_path({str(APP)!r}, run_name="__main__")
except SystemExit as end:
    assert not end.code
print(sorted(m for m in sys.modules if m.split(".")[0] in ("torch", "torchtitan", "transformers", "numpy", "datasets")))
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.splitlines()[-1] == "[]"
