"""The backend `neuron` of torch.distributed, and what AWS's asks of a process that makes its first group."""

import os
import socket
from datetime import timedelta
from typing import Any

from neuron_emu import rules
from neuron_emu.build import extension
from neuron_emu.rules import Mode

__all__ = ["install", "visible_cores"]

VISIBLE = "NEURON_RT_VISIBLE_CORES"
_default_size: list[int] = []
_machine_cores: list[int] = []


def visible_cores(cores: int) -> list[int]:
    """The cores that NEURON_RT_VISIBLE_CORES gives this process (`3`, `0-3`, `0,2`); all of the host's when it is
    unset.

    Raises:
        ValueError: it is no list of cores, or names one that the host does not have.
    """
    text = os.environ.get(VISIBLE, "")
    if not text:
        return list(range(cores))
    found: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    except ValueError:
        raise ValueError(f"{VISIBLE}={text!r} is no list of cores; expected 3, 0-3 or 0,2") from None
    if not found or max(found) >= cores:
        raise ValueError(f"{VISIBLE}={text!r} names cores that an emulated host of {cores} does not have")
    return found


def install(cores: int) -> None:
    """Register the backend of a machine with so many cores, and let destroy_process_group do what the rule says."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    _machine_cores.append(cores)
    dist.Backend.register_backend("neuron", _create, devices=["neuron"])
    _watch_destroy(dist)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    native = extension()
    first = not _default_size
    if first:
        _claim_core(store, rank, size)
        _default_size.append(size)
    if rules.mode("group-time-limit") is Mode.OFF:
        timeout = timedelta(days=1)
    from torch.distributed import ProcessGroupGloo

    gloo = ProcessGroupGloo(store, rank, size, timeout=timeout)
    return native.make_process_group(gloo, _default_size[0], first)


def _claim_core(store: Any, rank: int, size: int) -> None:
    """One core for this process: its own, and no other's."""
    native = extension()
    if by := native.runtime_started_by():
        native.meet(
            "runtime-before-process-group",
            by,
            f"The neuron runtime was started by {by} before init_process_group, which then cannot "
            f"give this process its core. "
            "Make the group first.",
        )
    local = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if not os.environ.get(VISIBLE):
        os.environ[VISIBLE] = str(local)
    own = visible_cores(_machine_cores[-1])
    if len(own) > 1:
        native.meet(
            "one-core-per-process",
            f"{VISIBLE}={os.environ[VISIBLE]}",
            f"Attempted to have more than one device per process in distributed setup: "
            f"{VISIBLE}={os.environ[VISIBLE]} reserves "
            f"{len(own)} cores for each rank. Leave it unset, or set each rank's own single core.",
        )
    for core in own:
        key = f"neuron-emu/{socket.gethostname()}/{core}"
        if store.add(key, 1) > 1:
            native.meet("core-taken", f"core {core}", f"core {core} is taken by another process of this host")
    native.set_devices(local, 1, local_size)
    native.start_runtime("init_process_group")


def _watch_destroy(dist: Any) -> None:
    from torch.distributed import distributed_c10d

    destroy = distributed_c10d.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        whole = group is None or group is dist.group.WORLD
        destroy(group)
        if not whole:
            return
        _default_size.clear()
        if rules.mode("destroy-ends-process") is Mode.REFUSE:
            print("neuron (emulated): destroy_process_group ends the process (rule 'destroy-ends-process')", flush=True)
            os._exit(1)
        extension().note("destroy-ends-process", "destroy_process_group")

    distributed_c10d.destroy_process_group = destroy_process_group
    dist.destroy_process_group = destroy_process_group
