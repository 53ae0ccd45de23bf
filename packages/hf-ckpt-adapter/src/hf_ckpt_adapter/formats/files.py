"""The files of a model folder: what each is called, and how one is opened whose folder nobody vouches for.

Names, links and contents of a folder that is read are hostile until checked. A name must be plain. A link must stay
inside the folder, or lead to a Hub cache's own `blobs/`. A file must be a regular one. JSON must not say a thing twice.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "ASSETS",
    "ASSET_FILES",
    "CONFIG",
    "COPIED_FILES",
    "INDEX",
    "MARKER",
    "METADATA",
    "SIDE_FILE",
    "SIDE_FOLDER",
    "SINGLE",
    "TOKENIZER_FILES",
    "UNFINISHED",
    "OpenFiles",
    "chunk_file",
    "inner_folder",
    "is_model_file",
    "is_plain",
    "parse_json",
    "pread_exactly",
    "read_json",
    "regular_file",
    "shard_file",
    "shards_missing",
]

CONFIG = "config.json"
SINGLE = "model.safetensors"  # the weights of a Hugging Face folder, when they are in one file
INDEX = "model.safetensors.index.json"  # which file has which tensor, when they are in several
METADATA = ".metadata"  # what a DCP checkpoint consists of; written last
ASSETS = "assets"  # the folder of a DCP checkpoint that has what lies beside the weights of a Hugging Face folder
SIDE_FOLDER = "titan_state"  # a folder of its own: a server that globs *.safetensors does not take it for weights
SIDE_FILE = f"{SIDE_FOLDER}/{SINGLE}"
MARKER = "complete.json"  # what a finished conversion consists of; written last
UNFINISHED = "unfinished"  # the folder of notes of a conversion that is not finished
# Everything that a tokenizer or a chat template may consist of, by the names that transformers reads.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
COPIED_FILES = ("generation_config.json", *TOKENIZER_FILES)  # files that a conversion copies as they are
ASSET_FILES = (CONFIG, *COPIED_FILES)
_SHARD = re.compile(r"(?P<stem>[\w.-]*-)\d{5}(?P<rest>-of-(?P<count>\d{5})\.safetensors)")
_WEIGHT_FILES = re.compile(r"model[\w.-]*\.safetensors(\.index\.json)?|__\d+_\d+\.distcp|\.metadata")
MAX_OPEN = 32  # of the 1,024 files that a process may have open; a checkpoint of many ranks has more


def shard_file(number: int, count: int) -> str:
    """File `number` (from 1) of the `count` that a Hugging Face folder's weights are in."""
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def shards_missing(names: Iterable[str]) -> list[str]:
    """Files that other files' names count (`-of-00003`) and that are not among them; a checkpoint has all its
    shards.
    """
    here = set(names)
    sets = {match.group("stem", "rest", "count") for match in map(_SHARD.fullmatch, here) if match}
    return sorted({f"{stem}{i:05d}{rest}" for stem, rest, count in sets for i in range(1, int(count) + 1)} - here)


def chunk_file(number: int, rank: int = 0) -> str:
    """File `number` (from 0) that a rank wrote of a DCP checkpoint."""
    return f"__{rank}_{number}.distcp"


def is_model_file(name: str) -> bool:
    """Whether a file of that name (relative to the folder) is part of a checkpoint, whoever wrote it."""
    folder, _, leaf = name.rpartition("/")
    return folder in ("", ASSETS, SIDE_FOLDER) and (leaf in ASSET_FILES or bool(_WEIGHT_FILES.fullmatch(leaf)))


def regular_file(folder: Path, name: str, *, follow_symlinks: bool = False) -> Path:
    """The real path of `folder/name`, once it is known to be a regular file of a plain name in `folder`.

    A Hugging Face cache snapshot (`models--x/snapshots/rev`) may link into its own `models--x/blobs`. Other links out
    of the folder need `follow_symlinks`.

    Raises:
        ValueError: a path instead of a name, a link out, or something that is not a file.
        FileNotFoundError: no such file.
    """
    if not name or name in (".", "..") or not is_plain(name):
        raise ValueError(f"{folder}: file name {name!r} is not a plain name inside the folder; refused")
    path = folder / name
    real = Path(os.path.realpath(path))
    home = Path(os.path.realpath(folder))
    allowed = [home]
    for snapshot in (home, home.parent):  # a folder of a snapshot (assets, native-only state) links there too
        if snapshot.parent.name == "snapshots" and snapshot.parent.parent.name.startswith("models--"):
            allowed.append(snapshot.parent.parent / "blobs")
    if real.parent not in allowed and not follow_symlinks:
        raise ValueError(
            f"{path} is a link to {real}, outside its folder; refused. Pass follow_symlinks "
            "(--follow-symlinks) if you trust it."
        )
    if not real.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if not stat.S_ISREG(real.stat().st_mode):
        raise ValueError(f"{path} is not a regular file; refused")
    return real


def is_plain(name: str) -> bool:
    """Whether `name` can be a file's name and is no path."""
    return len(name.encode(errors="surrogatepass")) <= 255 and not any(
        c in "/\\\0" or "\ud800" <= c <= "\udfff" for c in name
    )


def inner_folder(folder: Path, name: str, *, follow_symlinks: bool = False) -> Path:
    """`folder/name`, which need not exist; ValueError when it is a link and links are not followed."""
    path = folder / name
    if path.is_symlink() and not follow_symlinks:
        raise ValueError(
            f"{path} is a link to {os.path.realpath(path)}; refused. Pass follow_symlinks (--follow-symlinks) if you "
            "trust it."
        )
    return path


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} occurs twice")
    return result


def parse_json(text: bytes, where: str) -> Any:
    """JSON without duplicate keys; every way of failing is a ValueError that names `where` it stands."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None


def read_json(path: Path, limit: int, what: str) -> Any:
    """The JSON of a file that holds `what`.

    Raises:
        ValueError: more than `limit` bytes, no valid JSON, or a duplicate key.
    """
    size = path.stat().st_size
    if size > limit:
        raise ValueError(f"{path} has {size} bytes; {what} of up to {limit} is read")
    return parse_json(path.read_bytes(), str(path))


class OpenFiles:
    """Descriptors for reading, at most MAX_OPEN at a time: the one unused for longest is closed first."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def descriptor(self, path: Path) -> int:
        """A descriptor of `path`, valid until MAX_OPEN other files have been asked for."""
        found = self._open.pop(path, None)
        if found is None:
            if len(self._open) >= MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            found = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._open[path] = found
        return found

    def close(self) -> None:
        """Close them all."""
        while self._open:
            os.close(self._open.popitem()[1])


def pread_exactly(descriptor: int, out: memoryview, offset: int, what: str) -> None:
    """Fill `out` from `offset`; ValueError naming `what` when the file ends first."""
    done = 0
    while done < len(out):
        got = os.preadv(descriptor, [out[done:]], offset + done)
        if got == 0:
            raise ValueError(f"{what}: the file ends {len(out) - done} bytes early; it was changed while being read")
        done += got
