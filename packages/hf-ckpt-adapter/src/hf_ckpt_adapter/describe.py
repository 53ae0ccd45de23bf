"""What is in a checkpoint: model, layout, dtypes, sizes, and whether it is healthy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .compare import Model
from .config import tied
from .formats.files import MARKER
from .formats.staging import read_marker
from .names.table import Layout
from .options import Options
from .planning import make_plan
from .report import size_text
from .sizes import sizes_of
from .stream import blocks

__all__ = ["Description", "describe"]


@dataclass
class Description:
    """Facts about a checkpoint; `problems` is empty for a healthy one.

    `bytes` and `parameters` count stored tensors (a tied head that is stored counts). `experts` counts layers
    by expert layout. `marked` says whether this package completed the folder.
    """

    folder: str
    kind: str
    dialect: str
    root: str
    model: str
    sizes: dict[str, int] = field(default_factory=dict)
    tied: bool | None = None
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)
    files: int = 0
    experts: dict[str, int] = field(default_factory=dict)
    side_state: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    marked: bool = False
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)

    def summary(self) -> str:
        """The facts for people, problems last."""
        head = {True: "tied", False: "untied", None: "no config"}[self.tied]
        lines = [
            f"{self.folder}: {self.model}, {self.kind} with {self.dialect} names, {head}",
            "  " + ", ".join(f"{k} {v}" for k, v in self.sizes.items() if v),
            f"  {self.tensors} tensors, {self.parameters:,} parameters, {size_text(self.bytes)} in "
            f"{self.files} file(s): " + ", ".join(f"{n} {d}" for d, n in self.dtypes.items()),
        ]
        if self.experts:
            lines.append("  experts: " + ", ".join(f"{n} layers {kind}" for kind, n in self.experts.items()))
        if self.side_state:
            lines.append(f"  native-only state: {len(self.side_state)} tensors such as {self.side_state[0]}")
        if self.left_out:
            lines.append("  not weights: " + ", ".join(f"{k} ({n} entries)" for k, n in self.left_out.items()))
        lines.append(f"  {MARKER}: " + ("complete" if self.marked else "none (written by another tool)"))
        return "\n".join(lines + [f"  problem: {p}" for p in self.problems] + ["  healthy"] * (not self.problems))


def describe(
    name: str | Path,
    *,
    values: bool = False,
    follow_symlinks: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Description:
    """Look at a checkpoint's names and shapes.

    Args:
        name: a folder, cache snapshot or Hub id.
        values: read everything too, and count what is not a finite number.
        follow_symlinks: trust links that lead out of the folder.
        progress: told the bytes done and the bytes in all, after each block.

    Returns:
        The facts, and problems in words.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it cannot be opened at all.
    """
    model = Model(name, follow_symlinks=follow_symlinks)
    try:
        return _describe(model, values, progress)
    finally:
        model.close()


def _describe(model: Model, values: bool, progress: Callable[[int, int], None]) -> Description:
    tensors, reading = model.source.tensors, model.reading
    moe = bool(reading.experts)
    result = Description(
        folder=str(model.folder),
        kind=model.source.kind,
        dialect=reading.dialect,
        root=reading.root,
        model=str(model.config.get("model_type", "qwen3_moe" if moe else "qwen3")),
        tied=tied(model.config) if model.config else None,
        tensors=len(tensors),
        parameters=sum(math.prod(i.shape) for i in tensors.values()),
        bytes=sum(i.nbytes for i in tensors.values()),
        files=len({i.file for i in tensors.values()}),
        side_state=sorted(reading.side),
        left_out=dict(model.source.left_out),
        marked=read_marker(model.folder) is not None,
    )
    for info in tensors.values():
        word = str(info.dtype).removeprefix("torch.")
        result.dtypes[word] = result.dtypes.get(word, 0) + 1
    for kind in reading.experts.values():
        result.experts[kind] = result.experts.get(kind, 0) + 1
    try:
        result.sizes = asdict(sizes_of(reading))
        if model.config:
            make_plan(model.source, model.config, Layout.PER_EXPERT, Options(on_untied="drop"))
        else:
            result.problems.append("no config.json: rope theta, norm eps and tying are unknown")
    except ValueError as error:
        result.problems.append(str(error))
    if values:
        total, done = sum(model.output(part).info.nbytes for part in reading.parts), 0
        for part in reading.parts:
            output, bad = model.output(part), 0
            for data, tensor in blocks(model.source, output, output.reads):
                bad += int((~tensor.isfinite()).sum())
                done += len(data)
                progress(done, total)
            if bad:
                result.problems.append(f"{part} holds {bad} values that are not finite ({model.place(part)})")
    return result
