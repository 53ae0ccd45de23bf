"""Move rows from a source to a published folder, following a plan.

Peak memory is `4 x BLOCK` plus the interpreter, torch and the tables of names (about 2 kB a tensor): no
tensor is ever held whole, so it does not depend on the model's size.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from .assets import ASSETS, config_bytes, copy_assets, load_config
from .dcp_io import DcpFolder, is_dcp
from .mapping import Layout
from .plan import Options, Output, Plan, Read, make_plan
from .publish import Staging, is_unfinished
from .report import Report
from .safetensors_io import (
    INDEX_NAME,
    SafetensorsFolder,
    ShardWriter,
    index_bytes,
    shard_names,
    split_shards,
    tensor_order,
)
from .tensors import TensorInfo, TensorSource, buffer

__all__ = ["Progress", "export_step", "open_source"]

BLOCK = 8 << 20
SIDE_FILE = "titan_state/native.safetensors"
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def open_source(folder: Path, *, follow_symlinks: bool = False) -> TensorSource:
    """Open a DCP step folder or a Hugging Face folder for reading by rows.

    Raises:
        FileNotFoundError: neither is there. ValueError: a folder of ours that was never completed, or hostile
            files.
    """
    if is_unfinished(folder):
        raise ValueError(
            f"{folder} is an unfinished export (it has no completeness marker); run the export again"
        )
    if is_dcp(folder):
        return DcpFolder(folder, follow_symlinks=follow_symlinks)
    return SafetensorsFolder(folder, follow_symlinks=follow_symlinks)


def blocks(
    source: TensorSource, output: Output, reads: tuple[Read, ...]
) -> Iterator[tuple[memoryview, torch.Tensor]]:
    """The rows of `reads` in the stored dtype, as bytes and as a tensor [n, cols] on the same memory.

    Each block has at most BLOCK bytes, or one row; the memory is used again for the next.
    """
    cols = output.info.cols
    step = max(1, BLOCK // max(1, cols * output.stored.itemsize))
    data, block = buffer(output.stored, (min(step, output.info.rows), cols))
    row_bytes, filled = cols * output.stored.itemsize, 0
    for read in reads:
        row, left = read.row, read.rows
        while left:
            take = min(left, len(block) - filled)
            part = data[filled * row_bytes : (filled + take) * row_bytes]
            if read.tensor is None:
                part[:] = bytes(len(part))
            else:
                source.read_rows(read.tensor, row, part)
            row, left, filled = row + take, left - take, filled + take
            if filled == len(block):
                yield data, block
                filled = 0
    if filled:
        yield data[: filled * row_bytes], block[:filled]


def cast_blocks(source: TensorSource, output: Output) -> Iterator[memoryview]:
    """An output's bytes, cast; a finite number that the dtype cannot hold is an error, not an infinity."""
    stored, dtype = output.stored, output.info.dtype
    narrower = dtype != stored and torch.finfo(dtype).max < torch.finfo(stored).max
    room: tuple[memoryview, torch.Tensor] | None = None
    for data, block in blocks(source, output, output.reads):
        if dtype == stored:
            yield data
            continue
        if room is None:  # the first block is the largest
            room = buffer(dtype, tuple(block.shape))
        result = room[1][: len(block)].copy_(block)
        if narrower and not bool((result.isfinite() | ~block.isfinite()).all()):
            raise ValueError(
                f"{output.name!r} holds values up to {block.abs().max():.3g}, which {dtype} cannot hold"
            )
        yield room[0][: result.numel() * dtype.itemsize]


def _compare(output: Output, source: TensorSource) -> float | None:
    """Largest difference between an output's rows and its witness's; None when all bits agree."""
    worst: float | None = None
    for (ours, a), (theirs, b) in zip(
        blocks(source, output, output.reads), blocks(source, output, output.witness), strict=False
    ):
        rows = min(len(a), len(b))  # padding follows the rows that are compared
        size = rows * len(ours) // len(a)
        if ours[:size] != theirs[:size]:
            worst = max(worst or 0.0, float((a[:rows].double() - b[:rows].double()).abs().max()))
    return worst


def _write_hub_file(
    staging: Staging, name: str, outputs: list[Output], source: TensorSource, count: Callable[[int], None]
) -> None:
    with staging.file(name) as file:
        writer = ShardWriter(file, {o.name: o.info for o in outputs}, count)
        for output in outputs:
            if output.witness:
                worst = _compare(output, source)
                if worst is not None:
                    raise ValueError(
                        f"config.json ties lm_head to the embedding, but {output.witness[0].tensor!r} and "
                        f"{output.reads[0].tensor!r} differ by up to {worst:.6g}. Choose: untie (keep both, "
                        "config "
                        "says untied) or drop (the head is thrown away) with on_untied / --on-untied."
                    )
            for data in cast_blocks(source, output):
                writer.write(data)
        sums = writer.finish()
    staging.record(name, {"sums": sums})


