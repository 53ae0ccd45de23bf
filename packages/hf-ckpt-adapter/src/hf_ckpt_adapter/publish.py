"""Put a folder in place whole or not at all, and go on after an interruption.

A folder is built beside its place, as `.<name>.partial`, with a journal of the files that are finished. When
all is written and flushed, the marker `complete.json` goes in (file sizes, per-tensor checksums), the journal
goes out, and one rename puts the folder in place; a folder that was there is swapped out in the same system
call where Linux has it. Killed before the rename: the old folder is untouched, and the next run goes on after
the last finished file. On mounts that cannot rename (`write_once`), files are written in place and the
marker, written last, is the commit.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["MARKER", "Staging", "is_unfinished", "read_marker"]

MARKER = "complete.json"
JOURNAL = "unfinished.json"
_OURS = (".safetensors", ".json", ".txt", ".jinja", ".model", ".distcp", ".metadata", ".py", ".md")


def is_unfinished(folder: Path) -> bool:
    """Whether a folder is one of ours that was never completed."""
    return (folder / JOURNAL).exists() and not (folder / MARKER).exists()


def read_marker(folder: Path) -> dict[str, Any] | None:
    """The marker of a completed folder; None when it has none (it was not written by this package)."""
    try:
        marker = json.loads((folder / MARKER).read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{folder / MARKER} is not valid JSON: {error}") from None
    if not isinstance(marker, dict) or not isinstance(marker.get("files"), dict):
        raise ValueError(f"{folder / MARKER} is not a completeness marker")
    return marker


def sync_folder(folder: Path) -> None:
    """Flush a folder's own entries."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network mounts have no such thing
            raise
    finally:
        os.close(descriptor)


def _swap(one: Path, other: Path) -> bool:
    """Exchange two folders in one step (Linux renameat2); False where that is not to be had."""
    exchange, here = 2, -100
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


class Staging:
    """A folder under construction.

    Args:
        out: where it will be.
        fingerprint: what is being written from what; work left by a run with another fingerprint is
            discarded.
        overwrite: replace a folder that is there. Only folders that hold nothing but checkpoint files are
            replaced.
        write_once: write in place, marker last.

    Raises:
        FileExistsError: `out` is there and `overwrite` is not set, or it holds files that are not ours.
        BlockingIOError: another process is writing the same folder.
    """

    def __init__(
        self, out: Path, fingerprint: str, *, overwrite: bool = False, write_once: bool = False
    ) -> None:
        self.out, self.write_once = out, write_once
        self.folder = out if write_once else out.parent / f".{out.name}.partial"
        self._check(overwrite)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise BlockingIOError(
                f"{out} is being written by another process ({self.folder} is locked)"
            ) from None
        self.done: dict[str, Any] = {}
        self._fingerprint = fingerprint
        self._resume()

    def _check(self, overwrite: bool) -> None:
        if (
            not self.out.exists()
            or not any(self.out.iterdir())
            or (self.write_once and is_unfinished(self.out))
        ):
            return
        if not overwrite or self.write_once:
            raise FileExistsError(
                f"{self.out} exists and is not empty. Choose another folder, or replace it as a whole "
                "(overwrite=True, --overwrite)."
            )
        foreign = [
            p.name
            for p in self.out.iterdir()
            if not p.name.endswith(_OURS) and not (p.is_dir() and p.name in ("assets", "titan_state"))
        ]
        if foreign and read_marker(self.out) is None:
            raise FileExistsError(
                f"{self.out} holds {', '.join(sorted(foreign)[:5])}, which are not parts of a checkpoint; it "
                "is not "
                "replaced. Choose another folder."
            )

    def _resume(self) -> None:
        try:
            journal = json.loads((self.folder / JOURNAL).read_text())
        except (FileNotFoundError, ValueError):
            journal = {}
        if journal.get("fingerprint") == self._fingerprint:
            self.done = {
                name: entry
                for name, entry in journal.get("files", {}).items()
                if (self.folder / name).is_file() and (self.folder / name).stat().st_size == entry["size"]
            }
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name not in self.done:
                entry.unlink()
        self._write_journal()

    def _write_journal(self) -> None:
        text = json.dumps({"fingerprint": self._fingerprint, "files": self.done}).encode()
        if self.write_once and (self.folder / JOURNAL).exists():
            return  # written once: finished files are not recorded, an interrupted run starts again
        self._replace(JOURNAL, text)

    def _replace(self, name: str, data: bytes) -> None:
        target = self.folder / name
        temporary = target if self.write_once else self.folder / f"{name}.tmp"
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if temporary != target:
            os.replace(temporary, target)

    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """A file to write front to back; complete under its name, and flushed, only when the block ends
        well."""
        target = self.folder / name
        temporary = target if self.write_once else self.folder / f"{name}.tmp"
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        if temporary != target:
            os.replace(temporary, target)

    def record(self, name: str, entry: Mapping[str, Any]) -> None:
        """Note a finished file in the journal: from here on a resumed run keeps it."""
        self.done[name] = {**entry, "size": (self.folder / name).stat().st_size}
        self._write_journal()

    def commit(self, marker: Mapping[str, Any]) -> None:
        """Write the marker and put the folder in its place."""
        for path in self.folder.rglob("*"):
            if path.is_file() and path.name not in self.done:
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        sizes = {
            str(p.relative_to(self.folder)): p.stat().st_size
            for p in sorted(self.folder.rglob("*"))
            if p.is_file() and p.name != JOURNAL
        }
        text = json.dumps({**marker, "files": sizes}, indent=1, sort_keys=True).encode() + b"\n"
        self._replace(MARKER, text)
        if not self.write_once:
            (self.folder / JOURNAL).unlink()
        sync_folder(self.folder)
        if not self.write_once:
            self._put_in_place()
            sync_folder(self.out.parent)
        os.close(self._lock)

    def _put_in_place(self) -> None:
        if self.out.exists():
            if not any(self.out.iterdir()):
                self.out.rmdir()
            elif _swap(self.folder, self.out):
                shutil.rmtree(self.folder)
                return
            else:  # two renames; a kill between them leaves the old folder under this name
                previous = self.out.parent / f".{self.out.name}.previous"
                shutil.rmtree(previous, ignore_errors=True)
                os.rename(self.out, previous)
                os.rename(self.folder, self.out)
                shutil.rmtree(previous)
                return
        os.rename(self.folder, self.out)

    def abandon(self) -> None:
        """Give up the lock, keeping what was written for a later run."""
        os.close(self._lock)
