"""Contract of staging.py: a folder appears whole or not at all, an interrupted conversion goes on where it stopped, and
kill -9 at any moment leaves the old export or the new one. (Cases 063, 067, 069.)"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hf_ckpt_adapter import Options, open_source
from hf_ckpt_adapter import convert_checkpoint as convert
from hf_ckpt_adapter.formats import staging as publish
from hf_ckpt_adapter.formats.staging import Staging, read_marker
from hf_ckpt_adapter.verify import verify
from hf_tiny import config, equal, state, write_hub
from safetensors.torch import load_file

SMALL = Options(max_shard_bytes=60_000)


class Stop(Exception):
    """Stands for a crash."""


def interrupted(source: Path, out: Path, layout: str, after_bytes: int) -> None:
    def stop(done: int, total: int) -> None:
        if done > after_bytes:
            raise Stop

    with pytest.raises(Stop):
        convert(source, out, layout, options=SMALL, progress=stop)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    cfg = config(moe=True)
    return write_hub(tmp_path / "hub", cfg, state(cfg))


@pytest.mark.parametrize("layout", ["per-expert", "native"])
@pytest.mark.parametrize("write_once", [False, True])
def test_an_interrupted_conversion_goes_on_and_rewrites_no_finished_file(
    tmp_path: Path, hub: Path, layout: str, write_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert(hub, tmp_path / "whole", layout, options=SMALL)
    out = tmp_path / "out"

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise Stop

    with pytest.raises(Stop):
        convert(hub, out, layout, options=SMALL, write_once=write_once, progress=stop)
    work = out if write_once else tmp_path / ".out.partial"
    finished = {
        p.name: p.stat().st_mtime_ns for p in work.iterdir() if (work / "unfinished" / f"{p.name}.json").exists()
    }
    assert len(finished) > 3 and out.exists() == write_once
    report = convert(hub, out, layout, options=SMALL, write_once=write_once)
    assert report.bytes_resumed > 0 and report.bytes_written + report.bytes_resumed == whole.bytes_written
    assert report.bytes_written < 0.6 * whole.bytes_written
    assert {n: (out / n).stat().st_mtime_ns for n in finished} == finished
    same = {n: b for n, b in everything(out).items() if not n.startswith("unfinished/")}
    assert same == everything(tmp_path / "whole")


def test_work_for_something_else_is_not_continued(tmp_path: Path, hub: Path) -> None:
    interrupted(hub, tmp_path / "out", "per-expert", 200_000)
    report = convert(hub, tmp_path / "out", "fused", options=SMALL)
    assert report.bytes_resumed == 0
    interrupted(hub, tmp_path / "out2", "per-expert", 200_000)
    os.utime(hub / "model.safetensors", ns=(0, 0))
    assert convert(hub, tmp_path / "out2", "per-expert", options=SMALL).bytes_resumed == 0


def test_a_finished_file_that_lost_bytes_is_written_again(tmp_path: Path, hub: Path) -> None:
    interrupted(hub, tmp_path / "out", "per-expert", 300_000)
    partial = tmp_path / ".out.partial"
    note = next((partial / "unfinished").glob("model*.json"))
    (partial / note.name.removesuffix(".json")).write_bytes(b"short")
    convert(hub, tmp_path / "out", "per-expert", options=SMALL)
    convert(hub, tmp_path / "whole", "per-expert", options=SMALL)
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")


@pytest.mark.parametrize("layout", ["per-expert", "native"])
@pytest.mark.parametrize("at", ["begin", "middle", "end"])
def test_a_finished_file_that_was_damaged_is_written_again(tmp_path: Path, hub: Path, layout: str, at: str) -> None:
    """Case 213: its size is the same, so a look at the size would keep it."""
    interrupted(hub, tmp_path / "out", layout, 300_000)
    note = next((tmp_path / ".out.partial" / "unfinished").glob("*0*1*.json"))
    path = tmp_path / ".out.partial" / note.name.removesuffix(".json")
    data = bytearray(path.read_bytes())
    data[{"begin": 10, "middle": len(data) // 2, "end": len(data) - 40}[at]] ^= 1
    path.write_bytes(data)
    convert(hub, tmp_path / "out", layout, options=SMALL)
    convert(hub, tmp_path / "whole", layout, options=SMALL)
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")


def test_an_unfinished_folder_is_never_read_as_a_checkpoint(tmp_path: Path, hub: Path) -> None:
    convert(hub, tmp_path / "out", "per-expert", write_once=True)
    (tmp_path / "out" / "complete.json").unlink()
    with pytest.raises(ValueError, match="unfinished conversion"):
        open_source(tmp_path / "out")
    interrupted(hub, tmp_path / "out3", "native", 300_000)
    with pytest.raises(ValueError, match="unfinished conversion"):
        open_source(tmp_path / ".out3.partial")


def test_the_marker_is_the_last_file_written_on_a_write_once_mount(
    tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = publish.Staging._opened

    def watch(self, path):  # type: ignore[no-untyped-def]
        assert not path.exists(), f"{path} would be written twice"
        opened.append(path.name)
        return real(self, path)

    monkeypatch.setattr(publish.Staging, "_opened", watch)
    monkeypatch.setattr(os, "rename", None)
    monkeypatch.setattr(os, "replace", None)
    convert(hub, tmp_path / "out", "native", options=SMALL, write_once=True)
    assert opened[-2:] == [".metadata", "complete.json"]


def test_files_are_written_forward_only(tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = publish.Staging.file

    class Forward:
        def __init__(self, file) -> None:  # type: ignore[no-untyped-def]
            self.write = file.write  # no seek, no tell, no read

    from contextlib import contextmanager

    @contextmanager
    def forward(self, name):  # type: ignore[no-untyped-def]
        with real(self, name) as file:
            yield Forward(file)

    monkeypatch.setattr(publish.Staging, "file", forward)
    for layout in ("per-expert", "native"):
        convert(hub, tmp_path / layout, layout)


def test_two_writers_of_one_folder_do_not_mix(tmp_path: Path) -> None:
    first = Staging(tmp_path / "out", "a")
    with pytest.raises(BlockingIOError, match="another process"):
        Staging(tmp_path / "out", "b")
    first.abandon()
    Staging(tmp_path / "out", "b").abandon()


@pytest.mark.parametrize("swap", [True, False])
def test_replacing_swaps_the_old_folder_out_whole(
    tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch, swap: bool
) -> None:
    if not swap:  # a file system without renameat2's exchange
        monkeypatch.setattr(publish, "_swap", lambda one, other: False)
    convert(hub, tmp_path / "out", "per-expert", options=SMALL)
    convert(hub, tmp_path / "out", "fused", overwrite=True)
    convert(hub, tmp_path / "clean", "fused")
    assert everything(tmp_path / "out") == everything(tmp_path / "clean")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["clean", "hub", "out"]


def test_the_marker_knows_every_file_and_every_tensor(tmp_path: Path, hub: Path) -> None:
    convert(hub, tmp_path / "out", "per-expert", options=SMALL)
    marker = read_marker(tmp_path / "out")
    assert marker is not None
    files = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert set(marker["files"]) == files - {"complete.json"}
    assert set(marker["tensors"]) == set(state(config(moe=True)))


VICTIM = """
import sys, time
from hf_ckpt_adapter import Options, convert_checkpoint as convert
print("ready", flush=True)
sys.stdin.readline()
convert(sys.argv[1], sys.argv[2], sys.argv[3], options=Options(max_shard_bytes=60_000), overwrite=True,
        progress=lambda done, total: time.sleep(0.002))
