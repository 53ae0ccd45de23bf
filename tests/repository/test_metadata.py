"""Contract: every package says by itself what it is, whose, under which licence, and all have one version."""

import re
import tomllib

import pytest
from repository import PACKAGES, ROOT


def project(package: str) -> dict:
    """Return the `[project]` table of a package."""
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_carries_licence_authors_urls_and_classifiers(package):
    table = project(package)
    assert (ROOT / "packages" / package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert table["license-files"] == ["LICENSE"]
    assert table["authors"] == project(PACKAGES[0])["authors"]
    assert table["urls"] and all(url.startswith("https://") for url in table["urls"].values())
    assert "Typing :: Typed" in table["classifiers"]
    assert list((ROOT / "packages" / package / "src").glob("*/py.typed")), "a typed package ships py.typed"


def version(package: str) -> str:
    """Return a package's version: from its pyproject.toml, or from the file that this names for hatch."""
    if "version" in project(package):
        return project(package)["version"]
    folder = ROOT / "packages" / package
    hatch = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    found = re.search(r'^__version__ = "(.+)"$', (folder / hatch["version"]["path"]).read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_all_packages_have_the_version_of_the_changelog():
    root = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    released = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {version(package) for package in PACKAGES} == {root["version"]} == {released[0]}
