"""Contract: the command that continues a run is the one that was typed, whichever launcher it named."""

import shlex
import subprocess
import sys

import pytest
from titan_recipes.launch.command import resume_command

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "UV")


@pytest.fixture(autouse=True)
def typed(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["apps/train", "debug"])


def test_under_uv_and_under_python_the_program_is_started_as_it_was(monkeypatch):
    assert resume_command(["debug"], "out/run") == "python apps/train debug --resume --dump_folder out/run"
    monkeypatch.setenv("UV", "/usr/bin/uv")
    assert resume_command(["debug"], "out/run") == "uv run apps/train debug --resume --dump_folder out/run"


def test_a_folder_and_resume_are_said_once(monkeypatch):
    for given in (["debug", "--resume", "--dump_folder", "old"], ["debug", "--dump_folder=old"]):
        assert resume_command(given, "new") == "python apps/train debug --resume --dump_folder new"


def test_under_torchrun_its_own_options_come_back(tmp_path):
    """A stand-in for torchrun starts a rank, as torchrun does: a child of its own."""
    (tmp_path / "torchrun").write_text(
        "import os, subprocess, sys\n"
        "os.environ |= {'RANK': '0', 'WORLD_SIZE': '4', 'LOCAL_WORLD_SIZE': '2', 'GROUP_WORLD_SIZE': '2'}\n"
        "sys.exit(subprocess.run([sys.executable, *sys.argv[-2:]]).returncode)\n"
    )
    app = tmp_path / "apps" / "train"
    app.mkdir(parents=True)
    (app / "__main__.py").write_text(
        "import sys\nfrom titan_recipes.launch.command import resume_command\nprint(resume_command(sys.argv[1:], "
        "'run'))\n"
    )
    command = [sys.executable, str(tmp_path / "torchrun"), "--nnodes", "2", "--nproc-per-node", "2", str(app), "debug"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    wanted = ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", str(app), "debug"]
    assert said == shlex.join([*wanted, "--resume", "--dump_folder", "run"])


def test_a_launcher_that_cannot_be_read_is_named_by_its_numbers(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    said = resume_command(["debug"], "run")
    assert said == "torchrun --nnodes 2 --nproc-per-node 2 apps/train debug --resume --dump_folder run"