def _fingerprint(source_folder: Path, plan: Plan, kind: str) -> str:
    """What is written from what: names and shapes, and the identity of every source file."""
    files = sorted(
        (p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in source_folder.iterdir() if p.is_file()
    )
    outputs = [(o.name, str(o.info), str(o.stored), str(o.reads)) for o in plan.outputs]
    text = json.dumps(
        [kind, os.path.realpath(source_folder), files, outputs, plan.config, plan.tie], default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _side_state(source: TensorSource, plan: Plan) -> dict[str, torch.Tensor]:
    """Native-only state (expert bias, counters), by native name; a few kB a layer."""
    state = {}
    for name, stored in sorted(plan.reading.side.items()):
        info = source.tensors[stored]
        data, state[name] = buffer(info.dtype, info.shape)
        source.read_rows(stored, 0, data)
    return state


def _write_side_file(staging: Staging, state: Mapping[str, torch.Tensor]) -> None:
    infos = tensor_order({n: TensorInfo(t.dtype, tuple(t.shape)) for n, t in state.items()})
    with staging.file(SIDE_FILE) as file:
        writer = ShardWriter(file, infos)
        for name, info in infos.items():
            data, tensor = buffer(info.dtype, info.shape)
            tensor.copy_(state[name])
            writer.write(data)
        writer.finish()


def export_step(
    step_dir: Path | str,
    out: Path | str,
    *,
    dtype: str | torch.dtype | None = None,
    assets: Path | str | None = None,
    options: Options | None = None,
    overwrite: bool = False,
    write_once: bool = False,
    follow_symlinks: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Export a TorchTitan checkpoint step to a Hugging Face folder that Transformers and servers load.

    The step folder is enough: its `assets/` has config.json, generation config and tokenizer. Nothing is
    trusted, no model is built, no accelerator is touched; the folder appears whole or not at all.

    Args:
        step_dir: `checkpoint/step-N`, as DCP saved it on any number of ranks.
        out: the folder to make.
        dtype: `bfloat16`, `float32`, ...; None means what config.json says.
        assets: a folder with config.json and tokenizer instead of `step_dir/assets`.
        options: everything else; see `Options`.
        overwrite: replace `out` if it is there.

    Raises:
        FileNotFoundError: no checkpoint, no assets, or files missing from it.
        ValueError: tensors that do not make up the model in config.json, or hostile files.
        FileExistsError: `out` is there.
    """
    from .tensors import dtype_named

    step_dir, out = Path(step_dir), Path(out)
    begun = time.monotonic()
    chosen = options or Options()
    if dtype is not None:
        chosen = Options(**{**vars(chosen), "dtype": dtype_named(dtype) if isinstance(dtype, str) else dtype})
    assets_dir = Path(assets) if assets is not None else step_dir / ASSETS
    config = load_config(assets_dir, follow_symlinks=follow_symlinks)
    source = open_source(step_dir, follow_symlinks=follow_symlinks)
    try:
        layout = Layout.FUSED if chosen.experts == "fused" else Layout.PER_EXPERT
        plan = make_plan(source, config, layout, chosen)
        return _publish_hub(
            source,
            step_dir,
            assets_dir,
            plan,
            chosen,
            out,
            begun,
            overwrite,
            write_once,
            follow_symlinks,
            progress,
        )
    finally:
        source.close()


def _publish_hub(
    source: TensorSource,
    source_dir: Path,
    assets_dir: Path,
    plan: Plan,
    options: Options,
    out: Path,
    begun: float,
    overwrite: bool,
    write_once: bool,
    follow_symlinks: bool,
    progress: Progress | None,
) -> Report:
    by_name = {o.name: o for o in plan.outputs}
    sizes = {name: o.info.nbytes for name, o in by_name.items()}
    shards = split_shards(sizes, options.max_shard_bytes)
    names = shard_names(len(shards))
    total = sum(sizes.values())
    report = Report(
        source=str(source_dir),
        out=str(out),
        layout=plan.layout.value,
        dtype=", ".join(sorted({str(o.info.dtype)[6:] for o in plan.outputs})),
        tensors_read=len(source.tensors) - len(plan.reading.side),
        tensors_written=len(plan.outputs),
        bytes_read=sum(i.nbytes for i in source.tensors.values()),
        files=names,
        cast=plan.cast,
        dropped=plan.reading.dropped,
        trimmed=plan.trimmed,
        left_out=dict(source.left_out),
        warnings=list(plan.notes),
    )
    staging = Staging(out, _fingerprint(source_dir, plan, "hub"), overwrite=overwrite, write_once=write_once)
    try:
        done = 0

        def count(written: int) -> None:
            nonlocal done
            done += written
            report.bytes_written += written
            if progress is not None:
                progress(done, total)

        for name, tensors in zip(names, shards, strict=True):
            if name in staging.done:
                done += sum(sizes[t] for t in tensors)
                report.bytes_resumed += sum(sizes[t] for t in tensors)
                continue
            order = tensor_order({t: by_name[t].info for t in tensors})
            _write_hub_file(staging, name, [by_name[t] for t in order], source, count)
        sums = {t: s for entry in staging.done.values() for t, s in entry.get("sums", {}).items()}
        state = _side_state(source, plan)
        if state:
            _write_side_file(staging, state)
            report.side_state = {n: float(t.abs().max()) if t.numel() else 0.0 for n, t in state.items()}
            biased = {n: v for n, v in report.side_state.items() if n.endswith("expert_bias_E") and v}
            if biased:
                worst = max(biased, key=lambda n: biased[n])
                report.warnings.append(
                    f"{len(biased)} layers route with a non-zero expert bias (up to {biased[worst]:.6g}, "
                    f"{worst}); Hugging "
                    f"Face has no place for it, so the exported model routes without. Kept in {SIDE_FILE}."
                )
        with staging.file(INDEX_NAME) as file:
            file.write(index_bytes(dict(zip(names, shards, strict=True)), sizes))
        with staging.file("config.json") as file:
            file.write(config_bytes(plan.config, dtype=plan.dtype, tie=plan.tie))
        copy_assets(assets_dir, staging.folder, follow_symlinks=follow_symlinks)
        staging.commit(
            {
                "format": 1,
                "kind": "hub",
                "layout": plan.layout.value,
                "source": source_dir.name,
                "tensors": sums,
            }
        )
    except BaseException:
        staging.abandon()
        raise
    report.seconds = time.monotonic() - begun
    return report
