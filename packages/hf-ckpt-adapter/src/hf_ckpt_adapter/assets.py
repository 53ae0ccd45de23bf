"""The files beside the weights that are copied as they are: generation config and tokenizer."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from .formats.files import COPIED_FILES, regular_file

__all__ = ["asset_files"]


def asset_files(source: Path, *, follow_symlinks: bool = False) -> list[tuple[str, Path]]:
    """Generation config and tokenizer files of a folder.

    Args:
        source: the folder that has config.json.
        follow_symlinks: trust links that lead out of it.

    Returns:
        Name and checked path of each file that is there.

    Raises:
        ValueError: a link leads out of the folder, or something is no file.
    """
    found = []
    for name in COPIED_FILES:
        with suppress(FileNotFoundError):
            found.append((name, regular_file(source, name, follow_symlinks=follow_symlinks)))
    return found
