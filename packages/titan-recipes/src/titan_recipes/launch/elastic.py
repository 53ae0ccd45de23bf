"""Start the ranks through torch's elastic launcher, pass signals on to them, and report how they ended."""

import logging
import multiprocessing
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from ..config.options import Options
from ..errors import RankFailed
from ..logs import say
from .rank import Outcome, run_rank

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["launch"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def launch(options: Options, nproc: int) -> Outcome:
    """Run `nproc` ranks on this host and wait for them. Raises RankFailed when one failed (its traceback is already
    out).

    On CPU ranks are forked, so that the launcher's imports (10 s and more of TorchTitan) are paid once; accelerators'
    runtimes do not survive a fork, so there they are spawned.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks print their own tracebacks
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="fork" if options.device == "cpu" else "spawn",
        signals_to_handle="SIGQUIT",  # SIGINT and SIGTERM are passed on below: ranks stop between steps, not at once
    )
    with _signals_passed_on() as received:
        try:
            outcomes = elastic_launch(config, run_child)(options, os.getpid())
        except _NoRanksYet:
            return _stopped_early(received[0])
        except ChildFailedError as error:
            # A rank that trains takes the signal as a request; only one that still starts ends of it.
            if received and all(-f.exitcode in (*received, signal.SIGTERM) for f in error.failures.values()):
                return _stopped_early(received[0])
            raise RankFailed(_explain(error.failures, options.dump_folder)) from None
    # The rank that exports is another than the first with pipeline stages.
    return next((outcome for outcome in outcomes.values() if outcome.signal is not None), outcomes[0])


class _NoRanksYet(BaseException):
    """A signal came before there was a rank to pass it on to."""


def _stopped_early(number: int) -> Outcome:
    say(f"\nstopped by {signal.Signals(number).name} before training began; nothing new was saved")
    return Outcome(0, number)


def run_child(options: Options, launcher: int) -> Outcome:
    """Be a rank of process `launcher`: end with it, and take signals as a process does that has no handler yet."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork inherits the launcher's, which would swallow it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _end_with_parent(launcher)
    return run_rank(options)


def _end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone; Linux alone can."""
    import ctypes

    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (AttributeError, OSError):
        return
    if os.getppid() != parent:  # gone before the call
        os._exit(1)


def _explain(failures: Mapping[int, "ProcessFailure"], folder: str) -> str:
    """One line; the cause itself was printed by the rank it happened on.

    Its peers fail after it, of broken connections.
    """
    killed = {rank: signal.Signals(-f.exitcode).name for rank, f in failures.items() if f.exitcode < 0}
    if len(killed) == len(failures):
        how = ", ".join(f"rank {rank} was killed by {name}" for rank, name in sorted(killed.items()))
        return f"{how} (by the kernel when memory ran out, perhaps); logs are in {folder}/logs"
    ranks = ", ".join(str(rank) for rank in sorted(failures.keys() - killed.keys()))
    return f"training failed on rank {ranks}; the first message above is the cause, logs are in {folder}/logs"


@contextmanager
def _signals_passed_on() -> Iterator[list[int]]:
    """Send SIGTERM to every rank when this process gets SIGINT or SIGTERM, and keep waiting for them; yields those
    received.

    A terminal's Ctrl-C reaches the ranks by itself as well; they take SIGTERM as a repetition, and a second SIGINT as
    "now".
    """
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        ranks = multiprocessing.active_children()
        if not ranks:
            raise _NoRanksYet
        for rank in ranks:
            if rank.pid is not None:
                os.kill(rank.pid, signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.stdout.flush()
