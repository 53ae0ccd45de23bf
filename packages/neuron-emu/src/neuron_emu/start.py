"""Making the emulated device the process's `neuron` device."""

import atexit
import os
import sys
import sysconfig
from importlib.util import find_spec
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from neuron_emu import rules
from neuron_emu.build import extension
from neuron_emu.instances import instance_named
from neuron_emu.operators import KINDS, REGISTERED

__all__ = ["enable", "is_enabled", "options_of"]

_enabled: dict[str, Any] = {}


def is_enabled() -> bool:
    """Whether this process's `neuron` device is the emulated one."""
    return bool(_enabled)


def enable(cores: int | None = None, instance: str = "trn2.48xlarge", core_bytes: int | None = None) -> None:
    """Make `neuron` an emulated device of this process, and torch_neuronx importable. Once; again with the same is
    nothing.

    Args:
        cores: logical cores that the emulated host shows, at most the instance's; by default all of them.
        instance: a name in instances.INSTANCES; says how many cores there are, and how much memory each has.
        core_bytes: device memory of a core in bytes, in place of the instance's: small ones test what happens when it
            is full.

    Raises:
        RuntimeError: AWS's torch-neuronx is here, or another PrivateUse1 device has the place, or the C++ half cannot
            be built.
        ValueError: an unknown instance, or more cores than it has.
    """
    # First: with NEURON_EMU set, this very import enables the device.
    import torch

    machine = instance_named(instance)
    count = machine.cores if cores is None else cores
    if not 1 <= count <= machine.cores:
        raise ValueError(f"cores={cores}: {instance} has {machine.cores} logical cores (LNC=2)")
    asked = {"cores": count, "instance": instance, "core_bytes": core_bytes or machine.core_bytes}
    if _enabled:
        if _enabled != asked:
            raise RuntimeError(f"the emulated device was enabled as {_enabled} and cannot become {asked}")
        return
    _refuse_real_device()
    native = extension()
    for name, mode in rules.modes():
        native.set_mode(name, int(mode))
    native.set_internal_folders(*_folders(torch))
    native.set_capacity(asked["core_bytes"])
    native.set_launch_blocking(os.environ.get("NEURON_LAUNCH_BLOCKING") == "1")
    native.set_devices(0, *_visible(count))
    native.register_operators(_registered(torch), KINDS)

    from neuron_emu import device_module, names, process_group

    torch.utils.rename_privateuse1_backend("neuron")
    torch._register_device_module("neuron", device_module.module())
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    names.install()
    process_group.install(count)
    _enabled.update(asked)
    print(f"neuron-emu: device neuron is emulated on CPU ({count} cores of a {instance})", file=sys.stderr, flush=True)
    if path := os.environ.get("NEURON_EMU_REPORT"):
        atexit.register(_write_report, path, os.getpid())
        # Children of multiprocessing end without atexit, and with this.
        Finalize(None, _write_report, (path, os.getpid()), exitpriority=0)


def options_of(text: str) -> dict[str, Any]:
    """enable()'s arguments from the variable NEURON_EMU: `1`, or `cores=4,instance=trn2.3xlarge`.

    Raises:
        ValueError: a word that is none of them.
    """
    options: dict[str, Any] = {}
    for word in text.split(",") if text != "1" else []:
        name, _, value = word.partition("=")
        if name not in ("cores", "instance", "core_bytes") or not value:
            raise ValueError(
                f"NEURON_EMU={text!r}: expected 1, or words like cores=4, instance=trn2.48xlarge; found {word!r}"
            )
        options[name] = value if name == "instance" else int(value)
    return options


def _refuse_real_device() -> None:
    import torch

    if find_spec("torch_neuronx") is not None:
        raise RuntimeError(
            "torch_neuronx is installed here: neuron-emu does not stand in its way. Emulate in an "
            "environment without it, or run "
            "on the device."
        )
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise RuntimeError(f"PyTorch has room for one such device, and {taken!r} has it already")


def _visible(cores: int) -> tuple[int, int]:
    """(cores that this process has, cores that device_count() says), before it joins a group."""
    from neuron_emu.process_group import visible_cores

    own = visible_cores(cores)
    local = os.environ.get("LOCAL_WORLD_SIZE")
    total = int(local) if local and int(os.environ.get("WORLD_SIZE", "1")) > 1 else len(own)
    return max(len(own), total), total


def _registered(torch: Any) -> list[str]:
    """Full names of the operators that get a kernel of their own: those of REGISTERED that CPU runs whole."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    skipped = {"aten::resize_", "aten::select.int", "aten::_to_copy"}
    chosen = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet = rest.partition(".")[0]
        base = packet.removesuffix("_") if not packet.endswith("__") else packet
        if namespace != "aten" or not {packet, base} & REGISTERED:
            continue
        if has(name, "PrivateUse1"):
            continue
        # A composite without a kernel of CPU's own stays split, as it is there.
        whole = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
        if has(name, "CPU") or (any(has(name, key) for key in whole) and not has(name, "CompositeImplicitAutograd")):
            chosen.append(name)
    return [name for name in chosen if name not in skipped]


def _folders(torch: Any) -> tuple[list[str], list[str]]:
    """Folders whose lines are never meant, and those inside them whose lines are."""
    ours = str(Path(__file__).parent) + os.sep
    torch_home = str(Path(torch.__file__).parent) + os.sep
    paths = sysconfig.get_paths()
    library = [paths["stdlib"] + os.sep, paths["platstdlib"] + os.sep]
    packages = sorted({paths["purelib"] + os.sep, paths["platlib"] + os.sep})
    return [ours, torch_home, *library], packages


def _write_report(path: str, pid: int) -> None:
    from neuron_emu.report import counts, report

    if os.getpid() == pid and counts():
        rank = os.environ.get("RANK", "0")
        Path(path).with_name(f"{Path(path).name}.rank{rank}").write_text(report(lines_per_rule=100) + "\n")
