"""Contract of the package: it needs nothing but torch and safetensors, and can be vendored under another name. (Cases
068, 121, 127.)"""

import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import hf_ckpt_adapter
import pytest
from hf_tiny import config, state, write_hub

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_importing_the_package_pulls_in_torch_alone() -> None:
    import subprocess
    import sys

    code = (
        # what torch's own DCP module brings with it is torch's affair
        "import sys, torch, torch.distributed.checkpoint; before = set(sys.modules); from hf_ckpt_adapter import *;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before} - {'hf_ckpt_adapter'} - "
        "sys.stdlib_module_names;"
        "sys.exit(str(new - {'torch', 'safetensors'}) if new - {'torch', 'safetensors'} else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


PACKAGE = Path(hf_ckpt_adapter.__file__).parent


def test_numpy_is_not_needed(tmp_path: Path) -> None:
    cfg = config(moe=True)
    write_hub(tmp_path / "hub", cfg, state(cfg))
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from hf_ckpt_adapter import convert_checkpoint, diff\n"
        f"base = {str(tmp_path)!r}\n"
        "convert_checkpoint(base + '/hub', base + '/dcp', 'native')\n"
        "convert_checkpoint(base + '/dcp', base + '/out', 'fused')\n"
        "assert diff(base + '/hub', base + '/out').equal\n"
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


def test_the_first_example_of_the_readme_runs() -> None:
    readme = Path(__file__).parents[2] / "packages" / "hf-ckpt-adapter" / "README.md"
    match = re.search(r"```python\n(.*?)```", readme.read_text(), re.S)
    assert match
    result = subprocess.run([sys.executable, "-c", match[1]], capture_output=True, text=True)
    assert result.returncode == 0 and "w1_EFD" in result.stdout, result.stderr


def test_every_import_is_torch_safetensors_the_standard_library_or_relative() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r"\s*(?:from|import)\s+([\w.]+)", line)
            if match and not match[1].startswith("."):
                root = match[1].split(".")[0]
                allowed = root in ("torch", "safetensors", "__future__") or root in sys.stdlib_module_names
                assert allowed, f"{path}:{number}: {line.strip()}: use a relative import or drop the dependency"


def test_the_folder_can_be_vendored_under_any_name_and_passes_its_tests_there(tmp_path: Path) -> None:
    """Copy the package as `our.weights`, rename it in copies of its tests, and run those with the original
    hidden."""
    shutil.copytree(PACKAGE, tmp_path / "our" / "weights", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "our" / "__init__.py").write_text("")
    (tmp_path / "hf_ckpt_adapter.py").write_text("raise ImportError('the original must not be used')")
    (tmp_path / "tests").mkdir()
    for name in ("hf_tiny.py", "names/test_read.py", "names/test_write.py", "test_cli.py", "test_titan_folder.py"):
        text = (Path(__file__).parent / name).read_text().replace("hf_ckpt_adapter", "our.weights")
        (tmp_path / "tests" / Path(name).name).write_text(text)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tmp_path / "tests")],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


def test_a_module_of_an_earlier_version_is_answered_with_the_new_one() -> None:
    moved = {"mapping": "names", "dcp_io": "formats.dcp_read", "publish": "formats.staging"}
    for old, new in moved.items():
        for code in (f"import hf_ckpt_adapter.{old}", f"from hf_ckpt_adapter import {old}"):
            with pytest.raises(ImportError, match=rf"hf_ckpt_adapter\.{old} is now hf_ckpt_adapter\.{re.escape(new)}$"):
                exec(code)
        import_module(f"hf_ckpt_adapter.{new}")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'hf_ckpt_adapter\.nothing'"):
        import_module("hf_ckpt_adapter.nothing")


def test_completion_shows_the_lazy_names_and_the_version_is_the_installed_one() -> None:
    code = "import hf_ckpt_adapter as h; print(*sorted(set(h.__all__) - set(dir(h))), h.__version__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == f"{version('hf-ckpt-adapter')}\n", result
