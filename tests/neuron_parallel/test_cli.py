"""Contract: the command says what works and fits, writes what is asked for, answers a wrong request in one line."""

import json
import subprocess
import sys

import pytest
from neuron_parallel.cli import main
from plan_shapes import QWEN3_8B

CONFIG = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip


def test_the_command_prints_a_table_and_writes_its_files(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    png, launch = tmp_path / "memory.png", tmp_path / "launch"
    arguments = [
        str(tmp_path),
        "--fix",
        "tp=4",
        "--formulas",
        "--figure",
        str(png),
        "--launch",
        str(launch),
        "--",
        "apps/train",
        "x",
    ]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert (
        "8.19 billion parameters" in out
        and "fastest first (modelled)" in out
        and "72*p(layer)*p" in out
        and "fits" in out
    )
    run_sh = (launch / "run.sh").read_text()
    assert png.read_bytes()[:4] == b"\x89PNG" and "apps/train x" in run_sh
    assert "planned with checkpointing none, attention flash, loss_chunks 1, dispatcher gather" in run_sh
    assert not list(tmp_path.rglob(".*.part"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--instance", "trn1.32xlarge"], "not in the table"),
        (["--cores", "24"], "allowed at LNC=2"),
        (["--fix", "tensor=4"], "known names"),
        (["--fix", "tp=four"], "whole number"),
        (["--launch", "x"], "needs the training script"),
        (["--launch", "config.json", "--", "train"], "config.json"),
        (["--figure", "config.json/x.png"], "config.json"),
    ],
)
def test_a_wrong_request_is_one_clear_line(tmp_path, monkeypatch, capsys, arguments, said):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    assert main([str(tmp_path), "--fix", "pp=1", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1]", "holds list"),
        ("{", "is not JSON"),
        (json.dumps({**CONFIG, "num_hidden_layers": "36"}), "num_hidden_layers is '36'"),
        (json.dumps({**CONFIG, "model_type": "llama"}), "'llama'"),
        (json.dumps({"model_type": "qwen3"}), "has no vocab_size"),
    ],
)
def test_a_config_that_is_none_is_one_clear_line(tmp_path, capsys, content, said):
    (tmp_path / "config.json").write_text(content)
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize("fix", [("--fix", "tp=4", "dp_shard=16"), ("--fix", "tp=4", "--fix", "dp_shard=16")])
def test_degrees_are_held_one_by_one_or_together_and_the_model_may_follow(tmp_path, capsys, fix):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main([*fix, str(tmp_path)]) == 0
    assert "The first: dp_shard=16 tp=4\n" in capsys.readouterr().out


def test_an_impossible_degree_is_explained_with_every_reason(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main([str(tmp_path), "--fix", "tp=3"]) == 1
    out = capsys.readouterr().out
    assert "tp 3 does not divide num_attention_heads 32; 2 or 4 would" in out


def test_planning_loads_no_torch():
    modules = ("cli", "launch_files", "mesh", "memory.figure")
    imports = ", ".join(f"neuron_parallel.{name}" for name in modules)
    code = f"import sys, {imports}; print({{'torch', 'numpy', 'matplotlib'}} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "set()"
    assert QWEN3_8B.parameters == 8_190_735_360
