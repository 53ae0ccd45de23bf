"""uv run nox: every check. `nox -l` lists the sessions, `nox -s "tests(hf-ckpt-adapter)"` runs one.

A package's tests run in an environment with that package and what it declares, nothing else; sessions about the whole
workspace run in the workspace's own environment. Packages are discovered: a new one needs no change here.
"""

import difflib
import re
import tempfile
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = sorted(file.parent.name for file in (ROOT / "packages").glob("*/pyproject.toml"))
LOCK = ROOT / "requirements.lock"

nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "types", "layers", "lock", "tests", "build", "docs"]

IN_WORKSPACE = ["integration", "repository"]
"""Folders of tests/ that belong to no single package: they run in the workspace's environment."""

PURE = ["repository", "neuron_parallel", "nki_sim"]
"""Folders of tests/ that `quick` runs: no ranks, and next to no torch."""


def import_name(package: str) -> str:
    """Return the name that Python imports a package by."""
    return package.replace("-", "_")


def in_workspace(session: nox.Session, *command: str) -> None:
    """Run in the workspace's environment, as `uv run` makes it."""
    session.run("uv", "run", "--quiet", *command, external=True)


def pytest(session: nox.Session, name: str, *command: str) -> None:
    """Run pytest on two files at a time, with a report that .ci/run adds up.

    Much of the time goes into processes that import torch.
    """
    reports = ROOT / ".nox" / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    workers = ("-n", "2", "--dist", "loadfile")
    report = f"--junitxml={reports / f'{name}.xml'}"
    # A thread each: OpenMP threads that outnumber the cores wait for each other many times longer than they work.
    session.run(*command, *workers, report, *session.posargs, external=True, env={"OMP_NUM_THREADS": "1"})


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in [*PACKAGES, *IN_WORKSPACE]])
def tests(session: nox.Session, package: str) -> None:
    """One package's tests in its own environment; those of several packages in the workspace's."""
    folder = f"tests/{import_name(package)}"
    if package in IN_WORKSPACE:
        pytest(session, package, "uv", "run", "--quiet", "python", "-m", "pytest", folder)
        return
    sync = ("uv", "sync", "--quiet", "--package", package, "--no-default-groups", "--group", "test")
    environment = {"UV_PROJECT_ENVIRONMENT": session.virtualenv.location}
    session.run_install(*sync, env=environment, external=True)
    pytest(session, package, "python", "-m", "pytest", folder)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """ruff check and format."""
    in_workspace(session, "ruff", "check", ".")
    in_workspace(session, "ruff", "format", "--check", ".")


@nox.session(venv_backend="none")
def fix(session: nox.Session) -> None:
    """What ruff can repair by itself: lint findings with a safe fix, then the format."""
    in_workspace(session, "ruff", "check", "--fix-only", ".")
    in_workspace(session, "ruff", "format", ".")


@nox.session(venv_backend="none")
def quick(session: nox.Session) -> None:
    """Lint, layers and the pure tests: under two minutes on two cores, before each commit."""
    lint(session)
    layers(session)
    pytest(session, "quick", "uv", "run", "--quiet", "python", "-m", "pytest", *(f"tests/{name}" for name in PURE))


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """mypy over the packages, apps and recipes."""
    sources = [f"packages/{package}/src" for package in PACKAGES]
    in_workspace(session, "mypy", *sources, "recipes", "noxfile.py")
    for app in sorted((ROOT / "apps").glob("*/__main__.py")):
        in_workspace(session, "mypy", str(app.relative_to(ROOT)))


@nox.session(venv_backend="none")
def layers(session: nox.Session) -> None:
    """import-linter: layers point down, no package has an import circle."""
    in_workspace(session, "lint-imports")


@nox.session(venv_backend="none")
def lock(session: nox.Session) -> None:
    """Regenerate uv.lock and requirements.lock.

    When the committed file differs, it is rewritten and the session fails with the difference.
    """
    # From nothing, as on a fresh clone: an old lock leaves its mark on a new one.
    (ROOT / "uv.lock").unlink(missing_ok=True)
    session.run("uv", "lock", "--quiet", external=True)
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "requirements.lock"
        export = ("uv", "export", "--quiet", "--frozen", "--all-groups", "--format", "requirements-txt")
        bare = ("--no-emit-workspace", "--no-header", "--no-annotate")
        session.run(*export, *bare, "-o", str(fresh), external=True, silent=True)
        new = fresh.read_text()
    if re.search(r"https?://", new):
        session.error("requirements.lock would name a host; remove the index from the requirement that brings it")
    old = LOCK.read_text() if LOCK.exists() else ""
    if new != old:
        diff = difflib.unified_diff(old.splitlines(), new.splitlines(), "committed", "regenerated", lineterm="", n=0)
        print("\n".join(list(diff)[:200]))
        LOCK.write_text(new)
        session.error("requirements.lock did not match uv.lock; it is rewritten now: look at the diff and commit it")


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def build(session: nox.Session, package: str) -> None:
    """Build a package's wheel, install it alone in a clean environment, import it, run every block of its README."""
    dist = Path(session.create_tmp()) / "dist"
    wanted = [package, *siblings(package)]
    for name in wanted:
        session.run("uv", "build", "--quiet", "--wheel", "--package", name, "-o", str(dist), external=True)
    wheels = [str(wheel) for name in wanted for wheel in dist.glob(f"{import_name(name)}-*.whl")]
    session.run("uv", "pip", "install", "--quiet", "-c", str(unhashed_lock(session)), *wheels, external=True)
    readme = ROOT / "packages" / package / "README.md"
    # Away from the sources: what is imported is what was installed.
    with session.chdir(session.create_tmp()):
        session.run("python", "-c", f"import {import_name(package)}")
        session.run("python", str(ROOT / ".ci" / "code_blocks.py"), str(readme))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation's site into site/, with no warning allowed and nothing fetched."""
    environment = {"UV_PROJECT_ENVIRONMENT": session.virtualenv.location}
    session.run_install("uv", "sync", "--quiet", "--only-group", "docs", env=environment, external=True)
    session.run("mkdocs", "build", "--strict", "--quiet", *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Every benchmark, or those named: nox -s bench -- train_vs_torchtitan."""
    named = session.posargs or sorted(file.stem for file in (ROOT / "benchmarks").glob("*.py"))
    for name in named:
        in_workspace(session, "python", f"benchmarks/{name}.py")


@nox.session(venv_backend="none")
def figures(session: nox.Session) -> None:
    """Rehearse recipes (all, or those named), write recipes/figures.json and the table in docs/recipes.md."""
    in_workspace(
        session, "python", "-m", "titan_recipes.preflight.figures", "recipes", "docs/recipes.md", *session.posargs
    )


@nox.session(venv_backend="none")
def soak(session: nox.Session) -> None:
    """What takes long: full matrices, kill -9 seeds, real sizes. Pass a path or -k to choose."""
    in_workspace(session, "python", "-m", "pytest", "-m", "soak", *(session.posargs or ["tests"]))


def siblings(package: str) -> list[str]:
    """Return the workspace packages that a package depends on (titan-recipes alone has any)."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in project.get("dependencies", [])}
    return sorted(names & set(PACKAGES))


def unhashed_lock(session: nox.Session) -> Path:
    """Write requirements.lock as constraints: versions without hashes, since wheels of ours have none there."""
    lines = [re.sub(r"\s*\\$", "", line) for line in LOCK.read_text().splitlines() if not line.startswith("    ")]
    file = Path(session.create_tmp()) / "constraints.txt"
    file.write_text("\n".join(lines) + "\n")
    return file
