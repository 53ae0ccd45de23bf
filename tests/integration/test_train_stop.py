"""Contract: a signal in mid-step ends a run with one complete checkpoint and the command that continues it; kill -9
never leaves a checkpoint that is taken for whole."""

import random
import re
import shlex
import signal
import time

import pytest
from titan_recipes.checkpoint.manager import complete_steps

from integration.app import ForkedApp, fork_app, metrics

LONG = (
    "debug",
    "--device",
    "cpu",
    "--training.steps",
    "200",
    "--metrics.log_freq",
    "1",
    "--checkpoint.interval",
    "1000",
    "--validator.no-enable",
    "--training.local_batch_size",
    "2",
)
STAGES = (
    "--nproc",
    "2",
    "--parallelism.pipeline_parallel_degree",
    "2",
    "--model",
    "debug-moe",
    "--training.seq_len",
    "64",
)
CASES = [
    pytest.param("group", signal.SIGINT, ("--nproc", "2"), id="ctrl-c-2-ranks"),
    pytest.param("launcher", signal.SIGTERM, ("--nproc", "1"), id="sigterm-1-rank"),
    pytest.param("group", signal.SIGINT, ("--nproc", "1"), id="ctrl-c-1-rank", marks=pytest.mark.soak),
    pytest.param("launcher", signal.SIGTERM, ("--nproc", "2"), id="sigterm-2-ranks", marks=pytest.mark.soak),
    pytest.param(
        "launcher", signal.SIGINT, ("--nproc", "2"), id="sigint-to-the-launcher-alone", marks=pytest.mark.soak
    ),
    pytest.param("launcher", signal.SIGTERM, STAGES, id="sigterm-2-stages", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("target", "number", "ranks"), CASES)
def test_a_signal_leaves_one_complete_checkpoint_and_says_how_to_go_on(tmp_path, target, number, ranks):
    app = ForkedApp(*LONG, *ranks, cwd=tmp_path)
    app.wait_for(r"step +3/200")
    time.sleep(0.1)  # into the next step
    (app.signal_group if target == "group" else app.signal_launcher)(number)
    ended = app.end()
    assert ended.code == 128 + number, ended.out
    assert "Traceback" not in ended.out
    (run,) = (tmp_path / "outputs").iterdir()
    (step,) = complete_steps(run / "checkpoint")
    assert re.search(rf"stopped by SIG(INT|TERM) after step {step}\.", ended.out)
    command = re.search(r"to go on:  uv run apps/train (.*)", ended.out)
    assert command is not None, ended.out
    arguments = shlex.split(command[1])
    assert arguments.count("--resume") == 1
    more = fork_app(*arguments, "--training.steps", str(step + 2), "--lr_scheduler.warmup_steps", "0", cwd=tmp_path)
    assert more.code == 0, more.out
    assert [r["step"] for r in metrics(run) if "loss" in r] == list(range(1, step + 3))  # no gap, no repetition


def kill_while_saving(tmp_path, seed):
    chance = random.Random(seed)
    arguments = (
        *LONG,
        "--dump_folder",
        "run",
        "--checkpoint.interval",
        "2",
        "--checkpoint.keep_latest_k",
        "2",
        "--resume",
    )
    app = ForkedApp(*arguments, cwd=tmp_path)
    app.wait_for(r"step +\d+/200")
    time.sleep(chance.uniform(0.0, 3.0))
    app.signal_group(signal.SIGKILL)
    app.process.join()
    before = complete_steps(tmp_path / "run" / "checkpoint")
    more = ForkedApp(*arguments, cwd=tmp_path)
    more.wait_for(r"step +\d+/200")
    more.signal_group(signal.SIGKILL)
    more.process.join()
    expected = f"resumed from run/checkpoint/step-{before[-1]}" if before else "random initialisation"
    assert expected in more.out
    steps = [r["step"] for r in metrics(tmp_path / "run") if "loss" in r]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize("seed", range(2))
def test_kill_9_lands_on_the_previous_complete_step(tmp_path, seed):
    kill_while_saving(tmp_path, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 22))
def test_kill_9_lands_on_the_previous_complete_step_for_20_seeds(tmp_path, seed):
    kill_while_saving(tmp_path, seed)


def test_foreign_and_partial_folders_are_neither_resumed_from_nor_deleted(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoint"
    foreign = ["step-10.tmp", "step-abc", "my-step-3", "notes"]
    for name in foreign:
        (checkpoint / name).mkdir(parents=True)
        (checkpoint / name / ".metadata").write_bytes(b"not a checkpoint")
    (checkpoint / "notes.txt").write_text("mine")
    (checkpoint / "step-99").mkdir()  # killed before .metadata
    (checkpoint / "step-99" / "__0_0.distcp").write_bytes(b"half")
    ended = fork_app(
        *LONG,
        "--training.steps",
        "4",
        "--checkpoint.interval",
        "1",
        "--checkpoint.keep_latest_k",
        "2",
        "--resume",
        "--dump_folder",
        "run",
        "--lr_scheduler.warmup_steps",
        "0",
        cwd=tmp_path,
    )
    assert ended.code == 0, ended.out
    assert "random initialisation" in ended.out
    assert "step-99 is not a complete checkpoint: ignored" in ended.out and "step-10.tmp" in ended.out
    assert complete_steps(checkpoint) == [3, 4]
    assert all((checkpoint / name).exists() for name in [*foreign, "notes.txt", "step-99"])
