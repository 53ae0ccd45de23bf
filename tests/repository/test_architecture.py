"""Contract: docs/architecture.md names every module of every package, and no file that is not there."""

import re

import pytest
from repository import PACKAGES, ROOT, import_name, modules

TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """Return the text below a heading, up to the next of its rank or a higher one."""
    found = re.search(rf"^(#+) {re.escape(title)}$(.*?)(?=^#{{1,3}} |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found is not None, f"docs/architecture.md has no heading {title!r}"
    return found[2]


def files_of(table: str) -> list[str]:
    """Return the files that a table names in its first column: `mesh.py`, and in the row of a folder `memory/`, its
    files.
    """
    found = []
    for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE):
        found += re.findall(r"`([\w./]+\.py)`", row)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_the_table_of_a_package_names_each_of_its_modules_once(package):
    named = files_of(section(package))
    there = [name for name in modules(package) if not name.endswith("__init__.py")]
    assert sorted(named) == sorted(there)


def test_the_roads_lead_through_files_that_exist():
    start = TEXT.index("## Six roads")
    roads = re.findall(r"`((?:\w+/)+\w+\.py)`", TEXT[start:])
    places = {f"{import_name(package)}/{name}" for package in PACKAGES for name in modules(package)}
    places |= {str(file.relative_to(ROOT)) for folder in ("apps", "recipes") for file in (ROOT / folder).rglob("*.py")}
    assert len(roads) > 30
    assert set(roads) <= places, sorted(set(roads) - places)