"""


def kill_at_random(tmp_path: Path, seed: int, layout: str, kills: int) -> None:
    """Start a conversion over an old export, kill it with -9 after a random time, and look; then let it
    finish."""
    rng = random.Random(seed)
    cfg = config(moe=True, num_hidden_layers=3)
    hub = write_hub(tmp_path / "hub", cfg, state(cfg))
    old_cfg = config(moe=True)
    old = convert(write_hub(tmp_path / "old", old_cfg, state(old_cfg)), tmp_path / "out", layout)
    assert old.bytes_written
    before = everything(tmp_path / "out")
    convert(hub, tmp_path / "new", layout, options=SMALL)
    after = everything(tmp_path / "new")
    killed_early = False
    for _ in range(kills):
        victim = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(hub), str(tmp_path / "out"), layout],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert victim.stdin and victim.stdout and victim.stdout.readline() == "ready\n"
        victim.stdin.write("\n")
        victim.stdin.flush()
        time.sleep(rng.uniform(0, 0.6))
        killed_early |= victim.poll() is None
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        now = {n: b for n, b in everything(tmp_path / "out").items() if not n.startswith("unfinished/")}
        assert now in (before, after), "neither the old export nor the new one"
    assert killed_early
    convert(hub, tmp_path / "out", layout, options=SMALL, overwrite=True)
    assert everything(tmp_path / "out") == after


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_leaves_the_old_export_or_the_new_one(tmp_path: Path, seed: int) -> None:
    kill_at_random(tmp_path, seed, ["per-expert", "native", "fused"][seed % 3], kills=2)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3, 23))
def test_kill_9_twenty_more_times(tmp_path: Path, seed: int) -> None:
    kill_at_random(tmp_path, seed, ["per-expert", "native", "fused"][seed % 3], kills=4)


SAVER = """
import sys, warnings
import torch, torch.distributed.checkpoint as dcp
from hf_ckpt_adapter import Layout, convert_state
from hf_tiny import config, state
warnings.simplefilter("ignore")
native = convert_state(state(config(moe=True)), Layout.NATIVE).tensors
print("ready", flush=True)
sys.stdin.readline()
for step in range(1, 1000):
    tensors = {n: t + step for n, t in native.items()}
    dcp.save(tensors, checkpoint_id=f"{sys.argv[1]}/step-{step}", no_dist=True)
