"""Contract: the package shows its names and its declared version; old names are answered with the new ones."""

import subprocess
import sys
from importlib import import_module
from importlib.metadata import version

import neuron_parallel
import pytest


def test_names_and_version_are_shown():
    assert set(neuron_parallel.__all__) <= set(dir(neuron_parallel))
    assert neuron_parallel.__version__ == version("neuron-parallel")


@pytest.mark.parametrize(("old", "new"), neuron_parallel._MOVED.items())
def test_an_old_module_is_answered_with_the_new_one_which_exists(old, new):
    for line in (
        f"import neuron_parallel.{old}",
        f"from neuron_parallel import {old}",
        f"from neuron_parallel.{old} import x",
    ):
        with pytest.raises(ImportError, match=rf"neuron_parallel\.{old} is now neuron_parallel\.{new}$"):
            exec(line)
    import_module(f"neuron_parallel.{new}")


def test_the_function_that_hid_its_module_is_answered_with_its_new_name():
    with pytest.raises(ImportError, match=r"is now neuron_parallel\.core_memory"):
        exec("from neuron_parallel.memory import memory")
    with pytest.raises(TypeError, match=r"is now neuron_parallel\.core_memory"):
        neuron_parallel.memory()


def test_no_exported_function_hides_a_module():
    code = (
        "import neuron_parallel as n, types; "
        "print([name for name in n.__all__ if isinstance(getattr(n, name), types.ModuleType)])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
    for name in neuron_parallel.__all__:
        with pytest.raises(ModuleNotFoundError):
            import_module(f"neuron_parallel.{name}")
