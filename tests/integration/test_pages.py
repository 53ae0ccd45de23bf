"""Contract: the Python of the documentation runs as it stands, and each option that a page passes to
apps/train exists.
"""

import os
import re
import subprocess
import sys
from functools import reduce

import pytest
from repository import ROOT, code_blocks, pages
from titan_recipes.cli import _parser
from titan_recipes.recipes import find_recipe, load_recipe

PAGES = {str(file.relative_to(ROOT)): file for file in pages()}
BLOCKS = code_blocks().blocks
# A package's README runs in `nox -s build`, with that package alone.
WITH_PYTHON = [
    name
    for name, file in PAGES.items()
    if not name.startswith("packages/") and any(block.language == "python" for block in BLOCKS(file.read_text()))
]


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs(page, tmp_path):
    # recipes/ is on the path of its own files, which is where the pages say that theirs go.
    command = [sys.executable, str(ROOT / ".ci" / "code_blocks.py"), "--no-shell", str(PAGES[page])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "recipes")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def options(text: str) -> set[str]:
    """Return the long options that the commands and code spans of a page give to apps/train."""
    commands = re.findall(r"apps/train [^\n`#]*", text)
    return {option for command in commands for option in re.findall(r"(?<=\s)--([A-Za-z][\w.-]*)", command)}


def is_an_option(option: str) -> bool:
    """Say whether apps/train takes an option: one of its own, or a path of fields in a recipe's config."""
    if "." not in option:
        return f"--{option}" in _parser()._option_string_actions
    config = load_recipe(find_recipe("debug", ROOT / "recipes"))()
    path = option.replace("-", "_").replace(".no_", ".").split(".")
    missing = object()
    return reduce(lambda value, field: getattr(value, field, missing), path, config) is not missing


@pytest.mark.parametrize("page", [name for name, file in PAGES.items() if options(file.read_text())])
def test_options_that_a_page_passes_to_train_exist(page):
    wrong = sorted(option for option in options(PAGES[page].read_text()) if not is_an_option(option))
    assert not wrong, f"{page} names options that apps/train does not have: {wrong}"


def test_a_wrong_option_is_found():
    assert options("`apps/train debug --training.steps 5 --resume`") == {"training.steps", "resume"}
    assert not is_an_option("training.stepz") and not is_an_option("resumee")
    assert is_an_option("validator.no-enable")
