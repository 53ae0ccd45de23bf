"""Contract: one run writes to a folder; a second starter gets one line, and a lock left behind ends by itself."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest
from titan_recipes.errors import UserError
from titan_recipes.launch.run_lock import LOCK, STALE, run_lock


def test_a_second_starter_is_told_who_holds_the_folder_and_the_lock_goes_with_its_holder(tmp_path):
    with run_lock(tmp_path):
        with (
            pytest.raises(UserError, match=rf"in use by process {os.getpid()} on {socket.gethostname()}"),
            run_lock(tmp_path),
        ):
            pass
        assert (tmp_path / LOCK).is_file()  # the second starter took nothing away
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_process_that_was_killed_is_taken_over(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from titan_recipes.launch.run_lock import run_lock\n"
        "with run_lock(Path(sys.argv[1])): os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert (tmp_path / LOCK).is_file()
    with run_lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_lock_of_another_host_is_held_until_it_is_silent_for_the_stated_time(tmp_path):
    lock = tmp_path / LOCK
    lock.write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": "2026-01-01 00:00:00"}))
    with pytest.raises(UserError, match=r"process 1 on elsewhere since 2026-01-01"), run_lock(tmp_path):
        pass
    past = time.time() - STALE - 1
    os.utime(lock, (past, past))
    with run_lock(tmp_path):
        assert json.loads(lock.read_text())["host"] == socket.gethostname()


def test_of_many_starters_one_gets_the_folder(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from titan_recipes.launch.run_lock import run_lock\n"
        "with run_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(8)"
    )
    (tmp_path / LOCK).write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1}))  # left behind
    starters = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(4)
    ]
    said = [starter.communicate()[0] for starter in starters]
    assert said.count(b"held\n") == 1


def test_a_restarted_container_takes_over_the_lock_of_its_own_process_number(tmp_path):
    lock = tmp_path / LOCK
    lock.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": "before"}))
    with run_lock(tmp_path):
        assert json.loads(lock.read_text())["since"] != "before"


def test_a_restart_waits_for_the_lock_of_a_host_that_is_gone(tmp_path, monkeypatch):
    lock = tmp_path / LOCK
    lock.write_text(json.dumps({"host": "gone", "pid": 1, "since": "before"}))
    silent = time.time() - STALE + 2
    os.utime(lock, (silent, silent))
    with pytest.raises(UserError, match="process 1 on gone"), run_lock(tmp_path):
        pass
    with run_lock(tmp_path, wait=True):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
