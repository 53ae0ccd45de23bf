"""Contract: generated launch files are what the engines read, start the plan's ranks with the plan's degrees, and no
others.
"""

import json
import os
import shlex
import subprocess
import sys

import pytest
from neuron_parallel import Cluster, instance
from neuron_parallel.cli import main
from neuron_parallel.launch_files import degrees_as_arguments, environment, launch_files, torchrun
from plan_shapes import QWEN3_8B, TRN2, plan

CONFIG = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def test_one_node_runs_standalone_with_a_rank_a_core():
    words = shlex.split(torchrun(TRN2, ("apps/train", "qwen3_8b")))
    assert words[:4] == ["torchrun", "--standalone", "--nproc-per-node", "64"] and words[-2:] == [
        "apps/train",
        "qwen3_8b",
    ]


def test_several_nodes_meet_at_the_first():
    words = torchrun(Cluster(instance("trn2.48xlarge"), 4), ("train",))
    assert "--nnodes 4" in words and '--rdzv-endpoint "$HEAD_NODE:29500"' in words and "--nproc-per-node 64" in words


def test_an_ultraserver_is_four_hosts():
    assert "--nnodes 4" in torchrun(Cluster(instance("trn2-ultraserver")), ("train",))
    assert environment(Cluster(instance("trn2-ultraserver")))["NEURON_RT_VISIBLE_CORES"][0] == "0-63"


def test_degrees_become_torchtitans_options():
    words = degrees_as_arguments(plan(64, tp=4, dp_replicate=2, micro_batch=2))
    assert words[-1] == "--parallelism.enable-sequence-parallel"
    given = dict(zip(words[:-1:2], words[1::2], strict=True))
    assert given["--parallelism.tensor_parallel_degree"] == "4"
    # A recipe may have other degrees: those that are 1 are said too.
    assert given["--parallelism.expert_parallel_degree"] == given["--parallelism.pipeline_parallel_degree"] == "1"
    assert given["--parallelism.data_parallel_shard_degree"] == "8"
    assert given["--training.local_batch_size"] == "2" and given["--training.global_batch_size"] == "32"
    piped = degrees_as_arguments(plan(64, pp=4, dp_shard=16, global_batch=128))
    assert piped[piped.index("--training.local_batch_size") + 1] == "8"


@pytest.mark.parametrize("nodes", [1, 4])
def test_scripts_are_valid_shell(tmp_path, nodes):
    cluster = Cluster(instance("trn2.48xlarge"), nodes)
    files = launch_files(plan(64 * nodes, tp=4), cluster, ("apps/train", "a recipe; with $(quotes)"))
    assert set(files) == {"env.sh", "run.sh", "bind.sh", "job.sbatch", "pytorchjob.yaml"}
    for name, text in files.items():
        if not name.endswith(".yaml"):
            (tmp_path / name).write_text(text)
            subprocess.run(["bash", "-n", str(tmp_path / name)], check=True)
    shown = subprocess.run(
        [
            "bash",
            "-c",
            "set -e; torchrun() { printf '%s\\n' \"$@\"; }; export -f torchrun; HEAD_NODE=h JOB_ID=1 bash run.sh",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert "a recipe; with $(quotes)" in shown and "--parallelism.tensor_parallel_degree" in shown


def test_files_in_a_folder_start_from_where_they_were_planned(tmp_path):
    files = launch_files(plan(64), TRN2, ("apps/train", "x"), folder="my launch")
    (tmp_path / "my launch").mkdir()
    for name, text in files.items():
        (tmp_path / "my launch" / name).write_text(text)
    shown = subprocess.run(
        ["bash", "-c", "set -e; torchrun() { printf '%s\\n' \"$@\"; }; export -f torchrun; bash 'my launch/run.sh'"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert (tmp_path / shown[shown.index("--no-python") + 1]).is_file() and "apps/train" in shown
    assert "bash 'my launch/run.sh'" in files["job.sbatch"] and '"my launch/bind.sh"' in files["pytorchjob.yaml"]


def test_bind_runs_each_rank_beside_its_chip(tmp_path):
    text = launch_files(plan(64), TRN2, ("train",))["bind.sh"].replace("exec taskset --cpu-list", "echo")
    (tmp_path / "bind.sh").write_text(text)
    cpus = [
        subprocess.run(
            ["sh", str(tmp_path / "bind.sh"), "x"],
            env={**os.environ, "LOCAL_RANK": str(rank)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()[0]
        for rank in (0, 15, 16, 47, 48, 63)
    ]
    assert cpus == ["48-95,144-191"] * 2 + ["0-47,96-143"] * 2 + ["48-95,144-191"] * 2


def test_slurm_asks_for_the_nodes_and_kubernetes_for_the_chips():
    files = launch_files(plan(256, tp=4), Cluster(instance("trn2.48xlarge"), 4), ("train",))
    assert "#SBATCH --nodes=4" in files["job.sbatch"] and "srun" in files["job.sbatch"]
    assert "replicas: 3" in files["pytorchjob.yaml"] and "aws.amazon.com/neuron: 16" in files["pytorchjob.yaml"]


def test_a_plan_of_another_size_and_a_bad_name_are_refused():
    with pytest.raises(ValueError, match="64 cores, the cluster has 256"):
        launch_files(plan(64), Cluster(instance("trn2.48xlarge"), 4), ("train",))
    with pytest.raises(ValueError, match="lower-case"):
        launch_files(plan(64), TRN2, ("train",), name="Big Job")


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
    code = (
        "import sys, neuron_parallel.cli, neuron_parallel.launch_files, neuron_parallel.mesh, "
        "neuron_parallel.memory.figure; print({'torch', 'numpy', 'matplotlib'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "set()"
    assert QWEN3_8B.parameters == 8_190_735_360
