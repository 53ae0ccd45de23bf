"""The C++ half, built once for each torch and kept.

setuptools, which torch itself depends on, drives the compiler through torch's BuildExtension; ninja makes it faster
where
there is one. The result is kept in $NEURON_EMU_CACHE (by default ~/.cache/neuron-emu), in a folder that is named for
what it was built from, and appears there whole or not at all.
"""

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

__all__ = ["extension", "folder"]

NAME = "neuron_emu_C"
SOURCES = Path(__file__).parent / "csrc"


def extension() -> ModuleType:
    """The C++ module; built first, if it is not there.

    Raises:
        RuntimeError: no compiler, or it failed; says what to install, or what it printed.
    """
    if NAME in sys.modules:
        return sys.modules[NAME]
    library = folder() / f"{NAME}.so"
    if not library.exists():
        _build(library)
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(library))
    spec = importlib.util.spec_from_file_location(NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[NAME] = module
    return module


def folder() -> Path:
    """Where the build for these sources, this torch and this Python is kept."""
    import torch

    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    digest.update(f"{torch.__version__} {sysconfig.get_config_var('SOABI')}".encode())
    home = Path(os.environ.get("NEURON_EMU_CACHE") or Path.home() / ".cache" / "neuron-emu")
    return home / digest.hexdigest()[:16]


def _build(library: Path) -> None:
    from filelock import FileLock

    library.parent.mkdir(parents=True, exist_ok=True)
    # Ranks that start together build once.
    with FileLock(library.parent / "lock"):
        if library.exists():
            return
        compiler = os.environ.get("CXX") or "c++"
        if shutil.which(compiler.split()[0]) is None:
            raise RuntimeError(
                f"neuron-emu builds its C++ half on first use, and finds no compiler {compiler!r}. "
                f"Install one (on Debian: "
                "apt-get install g++; 9 or later), or name it in CXX, and run again."
            )
        print(f"neuron-emu: building the emulated device with {compiler} (minutes, once)", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            # A process of its own: autoload comes by here in the middle of `import torch`.
            command = [sys.executable, "-m", "neuron_emu.build", scratch]
            done = subprocess.run(
                command, env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, capture_output=True, text=True
            )
            if done.returncode:
                tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
                raise RuntimeError(f"neuron-emu: the C++ half does not build with {compiler}:\n{tail}")
            os.replace(Path(scratch) / f"{NAME}.so", library)


def _compile(target: Path) -> None:
    """Compile into `target`; what the process that builds runs."""
    from setuptools import Distribution
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    flags = ["-O1", "-g0", "-std=c++20", "-fvisibility=hidden", "-Wno-unused-parameter"]
    built = CppExtension(NAME, [str(SOURCES / "all.cpp")], include_dirs=[str(SOURCES)], extra_compile_args=flags)
    distribution = Distribution({"name": NAME, "ext_modules": [built]})
    command = BuildExtension(distribution, no_python_abi_suffix=True)
    command.build_temp = str(target / "objects")
    command.build_lib = str(target)
    command.finalize_options()
    command.run()


if __name__ == "__main__":
    _compile(Path(sys.argv[1]))
