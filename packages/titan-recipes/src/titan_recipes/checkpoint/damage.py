"""Is a step folder still what was saved? By the size of its files, always cheap, or by the CRC of each record."""

import io
import zipfile
from pathlib import Path

from torch.distributed.checkpoint import CheckpointException, FileSystemReader

__all__ = ["damage"]


def damage(folder: Path, *, checksums: bool = False, part: tuple[int, int] = (0, 1)) -> str | None:
    """Return what is wrong with a step folder, or None.

    Args:
        folder: the step.
        checksums: whether to read every record and compare its CRC-32, which torch's zip format holds.
        part: (rank, ranks): with checksums, this rank looks at every `ranks`-th record.
    """
    try:
        records = list(FileSystemReader(str(folder)).read_metadata().storage_data.values())
    except (CheckpointException, OSError, EOFError, ValueError, KeyError, AttributeError, ImportError) as error:
        return f".metadata cannot be read ({type(error).__name__}: {error})"
    except Exception as error:  # unpickling a damaged file may raise anything
        return f".metadata cannot be read ({type(error).__name__}: {error})"
    needed: dict[str, int] = {}
    for record in records:
        needed[record.relative_path] = max(needed.get(record.relative_path, 0), record.offset + record.length)
    for name, size in sorted(needed.items()):
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size < size:
            return f"{name} has {file.stat().st_size:,} bytes of at least {size:,}"
    if checksums:
        rank, ranks = part
        for record in records[rank::ranks]:
            if not _intact(folder / record.relative_path, record.offset, record.length):
                return f"bytes {record.offset:,} to {record.offset + record.length:,} of {record.relative_path} changed"
    return None


def _intact(file: Path, offset: int, length: int) -> bool:
    with file.open("rb") as stream:
        stream.seek(offset)
        content = stream.read(length)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, NotImplementedError, OSError):
        return False
