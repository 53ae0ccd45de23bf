"""Write the files of a conversion, each kept if an earlier run finished it, and publish them as a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from .assets import asset_files
from .config import config_bytes
from .formats.files import CONFIG
from .formats.safetensors import split_shards, tensor_order
from .formats.staging import Staging
from .formats.tensors import TensorSource
from .options import Options
from .plan import Output, Plan
from .report import Report
from .stream import Block, stream

__all__ = ["Folder", "Progress"]

Progress = Callable[[int, int], None]
"""Called with tensor bytes done and in all."""


class Folder:
    """What the two kinds of output share: files of tensors, then small files beside them.

    Args:
        staging: the folder under construction.
        plan: what is written.
        options: for the size of a shard.
        report: where bytes and files are counted.
        side: native-only state by native name.
        assets_dir: where the tokenizer is copied from.
        follow_symlinks: trust links that lead out of `assets_dir`.
    """

    kind = ""

    def __init__(
        self,
        staging: Staging,
        plan: Plan,
        options: Options,
        report: Report,
        side: dict[str, torch.Tensor],
        assets_dir: Path,
        follow_symlinks: bool,
    ) -> None:
        self.staging, self.plan, self.report, self.side = staging, plan, report, side
        self.assets_dir, self.follow_symlinks = assets_dir, follow_symlinks
        self.by_name = {o.name: o for o in plan.outputs}
        self.sizes = {o.name: o.info.nbytes for o in plan.outputs}
        shards = split_shards(self.sizes, options.max_shard_bytes)
        self.files = dict(zip(self.file_names(len(shards)), shards, strict=True))
        report.files = list(self.files)

    def file_names(self, count: int) -> list[str]:
        """Names of `count` files of tensors."""
        raise NotImplementedError

    def write_file(self, name: str, outputs: list[Output], source: TensorSource, count: Callable[[int], None]) -> None:
        """Write one file of tensors and note it; `count` is told the bytes of each block."""
        raise NotImplementedError

    def stream(self, source: TensorSource, outputs: list[Output]) -> Iterator[Block]:
        """The blocks of some outputs; what is odd in them is reported."""
        for block in stream(source, outputs):
            for found, count in ((self.report.not_finite, block.not_finite), (self.report.vanished, block.vanished)):
                if count:
                    found[block.output.name] = found.get(block.output.name, 0) + count
            yield block

    def write_rest(self) -> None:
        """Write what lies beside the tensors."""
        raise NotImplementedError

    def write(self, source: TensorSource, progress: Progress | None) -> None:
        """Write every file that is not there yet, then what belongs beside them, then publish."""
        total, done = sum(self.sizes.values()), 0

        def count(written: int) -> None:
            nonlocal done
            done += written
            self.report.bytes_written += written
            if progress is not None:
                progress(done, total)

        for name, tensors in self.files.items():
            order = [self.by_name[t] for t in tensor_order({t: self.by_name[t].info for t in tensors})]
            if name in self.staging.done:
                kept = sum(self.sizes[t] for t in tensors)
                done += kept
                self.report.bytes_resumed += kept
                continue
            self.write_file(name, order, source, count)
        self.write_rest()
        self.staging.commit(
            {
                "kind": self.kind,
                "layout": self.plan.layout_name,
                "tensors": {t: s for n in self.staging.done.values() for t, s in n["sums"].items()},
            }
        )

    def write_assets(self, folder: str) -> None:
        """config.json as the weights now are, and copies of generation config and tokenizer."""
        prefix = f"{folder}/" if folder else ""
        with self.staging.file(prefix + CONFIG) as file:
            file.write(config_bytes(self.plan.config, dtype=self.plan.dtype, tie=self.plan.tie))
        for name, path in asset_files(self.assets_dir, follow_symlinks=self.follow_symlinks):
            with self.staging.file(prefix + name) as file, open(path, "rb") as original:
                while data := original.read(1 << 20):
                    file.write(data)
