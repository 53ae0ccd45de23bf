"""Real gloo ranks for tests: run a function on N forked processes and get each rank's result, or its
traceback by rank.
"""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def run_ranks(function: Callable[..., Any], nproc: int, *args: Any, timeout: float = 300) -> list[Any]:
    """Call `function(rank, *args)` on `nproc` ranks with torchrun's environment and a gloo group; results by rank.

    Raises AssertionError with the tracebacks, each headed by its rank, when a rank raised, died or took too long.
    """
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pipes, ranks = [], []
    for rank in range(nproc):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(function, rank, nproc, port, theirs, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        ranks.append(process)
    results, failures = [], []
    for rank, pipe in enumerate(pipes):
        try:
            ok, value = pipe.recv() if pipe.poll(timeout) else (False, f"no answer within {timeout} s")
        except EOFError:
            ok, value = False, "died without a word"
        results.append(value)
        if not ok:
            failures.append(f"rank {rank}: {value}")
    for process in ranks:
        process.join(5)
        if process.is_alive():
            process.kill()
    assert not failures, "\n".join(failures)
    return results


def _rank(
    function: Callable[..., Any], rank: int, nproc: int, port: int, pipe: Connection, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(nproc),
        LOCAL_WORLD_SIZE=str(nproc),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        pipe.send((True, function(rank, *args)))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(0)
