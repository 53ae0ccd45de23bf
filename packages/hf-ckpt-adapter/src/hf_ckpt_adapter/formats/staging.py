"""Put a folder in place whole or not at all, and go on after an interruption.

A folder is built beside its place, as `.<name>.partial`; each finished file is flushed and noted in
`unfinished/`. When all are there, the marker `complete.json` is written (file sizes, per-tensor checksums)
and one rename puts the folder in place; a folder that was there is swapped out in the same system call where
Linux has it. Killed before that, the old folder is untouched, and the next run goes on after the last
finished file.

On mounts that cannot rename or write a file twice (`write_once`), files are written in place and the marker,
written last, is the commit: `unfinished/` without a marker beside it means that the folder is no checkpoint.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from .files import MARKER, UNFINISHED, is_model_file, read_json, regular_file

__all__ = ["Staging", "file_sum", "is_unfinished", "read_marker", "refuse_unfinished"]

_PLAN = "plan.json"
FORMAT = 1  # of the marker
MAX_MARKER = 256 << 20


def is_unfinished(folder: Path) -> bool:
    """Whether a folder is one of ours that was never completed."""
    return (folder / UNFINISHED).exists() and not (folder / MARKER).exists()


def refuse_unfinished(folder: Path) -> None:
    """ValueError when `folder` is one of ours without its marker."""
    if is_unfinished(folder):
        raise ValueError(
            f"{folder} is an unfinished conversion: {UNFINISHED}/ is there and the marker {MARKER} is not. "
            "Run the conversion again; it goes on where it stopped."
        )


def read_marker(folder: Path) -> dict[str, Any] | None:
    """The marker of a completed folder; None when there is none (this package did not write it)."""
    if not os.path.lexists(folder / MARKER):
        return None
    path = regular_file(folder, MARKER, follow_symlinks=True)  # its content is trusted no more than its place
    marker = read_json(path, MAX_MARKER, "a completeness marker")
    if (
        not isinstance(marker, dict)
        or marker.get("kind") not in ("hub", "dcp")
        or not all(isinstance(marker.setdefault(k, {}), dict) for k in ("files", "sums", "tensors"))
    ):
        raise ValueError(
            f"{path} is not a completeness marker: kind, files, sums or tensors are not what they should be"
        )
    if marker.get("format") != FORMAT:
        raise ValueError(
            f"{path} is a completeness marker of format {str(marker.get('format'))[:20]}; this version reads {FORMAT}. "
            "Use the version of hf-ckpt-adapter that wrote it, or convert again."
        )
    return marker


def file_sum(path: Path) -> str:
    """sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _crc(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            crc = zlib.crc32(data, crc)
    return crc


class _Summed:
    """A file that is written front to back, and the CRC-32 of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.crc = file, 0

    def write(self, data: bytes | memoryview) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return self._file.write(data)


def _sync_folder(folder: Path) -> None:
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
        fingerprint: what is being written from what; work that a run with another fingerprint left is
            discarded.
        overwrite: replace a folder that is there, if it holds nothing but parts of a checkpoint.
        write_once: write in place, marker last.

    `done` maps the files that an interrupted run finished, and whose bytes are still those, to what it noted about
    them.

    Raises:
        FileExistsError: `out` is there and `overwrite` is not set, or it holds files that are not ours.
        BlockingIOError: another process is writing the same folder.
    """

    def __init__(self, out: Path, fingerprint: str, *, overwrite: bool = False, write_once: bool = False) -> None:
        # Where a link leads is the folder that is replaced, not the link.
        self.out = out = Path(os.path.realpath(out))
        self.write_once = write_once
        self.folder = out if write_once else out.parent / f".{out.name}.partial"
        self._journal = self.folder / UNFINISHED
        self._check(overwrite)
        if self.folder.is_symlink():
            raise FileExistsError(f"{self.folder} is a link; what was left in it would be removed. Remove the link.")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        self.done: dict[str, Any] = {}
        self._crcs: dict[str, int] = {}
        self._resume(fingerprint)

    def _check(self, overwrite: bool) -> None:
        if not self.out.exists():
            return
        if not self.out.is_dir():
            raise FileExistsError(f"{self.out} is a file; expected a folder, or nothing, at that place")
        if not any(self.out.iterdir()) or (self.write_once and is_unfinished(self.out)):
            return
        if not overwrite or self.write_once:
            raise FileExistsError(
                f"{self.out} exists and is not empty. Choose another folder"
                + ("." if self.write_once else ", or replace it as a whole (overwrite=True, --overwrite).")
            )
        ours = {MARKER}
        with suppress(ValueError):  # a marker that cannot be read vouches for nothing
            ours |= (read_marker(self.out) or {"files": {}})["files"].keys()
        names = [str(p.relative_to(self.out)) for p in sorted(self.out.rglob("*")) if not p.is_dir() or p.is_symlink()]
        foreign = [
            name
            for name in names
            if name not in ours and not (name.startswith(f"{UNFINISHED}/") or is_model_file(name))
        ]
        if foreign:
            raise FileExistsError(
                f"{self.out} holds {', '.join(foreign[:5])}, not part of a checkpoint; the folder "
                "is not replaced. Choose another, or move them out."
            )

    def _take_lock(self) -> int:
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise BlockingIOError(f"{self.out} is being written by another process") from None
        except OSError as error:
            warnings.warn(
                f"{self.folder} cannot be locked ({error}); see to it that one process writes it",
                stacklevel=4,
            )
        return descriptor

    def _resume(self, fingerprint: str) -> None:
        notes = self._notes()
        if notes.pop(_PLAN, {}).get("fingerprint") == fingerprint:
            for name, note in notes.items():
                path = self.folder / name
                if path.is_file() and path.stat().st_size == note.get("size") and _crc(path) == note.get("crc"):
                    self.done[name] = note
        elif not self.write_once:
            shutil.rmtree(self._journal, ignore_errors=True)
        elif notes or any(p.name != UNFINISHED for p in self.folder.iterdir()):
            raise FileExistsError(
                f"{self.out} holds an unfinished conversion of something else, and files there cannot be "
                "written twice. Remove the folder."
            )
        kept = {self.folder / name for name in self.done} | {self._journal}
        for path in self.folder.iterdir():
            if path in kept:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        self._journal.mkdir(exist_ok=True)
        if not (self._journal / _PLAN).exists():
            self._write(self._journal / _PLAN, json.dumps({"fingerprint": fingerprint}).encode())

    def _notes(self) -> dict[str, dict[str, Any]]:
        """What is noted in `unfinished/`; a note that was being written when the power went does not
        count.
        """
        notes = {}
        for path in self._journal.glob("*.json"):
            with suppress(ValueError):
                note = json.loads(path.read_bytes())
                if isinstance(note, dict):
                    notes[path.name if path.name == _PLAN else path.name.removesuffix(".json")] = note
        return notes

    def _write(self, path: Path, data: bytes) -> None:
        with self._opened(path) as file:
            file.write(data)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[BinaryIO]:
        temporary = path if self.write_once else path.with_name(path.name + ".tmp")
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if error.filename is None and error.errno is not None:  # a full disk does not say which
                hint = f"{error.strerror} (what is finished is kept; make room, and the same command goes on)"
                raise OSError(error.errno, hint, str(temporary)) from error
            raise
        if temporary != path:
            os.replace(temporary, path)

    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """A file to write front to back: flushed, and under its name, only when the block ends well."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        with self._opened(path) as file:
            summed = _Summed(file)
            yield summed  # type: ignore[misc]  # all that a writer uses is `write`
        self._crcs[name] = summed.crc

    def note(self, name: str, note: Mapping[str, Any]) -> None:
        """Note a finished file: from here on a resumed run keeps it."""
        self.done[name] = {**note, "size": (self.folder / name).stat().st_size, "crc": self._crcs[name]}
        self._write(self._journal / f"{name}.json", json.dumps(self.done[name]).encode())

    def commit(self, marker: Mapping[str, Any]) -> None:
        """Write the marker and put the folder in its place."""
        for path in (p for p in self.folder.rglob("*") if p.is_dir()):
            _sync_folder(path)
        sizes = {
            str(p.relative_to(self.folder)): p.stat().st_size
            for p in sorted(self.folder.rglob("*"))
            if p.is_file() and p.parent != self._journal
        }
        # Files of tensors have a sum for each tensor; the rest are small.
        sums = {name: file_sum(self.folder / name) for name in sizes if name not in self.done}
        self._write(
            self.folder / MARKER,
            json.dumps({"format": FORMAT, **marker, "files": sizes, "sums": sums}, indent=1, sort_keys=True).encode()
            + b"\n",
        )
        _sync_folder(self.folder)
        if not self.write_once:
            self._put_in_place()
            _sync_folder(self.out.parent)
            shutil.rmtree(self.out / UNFINISHED)
        os.close(self._lock)

    def _put_in_place(self) -> None:
        if self.out.exists() and any(self.out.iterdir()):
            if _swap(self.folder, self.out):
                shutil.rmtree(self.folder)
                return
            # Two renames; a kill between them leaves the old folder under this name.
            previous = self.out.parent / f".{self.out.name}.previous"
            shutil.rmtree(previous, ignore_errors=True)
            os.rename(self.out, previous)
            os.rename(self.folder, self.out)
            shutil.rmtree(previous)
            return
        os.rename(self.folder, self.out)  # onto nothing, or onto an empty folder

    def abandon(self) -> None:
        """Give up the lock; what was written stays for a later run."""
        os.close(self._lock)
