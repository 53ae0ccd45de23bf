"""Prove that a folder is what its marker says, and that it is the model that its config says."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .config import load_config
from .formats.dcp_read import DcpFolder, is_dcp
from .formats.files import MARKER, UNFINISHED
from .formats.staging import file_sum, read_marker, refuse_unfinished
from .formats.tensors import TensorSource
from .names.table import Layout
from .options import Options
from .plan import Output, Read
from .planning import make_plan
from .sources import assets_of, find, open_source
from .stream import blocks

__all__ = ["Check", "Verification", "verify"]

LOGIT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Check:
    """One question and its answer; `detail` says what was found."""

    name: str
    ok: bool
    detail: str


@dataclass
class Verification:
    """All checks of a folder; `ok` when none failed. `marked` says whether it has checksums of what was written."""

    folder: str
    marked: bool = True
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """All fields and `ok`, for JSON."""
        return {**asdict(self), "ok": self.ok}

    def summary(self) -> str:
        """The checks for people, a line each."""
        good = "verified" if self.marked else "nothing wrong is found (the folder has no checksums of ours)"
        lines = [f"{self.folder}: {good if self.ok else 'FAILED'}"]
        return "\n".join(lines + [f"  {'ok  ' if c.ok else 'FAIL'} {c.name}: {c.detail}" for c in self.checks])


def verify(
    name: str | Path,
    *,
    logits: str | Path | None = None,
    follow_symlinks: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Check marker, file sizes, the checksum of every tensor and of every other file, and the config against the
    shapes.

    A second reader's opinion is asked as well. A folder without a marker, such as a training step or a model from the
    Hub, is checked without one: its files and sizes, the CRC of each chunk of a step, and the config.

    Args:
        name: a folder, cache snapshot or Hub id.
        logits: another checkpoint of the model, which must compute the same.
        follow_symlinks: trust links that lead out of the folder.
        progress: told the bytes done and the bytes in all, after each block.

    Returns:
        Every check with what it found.

    Raises:
        FileNotFoundError: no such folder, here or for `logits`.
    """
    folder, other = find(name), find(logits) if logits is not None else None
    result = Verification(str(folder))

    def check(what: str, run: Callable[[], str]) -> bool:
        try:
            result.checks.append(Check(what, True, run()))
        except (ValueError, OSError) as error:
            result.checks.append(Check(what, False, str(error)))
        return result.checks[-1].ok

    marker: dict[str, Any] = {}
    if not check("marker", lambda: _marker(folder, marker)):
        return result
    result.marked = bool(marker)
    if marker:
        sound = check("files", lambda: _files(folder, marker))
        if sound:
            check("other files", lambda: _others(folder, marker))
            sound = check("tensors", lambda: _tensors(folder, marker, follow_symlinks, progress))
    else:
        sound = check("tensors", lambda: _unmarked(folder, follow_symlinks, progress))
    if sound:
        check("config", lambda: _config(folder, follow_symlinks))
        if not is_dcp(folder):
            check("second reader", lambda: _second_reader(folder))
        if other is not None:
            check("logits", lambda: _logits(folder, other))
    return result


def _marker(folder: Path, marker: dict[str, Any]) -> str:
    refuse_unfinished(folder)
    found = read_marker(folder)
    if found is None:
        return f"none: another tool wrote this folder, so there is no {MARKER} with checksums to compare with"
    marker.update(found)
    return f"format {found.get('format')}, {len(found['tensors'])} tensors in layout {found.get('layout')}"


def _files(folder: Path, marker: dict[str, Any]) -> str:
    wrong = []
    for file, size in marker["files"].items():
        path = folder / file
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise ValueError(f"{MARKER} names {file!r}, a path out of the folder; refused")
        if not path.is_file():
            wrong.append(f"{file} is missing")
        elif path.stat().st_size != size:
            wrong.append(f"{file} has {path.stat().st_size} bytes, expected {str(size)[:40]}")
    known = {*marker["files"], MARKER}
    extra = [
        str(p.relative_to(folder))
        for p in sorted(folder.rglob("*"))
        if p.suffix in (".safetensors", ".distcp") and p.relative_to(folder).parts[0] != UNFINISHED
    ]
    wrong += [f"{file} is not of this export" for file in extra if file not in known]
    if wrong:
        raise ValueError("; ".join(wrong))
    return f"{len(marker['files'])} files of the recorded sizes, no stray weights"


