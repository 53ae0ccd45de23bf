"""Contract: a run's folder has one history.

Going back sets later steps aside, a damaged step is skipped by name, a stop right after a resume saves nothing anew,
and two starts never share a folder.
"""

import signal
import threading

import pytest
from titan_recipes.checkpoint.steps import complete_steps, step_folder

from integration.app import ForkedApp, fork_app, metrics

SHORT = (
    "debug", "--device", "cpu", "--metrics.log_freq", "1", "--validator.no-enable", "--training.local_batch_size", "1",
    "--training.seq_len", "64", "--lr_scheduler.warmup_steps", "0", "--dump_folder", "run",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Steps 2, 4, 6 and 8 of a finished run."""
    folder = tmp_path_factory.mktemp("history")
    steps = ("--training.steps", "8", "--checkpoint.interval", "2", "--checkpoint.keep_latest_k", "0")
    ended = fork_app(*SHORT, *steps, cwd=folder)
    assert ended.code == 0, ended.out
    assert complete_steps(folder / "run" / "checkpoint") == [2, 4, 6, 8]
    return folder


def test_a_run_that_went_back_leaves_the_later_steps_aside_and_publishes_its_own(folder):
    """Cases 207: hf/ had the left history's weights, and the next --resume returned to it."""
    checkpoint = folder / "run" / "checkpoint"
    back = ("--resume", "--checkpoint.load_step", "4", "--training.steps", "5")
    ended = fork_app(*SHORT, *back, "--checkpoint.interval", "2", cwd=folder)
    assert ended.code == 0, ended.out
    assert complete_steps(checkpoint) == [2, 4, 5]
    assert "step-6, step-8: set aside in run/checkpoint/rolled-back-" in ended.out
    (aside,) = checkpoint.glob("rolled-back-*")
    assert complete_steps(aside) == [6, 8]
    assert "run/checkpoint/step-5" in ended.out and "step-8\n" not in ended.out.partition("set aside")[2]
    assert [r["step"] for r in metrics(folder / "run") if "loss" in r] == [1, 2, 3, 4, 5]


def test_a_damaged_newest_step_is_skipped_by_name_and_strict_resume_stops(folder):
    """Cases 213, 225: the newest step was cut, and every restart ended in exit 1 though older ones were good."""
    checkpoint = folder / "run" / "checkpoint"
    shard = step_folder(checkpoint, 5) / "__0_0.distcp"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:1000])
    more = ("--resume", "--training.steps", "6", "--checkpoint.interval", "100")
    strict = fork_app(*SHORT, *more, "--strict-resume", cwd=folder)
    assert strict.code == 1 and "step-5 is damaged: __0_0.distcp has 1,000 bytes" in strict.out, strict.out
    ended = fork_app(*SHORT, *more, cwd=folder)
    assert ended.code == 0, ended.out
    assert "skipped: run/checkpoint/step-5 is damaged" in ended.out
    assert "resumed from run/checkpoint/step-4" in ended.out
    target = step_folder(checkpoint, 6) / "__0_0.distcp"
    data = bytearray(target.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 500] = b"x" * 500
    target.write_bytes(data)
    again = ("--resume", "--training.steps", "7", "--checkpoint.resume_check", "checksum", "--checkpoint.interval", "9")
    ended = fork_app(*SHORT, *again, cwd=folder)
    assert ended.code == 0 and "step-6 is damaged: bytes" in ended.out, ended.out


def test_a_stop_right_after_a_resume_saves_nothing_anew(folder):
    """Case 208: the only good step was removed before it was written again."""
    checkpoint = folder / "run" / "checkpoint"
    newest = complete_steps(checkpoint)[-1]
    before = {file: file.stat().st_mtime_ns for file in step_folder(checkpoint, newest).rglob("*")}
    app = ForkedApp(*SHORT, "--resume", "--training.steps", "500", "--checkpoint.interval", "1000", cwd=folder)
    app.wait_for("weights: resumed")
    app.signal_launcher(signal.SIGTERM)
    ended = app.end()
    assert ended.code == 128 + signal.SIGTERM, ended.out
    after = {file: file.stat().st_mtime_ns for file in step_folder(checkpoint, newest).rglob("*")}
    assert after == before


def test_two_starts_never_share_a_folder(folder):
    """Case 224: both ended with exit code 0 and their files were mixed."""
    app = ForkedApp(*SHORT, "--resume", "--training.steps", "500", "--checkpoint.interval", "1000", cwd=folder)
    app.wait_for(r"step +\d+/500")
    second = fork_app(*SHORT, "--resume", "--training.steps", "500", cwd=folder)
    assert second.code == 2 and "run is in use by process" in second.out, second.out
    app.signal_group(signal.SIGKILL)
    app.process.join()
    names: list[str] = []

    def start() -> None:
        fresh = [a for a in SHORT if a not in ("--dump_folder", "run")]
        names.extend(
            line
            for line in fork_app(*fresh, "--training.steps", "1", cwd=folder).out.splitlines()
            if "run folder" in line
        )

    starts = [threading.Thread(target=start) for _ in range(2)]
    for thread in starts:
        thread.start()
    for thread in starts:
        thread.join()
    assert len(names) == len(set(names)) == 2
