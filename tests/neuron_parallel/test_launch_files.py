"""Contract: generated launch files are what the engines read, start the plan's ranks with the plan's degrees, and no
others.
"""

import os
import shlex
import subprocess

import pytest
from neuron_parallel import Cluster, instance
from neuron_parallel.launch_files import check_visible_cores, degrees_as_arguments, environment, launch_files, torchrun
from plan_shapes import TRN2, plan


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


def test_no_rank_is_told_to_reserve_its_neighbours_cores():
    """A process reserves every core in NEURON_RT_VISIBLE_CORES, and the backend takes one core a rank."""
    for name in ("trn2.3xlarge", "trn2.48xlarge", "trn2-ultraserver"):
        assert "NEURON_RT_VISIBLE_CORES" not in environment(Cluster(instance(name)))


def test_a_pod_has_shared_memory_locked_memory_and_the_folder_that_hosts_share():
    """AWS's samples mount memory at /dev/shm and ask for IPC_LOCK; caches and checkpoints are one for all pods."""
    text = launch_files(plan(64 * 4, dp_shard=256), Cluster(instance("trn2.48xlarge"), 4), ("train",))[
        "pytorchjob.yaml"
    ]
    for pod in text.split("replicas:")[1:]:
        assert "{name: shm, mountPath: /dev/shm}" in pod and "{name: shm, emptyDir: {medium: Memory}}" in pod
        assert "add: [IPC_LOCK]" in pod and "hugepages-2Mi" in pod
        assert "{name: shared, mountPath: /shared}" in pod and '"/shared/neuron-cache"' in pod


def test_the_first_host_of_thousands_is_found_under_pipefail(tmp_path):
    script = launch_files(plan(64 * 4, dp_shard=256), Cluster(instance("trn2.48xlarge"), 4), ("train",))["job.sbatch"]
    lines = [line for line in script.splitlines() if not line.startswith("srun")]
    (tmp_path / "scontrol").write_text('#!/bin/bash\nfor i in $(seq 2000); do echo "host$i"; done\n')
    (tmp_path / "scontrol").chmod(0o755)
    found = subprocess.run(
        ["bash", "-c", "\n".join([*lines, 'echo "$HEAD_NODE"'])],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "host[1-2000]", "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "host1\n"
    assert "#SBATCH --requeue" in script and "| head" not in script


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


def test_a_job_of_many_hosts_finds_its_first(tmp_path):
    """Piped into `head`, a list longer than a pipe's buffer ended the job with 141."""
    cluster = Cluster(instance("trn2.48xlarge"), 4)
    job = launch_files(plan(256), cluster, ("train",))["job.sbatch"]
    (tmp_path / "scontrol").write_text("#!/bin/bash\nfor n in $(seq 20000); do echo host-$n; done\n")
    (tmp_path / "srun").write_text('#!/bin/bash\necho "$HEAD_NODE of $JOB_ID"\n')
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    started = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "host-[1-20000]", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-c", job], env=started, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "host-1 of 7\n", "")


def test_a_plan_of_another_size_and_a_bad_name_are_refused():
    with pytest.raises(ValueError, match="64 cores, the cluster has 256"):
        launch_files(plan(64), Cluster(instance("trn2.48xlarge"), 4), ("train",))
    with pytest.raises(ValueError, match="lower-case"):
        launch_files(plan(64), TRN2, ("train",), name="Big Job")


def test_visible_cores_are_as_many_as_ranks():
    assert check_visible_cores("0-3", 4) == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="4 cores for 8 ranks"):
        check_visible_cores("0-3", 8)
