"""Contract: the command says what works and fits, writes what is asked for, answers a wrong request in one line."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from neuron_parallel import core_memory
from neuron_parallel.cli import main, memory_table
from neuron_parallel.memory import device_allowance
from plan_shapes import QWEN3_8B, TRN2, plan

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


@pytest.mark.parametrize("name", ["8B", "8b", "Qwen3-8B", "qwen/qwen3-8b", "Qwen/Qwen3-8B"])
def test_a_model_is_known_by_its_short_name_and_its_hub_id_in_any_case(name, capsys):
    assert main([name, "--fix", "tp=4", "pp=1", "cp=1", "dp_replicate=1"], {"8B": CONFIG}) == 0
    assert "8.19 billion" in capsys.readouterr().out


def test_no_loss_chunks_are_refused_in_words(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main([str(tmp_path), "--loss-chunks", "0"]) == 1
    assert "loss_chunks is 0; expected an integer >= 1" in capsys.readouterr().out


def test_a_figure_of_another_format_and_a_wrong_file_are_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main([str(tmp_path), "--figure", "m.txt"]) == 2
    assert "m.txt: a PNG is written" in capsys.readouterr().err
    (tmp_path / "llama.json").write_text(json.dumps({**CONFIG, "model_type": "llama"}))
    assert main([str(tmp_path / "llama.json")]) == 2
    assert "llama.json" in capsys.readouterr().err


def test_a_reader_that_has_read_enough_is_no_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code = f"import sys; from neuron_parallel.cli import main; sys.exit(main([{str(tmp_path)!r}, '--top', '200']))"
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    run.stdout.close()
    assert (run.wait(), run.stderr.read()) == (0, b"")


@pytest.mark.parametrize(
    ("times", "said"),
    [(1.2, "GiB: fits\n"), (1.05, "GiB: fits only within the model's error of 10%\n"), (0.95, "DOES NOT FIT\n")],
)
def test_a_plan_within_the_models_error_is_not_called_fitting(times, said):
    """A core whose room for tensors is so many times the largest moment."""
    report = core_memory(plan(64, tp=4), QWEN3_8B)
    core = report.peak.bytes * times * TRN2.hbm_bytes / (TRN2.hbm_bytes - device_allowance(TRN2))
    chip = replace(TRN2.instance.chip, hbm_bytes=int(core * 4))
    cluster = replace(TRN2, instance=replace(TRN2.instance, chip=chip))
    assert said in memory_table(report, cluster) + "\n"
