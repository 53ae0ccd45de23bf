"""Contract: private names of torch and TorchTitan are named in one file, and the installed releases have
all of them.
"""

import ast
import re
from pathlib import Path

import titan_recipes
from titan_recipes import upstream

SOURCES = Path(titan_recipes.__file__).parent
PRIVATE = re.compile(r"(^|\.)_(?!_)")


def test_the_installed_releases_have_every_private_name():
    assert upstream.lost() == []


def test_a_name_that_a_release_lost_is_told_with_its_reason(monkeypatch):
    gone = upstream.Upstream("torch.distributed", "no_such_name", "a test")
    monkeypatch.setitem(upstream.NAMES, "gone", gone)
    (line,) = upstream.lost()
    assert line.startswith("torch.distributed.no_such_name (a test): ")


def test_no_other_file_imports_a_private_name_of_theirs():
    found = []
    for file in SOURCES.rglob("*.py"):
        if file.name == "upstream.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            theirs = [name for name in names if name.split(".")[0] in ("torch", "torchtitan", "transformers")]
            found += [f"{file.relative_to(SOURCES)}:{node.lineno} {name}" for name in theirs if PRIVATE.search(name)]
    assert not found, f"import these through upstream.py, with the reason: {found}"