def _others(folder: Path, marker: dict[str, Any]) -> str:
    """Files that are not made of summed tensors: config, tokenizer, index, native-only state."""
    wrong = [file for file, sum in marker["sums"].items() if file in marker["files"] and file_sum(folder / file) != sum]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} not what was written")
    return f"{len(marker['sums'])} checksums agree"


def checksum(source: TensorSource, name: str, count: Callable[[int], None] = lambda size: None) -> str:
    """sha256 of a stored tensor's bytes, read by rows."""
    info, digest = source.tensors[name], hashlib.sha256()
    output = Output(name, info, info.dtype, (Read(name, 0, info.rows),))
    for data, _ in blocks(source, output, output.reads):
        digest.update(data)
        count(len(data))
    return digest.hexdigest()


def _tensors(
    folder: Path,
    marker: dict[str, Any],
    follow_symlinks: bool,
    progress: Callable[[int, int], None] | None,
) -> str:
    source = open_source(folder, follow_symlinks=follow_symlinks)
    try:
        absent = [name for name in marker["tensors"] if name not in source.tensors]
        if absent:
            raise ValueError(f"{len(absent)} tensors are missing, such as {absent[0]!r}")
        total, done, wrong = sum(source.tensors[n].nbytes for n in marker["tensors"]), 0, []

        def count(size: int) -> None:
            nonlocal done
            done += size
            if progress is not None:
                progress(done, total)

        for name, expected in marker["tensors"].items():
            if checksum(source, name, count) != expected:
                wrong.append(f"{name} in {source.tensors[name].file}")
        if wrong:
            raise ValueError(f"{len(wrong)} tensors are not what was written: {'; '.join(wrong[:5])}")
        return f"{len(marker['tensors'])} checksums agree"
    finally:
        source.close()


def _unmarked(folder: Path, follow_symlinks: bool, progress: Callable[[int, int], None] | None) -> str:
    """Tensors of another tool's folder: by the CRC of each chunk of a DCP step; a Hugging Face folder has none."""
    source = open_source(folder, follow_symlinks=follow_symlinks)
    try:
        if not isinstance(source, DcpFolder):
            return f"{len(source.tensors)} tensors, each where its header says; nothing there tells of a changed value"
        damaged = source.damaged(progress or (lambda done, total: None))
    finally:
        source.close()
    if damaged:
        raise ValueError(f"{len(damaged)} chunks are not what was saved: {'; '.join(damaged[:5])}")
    return f"{len(source.tensors)} tensors, each chunk as its CRC says"


def _config(folder: Path, follow_symlinks: bool) -> str:
    config = load_config(assets_of(folder, follow_symlinks=follow_symlinks), follow_symlinks=follow_symlinks)
    source = open_source(folder, follow_symlinks=follow_symlinks)
    try:
        plan = make_plan(source, config, Layout.PER_EXPERT, Options(on_untied="drop", allow_missing_head=True))
    finally:
        source.close()
    return f"{plan.sizes.num_hidden_layers} layers, every size as config.json says"


def _second_reader(folder: Path) -> str:
    from safetensors import safe_open

    source = open_source(folder)
    source.close()
    names: set[str] = set()
    files = {info.file for info in source.tensors.values()}
    for file in files:
        with safe_open(folder / file, "pt") as handle:
            names.update(handle.keys())
    if names != source.tensors.keys():
        raise ValueError(f"safetensors' own reader sees other tensors: {sorted(names ^ source.tensors.keys())[:5]}")
    return f"safetensors' own reader opens {len(files)} file(s) and sees the same {len(names)} tensors"


def _logits(folder: Path, other: Path) -> str:
    """Run in an interpreter of its own, so that this package never imports a modelling library."""
    command = [sys.executable, "-m", f"{__package__}.logits", str(folder), str(other)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["failed without a word"])[-1]
        raise ValueError(last.removeprefix("ValueError: "))
    found = json.loads(result.stdout.strip().splitlines()[-1])
    text = (
        f"{found['with']}: {len(found['missing'])} missing, {len(found['unexpected'])} unexpected, largest "
        f"float32 difference {found['difference']:.3g} over {found['tokens']} positions"
    )
    if found["missing"] or found["unexpected"] or not found["difference"] <= LOGIT_TOLERANCE:
        raise ValueError(text + f" (at most {LOGIT_TOLERANCE:g} is allowed)")
    return text
