"""Find and open what a user named: a folder, a cached Hub snapshot, or a Hub id that is in the local cache.

Nothing is downloaded and nothing in the source is written, so a read-only folder will do.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from .formats.dcp_read import DcpFolder, is_dcp
from .formats.files import ASSETS, METADATA, inner_folder
from .formats.safetensors import SafetensorsFolder
from .formats.staging import refuse_unfinished
from .formats.tensors import TensorSource

__all__ = ["assets_of", "find", "open_source"]

_HUB_ID = re.compile(r"^(?P<org>[A-Za-z0-9][\w.-]*)/(?P<name>[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.-]+))?$")


def _cache() -> Path:
    """The Hub cache, by the variables that huggingface_hub reads."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(named)))


def find(name: str | os.PathLike[str]) -> Path:
    """The folder that `name` means.

    A folder means itself, `models--org--name` its main snapshot, and `org/name[@revision]` the snapshot of that Hub id
    in the local cache.

    Raises:
        FileNotFoundError: no such thing here, with the command that would fetch a Hub id.
    """
    folder = Path(name)
    if not os.fspath(name):
        raise FileNotFoundError("the name of the checkpoint is empty; expected a folder or a Hub id (org/name)")
    if folder.is_file():
        raise FileNotFoundError(f"{name} is a file; expected the folder that it lies in")
    if folder.is_dir():
        if folder.name.startswith("models--") and (folder / "snapshots").is_dir():
            return _snapshot(folder, "main")
        return folder
    match = _HUB_ID.match(str(name))
    if match is None:
        raise FileNotFoundError(f"{name} is neither a folder nor a Hub id (org/name)")
    repository = _cache() / f"models--{match['org']}--{match['name']}"
    if not repository.is_dir():
        raise FileNotFoundError(
            f"{name} is no folder here and not in the Hub cache ({repository.parent}). Fetch it first: hf "
            f"download {match['org']}/{match['name']}"
        )
    return _snapshot(repository, match["revision"] or "main")


def _snapshot(repository: Path, revision: str) -> Path:
    reference = repository / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    folder = repository / "snapshots" / commit
    if not re.fullmatch(r"[\w-][\w.-]*", commit) or not folder.is_dir():
        raise FileNotFoundError(
            f"{repository} has no snapshot of {revision!r}; it has "
            f"{sorted(p.name for p in (repository / 'snapshots').glob('*'))}"
        )
    return folder


def open_source(folder: Path, *, follow_symlinks: bool = False) -> TensorSource:
    """Open a DCP step folder or a Hugging Face folder for reading by rows.

    Args:
        folder: the folder; nothing in it is written.
        follow_symlinks: trust links that lead out of it.

    Returns:
        Its tensors.

    Raises:
        FileNotFoundError: it is neither, or files are missing.
        ValueError: a conversion of ours that never finished, or hostile files.
    """
    refuse_unfinished(folder)
    if is_dcp(folder):
        weights = sorted(p.name for p in folder.glob("*.safetensors"))
        if weights:
            raise ValueError(
                f"{folder} holds a DCP checkpoint ({METADATA}) and {', '.join(weights[:3])}: which of them is the "
                "model? Move one of them to a folder of its own."
            )
        return DcpFolder(folder, follow_symlinks=follow_symlinks)
    if next(folder.glob("*.distcp"), None) is not None:
        raise FileNotFoundError(
            f"{folder} has DCP files and no {METADATA}, which is written last: a save that never finished. "
            "Take an earlier step."
        )
    return SafetensorsFolder(folder, follow_symlinks=follow_symlinks)


def assets_of(folder: Path, *, follow_symlinks: bool = False) -> Path:
    """The folder of a checkpoint's config and tokenizer: the folder itself on the Hub, `assets/` for DCP."""
    return inner_folder(folder, ASSETS, follow_symlinks=follow_symlinks) if is_dcp(folder) else folder
