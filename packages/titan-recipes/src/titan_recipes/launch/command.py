"""The command that continues a run, as the user would type it again. No torch."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import environment

__all__ = ["resume_command"]

_PROGRAM = "apps/train"

_ONCE = ("--dump_folder", "--checkpoint.load_step")
"""Options that hold for one start: the folder is said anew, and a run that went back goes on from its newest step."""


def resume_command(arguments: Sequence[str], folder: str) -> str:
    """Return the command line of this process, going on in `folder`: the same launcher, program and options.

    Args:
        arguments: what followed the program's name.
        folder: the run's folder.
    """
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != "--resume" and argument.partition("=")[0] not in _ONCE:
            kept.append(argument)
        skip = not skip and argument in _ONCE
    return shlex.join([*_typed(len(arguments)), *kept, "--resume", "--dump_folder", folder])


def _typed(arguments: int) -> list[str]:
    """What stood before the program's own arguments: uv, torchrun, python, whichever started it."""
    uv = ["uv", "run"] if environment.is_under_uv() else []
    if environment.is_launched():
        return [*uv, *(_launcher(arguments) or _torchrun())]
    return [*uv, _program()] if uv else ["python", _program()]


def _program() -> str:
    path = Path(sys.argv[0])
    path = path.parent if path.name == "__main__.py" else path
    name = str(path)
    return name if name.endswith(_PROGRAM) else _PROGRAM


def _launcher(arguments: int) -> list[str]:
    """The launcher's own command line up to the program, from the parent process; empty where it cannot be read."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []
    words = words[: len(words) - arguments]
    if not words or not words[-1].removesuffix("/__main__.py").endswith(_PROGRAM):
        return []
    if len(words) > 1 and Path(words[1]).name == "torchrun":
        return ["torchrun", *words[2:]]
    return ["python", *words[1:]] if Path(words[0]).name.startswith("python") else words


def _torchrun() -> list[str]:
    hosts, ranks = environment.host_count(), environment.local_world_size()
    nodes = ["--nnodes", str(hosts)] if hosts > 1 else []
    return ["torchrun", *nodes, "--nproc-per-node", str(ranks), _program()]
