"""Rules about the repository: layers declare what they import and install alone, nothing tracked names a host or a
machine's path, and a Neuron image's own torch survives the README's command."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(file.parent.name for file in (ROOT / "packages").glob("*/pyproject.toml"))
BELOW = [package for package in PACKAGES if package != "titan-recipes"]


ON_A_NEURON_HOST = {"nki", "torch-neuronx"}
"""AWS's own: an image brings them, and what an index has under these names is empty. No layer declares them."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(package: str) -> set[str]:
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    extras = [r for group in project.get("optional-dependencies", {}).values() for r in group]
    return {normal(re.split(r"[^\w.-]", r)[0]) for r in [*project.get("dependencies", []), *extras]}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_in_a_layer_is_declared(package):
    modules = importlib.metadata.packages_distributions()
    allowed = declared(package)
    for file in (ROOT / "packages" / package / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                if top in sys.stdlib_module_names or normal(top) == package:
                    continue
                owners = {normal(owner) for owner in modules.get(top, [top])}
                where = f"{file.relative_to(ROOT)}:{node.lineno} imports {name}"
                assert owners & (allowed | ON_A_NEURON_HOST), (
                    f"{where}; declare one of {sorted(owners)} in packages/{package}/pyproject.toml"
                )


@pytest.mark.parametrize("package", BELOW)
def test_a_layer_below_titan_recipes_loads_neither_torchtitan_nor_transformers_nor_datasets(package):
    name = package.replace("-", "_")
    code = rf"""
import importlib, json, pkgutil, re, sys
import {name}
for module in pkgutil.walk_packages({name}.__path__, "{name}."):
    # NKI kernels are written in a language that only a Neuron host or nki-sim has: imported where one is launched.
    if not re.search(r"\.(__main__|toolchain|moves|kernel\w*)$", module.name):
        importlib.import_module(module.name)
print(json.dumps(sorted({{m.partition(".")[0] for m in sys.modules}})))
"""
    # The workspace has neuron-emu, which `import torch` loads as it loads any backend.
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert child.returncode == 0, child.stderr
    loaded = set(json.loads(child.stdout.splitlines()[-1]))
    siblings = {p.replace("-", "_") for p in PACKAGES} - {name}
    assert not loaded & ({"torchtitan", "transformers", "datasets"} | siblings)


def test_runtime_dependencies_name_no_sibling_but_for_titan_recipes():
    for package in BELOW:
        project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
        names = {normal(re.split(r"[^\w.-]", r)[0]) for r in project.get("dependencies", [])}
        assert not names & set(PACKAGES), f"packages/{package} depends on a sibling"


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def test_no_tracked_file_names_a_package_index_or_is_large():
    hosts = "|".join(["pypi" + r"\.org", "python" + r"hosted\.org", r"pypi\.[a-z]+\.", r"/simple/"])
    for file in tracked():
        assert file.stat().st_size < 1 << 20, f"{file.relative_to(ROOT)} is over 1 MiB"
        assert file.name != "uv.lock", "uv.lock is generated, not committed"
        if file.suffix != ".png":
            found = re.search(rf"https?://\S*({hosts})", file.read_text(encoding="utf-8"))
            assert not found, f"{file.relative_to(ROOT)} names {found and found[0]}"


def test_the_root_pins_every_direct_dependency_exactly_and_by_date():
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [r for group in root["dependency-groups"].values() for r in group if isinstance(r, str)]
    direct = [*root["project"]["dependencies"], *groups]
    assert all("==" in r for r in direct if normal(r) not in PACKAGES)
    assert "exclude-newer" in root["tool"]["uv"]


def test_the_lock_has_hashes_for_everything_and_no_host():
    text = (ROOT / "requirements.lock").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert len(entries) > 50
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in text


def stub_wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel with one module of that name."""
    file = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", f"__version__ = {version!r}\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return file


def test_a_neuron_image_keeps_its_torch_and_torch_neuronx(tmp_path):
    """A stand-in for the image: a venv with a stub torch-neuronx and another patch release of (a stub) torch."""
    uv = shutil.which("uv")
    assert uv is not None
    command = re.search(
        r"^pip install uv && (uv pip install --python .*)$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert command is not None
    venv = tmp_path / "image"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(venv)], check=True)
    python = venv / "bin" / "python"
    wheels = [stub_wheel(tmp_path, "torch", "2.14.9"), stub_wheel(tmp_path, "torch_neuronx", "2.14.3.0")]
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--no-index", "--python", str(python), *map(str, wheels)],
        check=True,
    )
    site = next((venv / "lib").glob("python*/site-packages"))

    def state() -> dict[str, tuple[int, bytes]]:
        files = [
            f
            for name in ("torch", "torch_neuronx")
            for d in (name, f"{name}-*")
            for f in site.glob(f"{d}/**/*")
            if f.is_file()
        ]
        return {str(f): (f.stat().st_mtime_ns, f.read_bytes()) for f in files}

    before = state()
    assert len(before) >= 8
    path = f"{venv / 'bin'}:{Path(uv).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-c", command[1]],
        cwd=ROOT,
        env={**__import__("os").environ, "PATH": path, "VIRTUAL_ENV": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert state() == before
    names = subprocess.run(
        [uv, "pip", "list", "--python", str(python)], capture_output=True, text=True, check=True
    ).stdout
    for package in (*PACKAGES, "torchtitan", "transformers"):
        assert re.search(rf"^{package} ", names, re.MULTILINE), f"{package} was not installed"
    assert "nvidia" not in names  # nor does torch's CUDA stack come in
