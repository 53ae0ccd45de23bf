"""The repository's files, as the tests of this folder read them: no test here imports torch or a package of ours."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(file.parent.name for file in (ROOT / "packages").glob("*/pyproject.toml"))


def import_name(package: str) -> str:
    """Return the name that Python imports a package by."""
    return package.replace("-", "_")


def modules(package: str) -> dict[str, Path]:
    """Return a package's Python files, keyed by their path below its import folder."""
    folder = ROOT / "packages" / package / "src" / import_name(package)
    return {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*.py"))}


def python_files() -> list[Path]:
    """Return every Python file that is ours, without those of environments and builds."""
    folders = ["apps", "benchmarks", "docs", "packages", "recipes", "tests", ".ci"]
    return [ROOT / "noxfile.py", *(file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))]


def pages() -> list[Path]:
    """Return every Markdown page that is ours."""
    patterns = ["*.md", "docs/*.md", "packages/*/README.md", ".github/**/*.md"]
    return [file for pattern in patterns for file in sorted(ROOT.glob(pattern))]


def code_blocks() -> ModuleType:
    """Return .ci/code_blocks.py as a module: what a code block is, is said there."""
    spec = importlib.util.spec_from_file_location("code_blocks", ROOT / ".ci" / "code_blocks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
