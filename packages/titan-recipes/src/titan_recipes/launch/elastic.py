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
            outcomes = elastic_launch(config, run_rank)(options)
        except ChildFailedError as error:
            if received:  # the ranks were still starting: nothing of theirs to save
                say(f"\nstopped by {signal.Signals(received[0]).name} before the first step; nothing was saved")
                return Outcome(0, received[0])
            raise RankFailed(_explain(error.failures, options.dump_folder)) from None
    return outcomes[0]


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
        for rank in multiprocessing.active_children():
            if rank.pid is not None:
                os.kill(rank.pid, signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.stdout.flush()
