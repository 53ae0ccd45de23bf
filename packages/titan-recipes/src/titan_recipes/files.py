"""Write, then rename: what is half-written never has the name that a reader looks for."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing"]


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give a path beside `target` to write a file or a folder at, and rename that to `target` when the block ends.

    When the block raises, what it wrote is removed and `target` is as it was. A folder replaces no folder that has
    content.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    _remove(temporary)  # left by a process that was killed
    try:
        yield temporary
        temporary.replace(target)
    except BaseException:
        _remove(temporary)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
