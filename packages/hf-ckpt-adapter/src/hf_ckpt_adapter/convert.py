"""Convert a checkpoint into another layout, and publish the result as a whole folder.

Every conversion has the same three steps: open a source, plan, move rows into files. The kind of file differs
(`HubFolder`, `TitanFolder`), and so do the small files beside the weights.

Peak memory is a fixed part (the interpreter and torch), plus (POOL + 2) x max(BLOCK, the widest row) for blocks (10
MiB, see `stream.py`), plus about 2 kB for each tensor name. It does not depend on the size of the model or of a tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from .config import load_config
from .folder import Progress
from .formats.staging import Staging
from .formats.tensors import TensorSource, dtype_named
from .hub_folder import HubFolder
from .names.table import Layout
from .options import Options
from .plan import Plan
from .planning import make_plan
from .report import Report
from .side_state import check_side, read_side_state
from .sources import assets_of, find, open_source
from .titan_folder import TitanFolder
from .vocabulary import refuse_trained_rows

__all__ = ["convert_checkpoint", "export_step"]


def convert_checkpoint(
    source: Path | str,
    out: Path | str,
    layout: Layout | str,
    *,
    options: Options | None = None,
    assets: Path | str | None = None,
    overwrite: bool = False,
    write_once: bool = False,
    follow_symlinks: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Convert a checkpoint to `layout`: Hub layouts become a Hugging Face folder, the others a DCP folder.

    No model is built and no accelerator touched; the folder appears whole or not at all, and a run that was
    interrupted is continued by the next one with the same arguments.

    Args:
        source: a Hugging Face folder, Hub id or cache snapshot, or a DCP step folder saved on any number of
            ranks.
        out: the folder to make.
        layout: `per-expert` or `fused` (Hub), `native`, `native-wqkv` or `backend` (TorchTitan DCP).
        options: dtype, expert layout, ties, padding, shard size; see `Options`.
        assets: a folder with config.json and tokenizer instead of the checkpoint's own.
        overwrite: replace `out` if it is there and holds nothing but a checkpoint.
        write_once: for mounts without rename: write in place, the completeness marker last.
        follow_symlinks: trust links that lead out of the source folder.
        progress: told the bytes done and the bytes in all, after each block.

    Returns:
        What was read, written, changed and left behind.

    Raises:
        FileNotFoundError: no checkpoint, no config, or files missing from it.
        ValueError: tensors that do not make up the model in config.json, or hostile files.
        FileExistsError: `out` is there.
        BlockingIOError: another process is writing `out`.
    """
    begun = time.monotonic()
    folder, out, layout, options = find(source), Path(out), Layout(layout), options or Options()
    assets_dir = Path(assets) if assets is not None else assets_of(folder, follow_symlinks=follow_symlinks)
    config = load_config(assets_dir, follow_symlinks=follow_symlinks)
    opened = open_source(folder, follow_symlinks=follow_symlinks)
    try:
        plan = make_plan(opened, config, layout, options)
        refuse_trained_rows(opened, plan, options)
        side = read_side_state(opened, plan.reading, folder, follow_symlinks=follow_symlinks)
        check_side(side, plan)
        staging = Staging(out, _fingerprint(folder, plan, options), overwrite=overwrite, write_once=write_once)
        report = _begin_report(folder, out, opened, plan)
        try:
            kind = HubFolder if plan.to_hub else TitanFolder
            kind(staging, plan, options, report, side, assets_dir, follow_symlinks).write(opened, progress)
        except BaseException:
            staging.abandon()
            raise
    finally:
        opened.close()
    report.seconds = time.monotonic() - begun
    return report


def export_step(
    step_dir: Path | str,
    out: Path | str,
    *,
    dtype: str | torch.dtype | None = None,
    options: Options | None = None,
    assets: Path | str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Export a TorchTitan checkpoint step to a Hugging Face folder that Transformers and servers load.

    The step folder is enough: its `assets/` has config.json, generation config and tokenizer.

    Args:
        step_dir: `checkpoint/step-N`.
        out: the folder to make.
        dtype: `bfloat16`, `float32`, ...; None means what config.json says.
        options: see `Options`; its `experts` chooses the expert layout.
        assets: a folder with config.json and tokenizer instead of the checkpoint's own.
        overwrite: replace `out` if it is there and holds nothing but a checkpoint.
        progress: told the bytes done and the bytes in all, after each block.

    Returns:
        What was read, written, changed and left behind.

    Raises:
        FileNotFoundError: no checkpoint, no config, or files missing from it.
        ValueError: tensors that do not make up the model in config.json, or hostile files.
        FileExistsError: `out` is there.
        BlockingIOError: another process is writing `out`.
    """
    options = options or Options()
    if dtype is not None:
        options = replace(options, dtype=dtype_named(dtype) if isinstance(dtype, str) else dtype)
    layout = Layout.FUSED if options.experts == "fused" else Layout.PER_EXPERT
    return convert_checkpoint(
        step_dir, out, layout, options=options, assets=assets, overwrite=overwrite, progress=progress
    )


def _fingerprint(folder: Path, plan: Plan, options: Options) -> str:
    """A digest of every output with its reads, and of the identity of every source file."""
    files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir() if p.is_file()]
    digest = hashlib.sha256(json.dumps([os.path.realpath(folder), sorted(files)]).encode())
    digest.update(json.dumps([plan.layout, plan.config, plan.tie, str(options)], default=str).encode())
    for output in plan.outputs:
        digest.update(f"{output.name} {output.info} {output.stored}".encode())
        digest.update(" ".join(f"{r.tensor}:{r.row}:{r.rows}" for r in output.reads).encode())
    return digest.hexdigest()


def _begin_report(folder: Path, out: Path, source: TensorSource, plan: Plan) -> Report:
    return Report(
        source=str(folder),
        out=str(out),
        layout=plan.layout_name,
        dtype=", ".join(sorted({str(o.info.dtype).removeprefix("torch.") for o in plan.outputs})),
        tensors_read=len(source.tensors) - len(plan.reading.side),
        tensors_written=len(plan.outputs) + len(plan.aliases),
        cast=plan.cast,
        missing=plan.missing,
        dropped=plan.reading.dropped,
        trimmed=plan.trimmed,
        left_out=dict(source.left_out),
        warnings=list(plan.notes),
    )
