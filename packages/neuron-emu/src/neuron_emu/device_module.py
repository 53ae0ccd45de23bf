"""torch.neuron: the calls that torch-neuronx's module has, as the emulated device answers them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from neuron_emu.build import extension

__all__ = ["module"]

DeviceLike = "torch.device | int | str | None"


@dataclass(frozen=True)
class Properties:
    """What get_device_properties returns: a name that says emulated, and bytes of device memory."""

    name: str
    total_memory: int


class Stream(torch.Stream):
    """A stream of the emulated device; all has happened when a call returns."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device("neuron", _index(device)), priority=priority)


class Event(torch.Event):
    """An event of the emulated device. It has no times."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
        return super().__new__(
            cls, device="neuron", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


def module() -> ModuleType:
    """The module that becomes torch.neuron."""
    made = ModuleType("torch.neuron", "The emulated neuron device (neuron-emu).")
    for name, value in _members().items():
        setattr(made, name, value)
    return made


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "neuron":
        raise ValueError(f"expected a neuron device, found {device}")
    return current_device() if device.index is None else device.index


def is_available() -> bool:
    return bool(extension().device_count() > 0)


def is_initialized() -> bool:
    return bool(extension().runtime_started_by())


def init() -> None:
    extension().start_runtime("torch.neuron.init")


def device_count() -> int:
    return int(extension().device_count())


def current_device() -> int:
    return int(torch._C._accelerator_getDeviceIndex())


def set_device(device: Any) -> None:
    """Raises ValueError for an index that is no device of this host."""
    index = _index(device)
    if not 0 <= index < device_count():
        raise ValueError(f"Invalid device id: {index}. Valid range is 0 to {device_count() - 1}")
    torch._C._accelerator_setDeviceIndex(index)


def get_device_name(device: Any = None) -> str:
    return "Trainium2 logical core (emulated)"


def get_device_properties(device: Any = None) -> Properties:
    """Starts the runtime, as torch-neuronx's does."""
    extension().start_runtime("get_device_properties")
    return Properties(get_device_name(device), int(extension().capacity()))


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (2, 0)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float32, torch.float16, torch.bfloat16]


def synchronize(device: Any = None) -> None:
    """Wait for the device; errors that it has to report are raised here."""
    torch._C._accelerator_synchronizeDevice(_index(device))


def manual_seed(seed: int) -> None:
    extension().default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    manual_seed(seed)


def seed() -> None:
    extension().default_generator(current_device()).seed()


def initial_seed() -> int:
    return int(extension().default_generator(current_device()).initial_seed())


def get_rng_state(device: Any = None) -> torch.Tensor:
    """16 bytes, seed and offset, that no operator reads."""
    state: torch.Tensor = extension().default_generator(_index(device)).get_state()
    return state


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    extension().default_generator(_index(device)).set_state(new_state)


def memory_stats(device: Any = None) -> dict[str, Any]:
    """Bytes by kind (current, peak, allocated, freed), flat as torch.accelerator names them and nested as
    torch-neuronx does.
    """
    flat = torch._C._accelerator_getDeviceStats(_index(device))
    stats: dict[str, Any] = {}
    for kind in ("allocated_bytes", "active_bytes", "reserved_bytes"):
        stats[kind] = flat[kind]["all"]
        stats |= {f"{kind}.all.{what}": value for what, value in flat[kind]["all"].items()}
    stats |= {
        "num_alloc_retries": flat["num_alloc_retries"],
        "num_ooms": flat["num_ooms"],
        "num_tensor_frees": flat["num_device_free"],
        "allocation_requests": flat["num_device_alloc"],
    }
    return stats


def memory_allocated(device: Any = None) -> int:
    return int(memory_stats(device)["allocated_bytes"]["current"])


def max_memory_allocated(device: Any = None) -> int:
    return int(memory_stats(device)["allocated_bytes"]["peak"])


def memory_reserved(device: Any = None) -> int:
    return int(memory_stats(device)["reserved_bytes"]["current"])


def max_memory_reserved(device: Any = None) -> int:
    return int(memory_stats(device)["reserved_bytes"]["peak"])


def reset_peak_memory_stats(device: Any = None) -> None:
    torch._C._accelerator_resetPeakStats(_index(device))


def reset_accumulated_memory_stats(device: Any = None) -> None:
    torch._C._accelerator_resetAccumulatedStats(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) bytes of the core."""
    total = int(extension().capacity())
    return max(total - memory_allocated(device), 0), total


def empty_cache() -> None:
    """Nothing: there is no cache."""


@contextmanager
def device(device: Any) -> Iterator[None]:
    """Another current device for a while."""
    before = current_device()
    index = _index(device)
    if index >= 0:
        set_device(index)
    try:
        yield
    finally:
        set_device(before)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("neuron", _index(device)))


def default_stream(device: Any = None) -> torch.Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=torch._C._autograd.DeviceType.PrivateUse1.value)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Another current stream for a while."""
    if stream is None:
        yield
        return
    before = current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def _members() -> dict[str, Any]:
    public = (
        is_available, is_initialized, init, device_count, current_device, set_device, get_device_name,
        get_device_properties, get_device_capability, is_bf16_supported, get_amp_supported_dtype, synchronize,
        manual_seed, manual_seed_all, seed, initial_seed, get_rng_state, set_rng_state, memory_stats, memory_allocated,
        max_memory_allocated, memory_reserved, max_memory_reserved, reset_peak_memory_stats,
        reset_accumulated_memory_stats, mem_get_info, empty_cache, device, current_stream, default_stream, set_stream,
        stream, Stream, Event, Properties,
    )  # fmt: skip
    members: dict[str, Any] = {value.__name__: value for value in public}
    members["_is_in_bad_fork"] = lambda: False
    members["emulated"] = True
    return members
