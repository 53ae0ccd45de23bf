"""The files beside the weights that are copied as they are: generation config and tokenizer."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from .formats.files import COPIED_FILES, regular_file

__all__ = ["asset_files"]


def asset_files(source: Path, *, follow_symlinks: bool = False) -> list[tuple[str, Path]]:
    """Generation config and tokenizer files that `source` has: name and checked path of each."""
    found = []
    for name in COPIED_FILES:
        with suppress(FileNotFoundError):
            found.append((name, regular_file(source, name, follow_symlinks=follow_symlinks)))
    return found
