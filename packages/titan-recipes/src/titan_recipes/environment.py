"""What a launcher tells a rank: RANK, WORLD_SIZE and their kin are read here and nowhere else. No torch.

torchrun sets these variables, and so does anything that starts ranks as torchrun does. A process without them is alone:
rank 0 of 1, or the launcher of ranks still to come.
"""

import netrc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = [
    "blocks_at_each_launch",
    "has_agent_store",
    "has_wandb_login",
    "host_count",
    "is_first",
    "is_launched",
    "is_restart",
    "is_under_uv",
    "launch_count",
    "local_rank_zero",
    "local_world_size",
    "rank",
    "rendezvous_address",
    "set_where_unset",
    "usable_threads",
    "without_ranks",
    "world_size",
]

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Return whether a launcher started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """Return this process's rank, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks on all hosts, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Return the number of ranks on this host, 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_first() -> bool:
    """Return whether this process is rank 0, which speaks before the ranks know who has the loss."""
    return rank() == 0


def has_agent_store() -> bool:
    """Return whether torchrun keeps a store for the job that ranks may use before they have a process group."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def has_wandb_login() -> bool:
    """Return whether Weights & Biases could start here: it needs a key, unless it is told to send nothing."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False


def rendezvous_address() -> tuple[str, int]:
    """Return host and port of the job's store. Raises KeyError without a launcher."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def launch_count() -> int:
    """Return how often torchrun has restarted this job's ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def is_restart() -> bool:
    """Return whether the ranks of this job ran before: torchrun restarted them, or Slurm requeued the job."""
    return launch_count() > 0 or int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0


def host_count() -> int:
    """Return the number of hosts that the launcher started ranks on, 1 without a launcher."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def is_under_uv() -> bool:
    """Return whether `uv run` started this process: uv sets UV for what it runs."""
    return "UV" in os.environ


def usable_threads() -> int:
    """Return the threads that this rank may use: OMP_NUM_THREADS, else its share of the usable cores."""
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, _usable_cores() // local_world_size()))


def _usable_cores() -> int:
    """Cores that this process may use: a container or taskset often allows fewer than the host has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_BLOCKING = {"neuron": "NEURON_LAUNCH_BLOCKING", "cuda": "CUDA_LAUNCH_BLOCKING"}


def blocks_at_each_launch(device: str) -> tuple[str | None, bool]:
    """Return the variable that makes `device` synchronous (None: it always is), and whether it is set."""
    variable = _BLOCKING.get(device)
    return variable, variable is None or os.environ.get(variable) == "1"


def set_where_unset(variables: Mapping[str, str]) -> list[str]:
    """Set what the user did not, for this process and its children; returns the names that were set."""
    names = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in names})
    return names


def without_ranks() -> dict[str, str]:
    """Return a copy of the environment for a child that is no rank of this job."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith("TORCHELASTIC")
    }


@contextmanager
def local_rank_zero() -> Iterator[None]:
    """Be local rank 0 for a while, as a rehearsal is."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before