"""


def kill_while_saving(tmp_path: Path, seed: int) -> None:
    """Kill a job that saves step after step: each is read whole or refused, never half."""
    cfg = config(moe=True)
    hub = write_hub(tmp_path / "hub", cfg, state(cfg))
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    victim = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(tmp_path)], env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert victim.stdin and victim.stdout and victim.stdout.readline() == "ready\n"
    victim.stdin.write("\n")
    victim.stdin.flush()
    while not list(tmp_path.glob("step-*/.metadata")):
        time.sleep(0.001)
    time.sleep(random.Random(seed).uniform(0, 0.3))
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    whole = 0
    for folder in tmp_path.glob("step-*"):
        step = int(folder.name.removeprefix("step-"))
        out = tmp_path / f"out-{step}"
        try:
            convert(folder, out, "per-expert", assets=hub)
        except FileNotFoundError:
            assert not (folder / ".metadata").exists() and not out.exists()
            continue
        whole += 1
        equal(load_file(out / "model.safetensors"), {n: t + step for n, t in state(cfg).items()})
    assert whole >= 1


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_during_a_save_leaves_whole_steps_and_refused_ones(tmp_path: Path, seed: int) -> None:
    kill_while_saving(tmp_path, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3, 23))
def test_kill_9_during_a_save_twenty_more_times(tmp_path: Path, seed: int) -> None:
    kill_while_saving(tmp_path, seed)


def test_stale_files_of_a_killed_run_do_not_reach_the_export(tmp_path: Path, hub: Path) -> None:
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "model-00009-of-00009.safetensors").write_bytes(b"stale")
    (partial / "titan_state").mkdir()
    convert(hub, tmp_path / "out", "per-expert")
    assert not list((tmp_path / "out").glob("*00009*")) and not partial.exists()
    equal(load_file(tmp_path / "out" / "model.safetensors"), state(config(moe=True)))
    weight_map = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map) == set(state(config(moe=True)))
    shutil.rmtree(tmp_path / "out")


def test_a_link_to_a_folder_is_written_through(tmp_path: Path, hub: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for layout in ("per-expert", "fused"):
        convert(hub, tmp_path / "link", layout, overwrite=True)
        convert(hub, tmp_path / layout, layout)
        assert (tmp_path / "link").is_symlink() and everything(tmp_path / "real") == everything(tmp_path / layout)
    assert not list(tmp_path.glob(".*"))


def test_a_link_in_the_place_of_unfinished_work_is_not_emptied(tmp_path: Path, hub: Path) -> None:
    (tmp_path / ".out.partial").symlink_to(hub)
    with pytest.raises(FileExistsError, match="is a link"):
        convert(hub, tmp_path / "out", "per-expert")
    assert (hub / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["README.md", "notes.txt", "results.json", "assets/data.json", "other.safetensors"])
@pytest.mark.parametrize("marked", [True, False])
def test_replacing_a_folder_throws_nothing_away_that_no_export_wrote(
    tmp_path: Path, hub: Path, name: str, marked: bool
) -> None:
    convert(hub, tmp_path / "out", "native")
    if not marked:
        (tmp_path / "out" / "complete.json").unlink()
    (tmp_path / "out" / name).write_text("somebody's")
    with pytest.raises(FileExistsError, match=name):
        convert(hub, tmp_path / "out", "per-expert", overwrite=True)
    (tmp_path / "out" / name).unlink()
    convert(hub, tmp_path / "out", "per-expert", overwrite=True)


@pytest.mark.parametrize("layout", ["per-expert", "native"])
def test_a_full_disk_is_named_with_its_file_and_the_next_run_goes_on(tmp_path: Path, hub: Path, layout: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large.*goes on.*\.out\.partial"):
            convert(hub, tmp_path / "out", layout, options=Options(max_shard_bytes=60_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "out").exists()
    convert(hub, tmp_path / "out", layout, options=SMALL)
    convert(hub, tmp_path / "whole", layout, options=SMALL)
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")


@pytest.mark.parametrize(
    "content",
    [b'{"files": {}, "tensors": {}}', b"[" * 100_000, b'{"kind": "hub", "files": 1, "tensors": {}}', b"\xff", None],
    ids=["no kind", "deep", "no files", "not utf-8", "a pipe"],
)
def test_a_hostile_marker_is_refused_in_words(tmp_path: Path, hub: Path, content: bytes | None) -> None:
    if content is None:
        os.mkfifo(hub / "complete.json")
    else:
        (hub / "complete.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"complete\.json"):
        read_marker(hub)
    assert not verify(hub).ok


def test_a_marker_of_another_format_is_refused(tmp_path: Path, hub: Path) -> None:
    """Case 243: the number was written and never read."""
    convert(hub, tmp_path / "out", "per-expert")
    path = tmp_path / "out" / "complete.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="a completeness marker of format 2; this version reads 1"):
        read_marker(tmp_path / "out")
