"""One writer a run: a lock file in the run's folder, with who holds it, that works on NFS and FSx.

The file is made by exclusive create, and its holder touches it every BEAT seconds. A lock that nobody touched for STALE
seconds, or whose process on this host is gone, is taken over. No lock of the file system's own is used, because shared
file systems keep those poorly.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import UserError

__all__ = ["BEAT", "LOCK", "STALE", "run_lock"]

LOCK = "run.lock"
BEAT = 15.0
"""Seconds between two signs of life."""
STALE = 120.0
"""Seconds without a sign of life after which a lock of another host counts as left behind."""


_held_here: set[str] = set()
"""Lock files that this process holds."""


@contextmanager
def run_lock(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a run's folder while the block runs.

    Args:
        folder: the run's folder; made when it is not there.
        wait: wait for a lock to be left behind, as a restart does whose last host is gone.

    Raises:
        UserError: another process holds it; the message says which, where and since when.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK
    mine = _acquire(file, wait)
    _held_here.add(str(file.resolve()))
    done = threading.Event()
    threading.Thread(target=_beat, args=(file, done), name="run-lock", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        _held_here.discard(str(file.resolve()))
        if _read(file) == mine:
            file.unlink(missing_ok=True)


def _acquire(file: Path, wait: bool) -> dict[str, Any]:
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    until = time.monotonic() + (STALE + BEAT if wait else 0.0)
    tries = 0
    while tries < 3 or time.monotonic() < until:  # another starter may take over the same stale lock in between
        try:
            descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            if time.monotonic() < until and not _is_left(file):
                time.sleep(1.0)
                continue
            tries += 1
            _take_over(file)
            continue
        with os.fdopen(descriptor, "w") as stream:
            json.dump(mine, stream)
        return mine
    raise UserError(_held(file, _read(file)))


def _take_over(file: Path) -> None:
    """Remove a lock that was left behind. UserError for one that is held."""
    holder = _read(file)
    if _is_left(file):
        # By rename, so that of two starters one removes this lock and none removes the other's new one.
        left = file.with_name(f"{LOCK}.left-{os.getpid()}")
        try:
            file.rename(left)
        except FileNotFoundError:
            return
        left.unlink(missing_ok=True)
        return
    raise UserError(_held(file, holder))


def _is_left(file: Path) -> bool:
    """Whether nobody holds the lock, or its holder is gone."""
    holder = _read(file)
    try:
        silent = time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return True
    if silent > STALE:
        return True
    if holder.get("host") != socket.gethostname():
        return False
    if holder.get("pid") == os.getpid():  # a restarted container counts its processes from the same number
        return str(file.resolve()) not in _held_here
    return not _alive(holder.get("pid"))


def _held(file: Path, holder: dict[str, Any]) -> str:
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')} since {holder.get('since', '?')}"
    return (
        f"{file.parent} is in use by {who}.\nWait for that run, stop it, or name another folder with --dump_folder. "
        f"A lock that was left behind on another host ends by itself {STALE:.0f} s after its last sign of life."
    )


def _alive(pid: Any) -> bool:
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}  # let go, or not yet written
    return found if isinstance(found, dict) else {}


def _beat(file: Path, done: threading.Event) -> None:
    while not done.wait(BEAT):
        try:
            os.utime(file)
        except OSError:
            continue  # a busy file system: the next beat may reach it
