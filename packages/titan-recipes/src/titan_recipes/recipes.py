"""Find, list and load recipes: functions that return a TorchTitan `Trainer.Config`.

Listing parses the files and imports nothing, so `--list` and a wrong name cost no start-up time.
"""

import ast
import difflib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .errors import UserError

FIGURES = "figures.json"
"""The file beside recipes that has their figures (see preflight/figures.py)."""


class Figures(NamedTuple):
    """What a recipe's run takes."""

    cores: int
    memory_gib: float | None
    """Modelled peak of torch's tensors on a core, GiB; None for a CPU recipe."""
    tokens_per_step: int
    seq_len: int
    mask: str


@dataclass(frozen=True)
class Recipe:
    """A recipe that was found but not imported."""

    name: str
    """What the user calls it: a short name, `module:function`, or `path.py:function`."""
    source: str
    """A file's path or a module's name."""
    function: str
    summary: str = ""

    @property
    def is_file(self) -> bool:
        """Whether the recipe comes from a file and not from a module."""
        return self.source.endswith(".py")


def list_recipes(folder: Path) -> list[Recipe]:
    """Every public function annotated `-> ...Config` in the folder's files, with its docstring's first line.

    Imports none of them.
    """
    return [recipe for file in sorted(folder.glob("*.py")) for recipe in recipes_in(file)]


def read_figures(folder: Path) -> dict[str, Figures]:
    """Return the figures of a folder's recipes by name; none for a folder that keeps none."""
    file = folder / FIGURES
    if not file.is_file():
        return {}
    return {name: Figures(**row) for name, row in json.loads(file.read_text()).items()}


def recipes_in(file: Path) -> list[Recipe]:
    """The recipes that one file defines, in order."""
    return [
        Recipe(node.name, str(file), node.name, (ast.get_docstring(node) or "").partition("\n")[0])
        for node in ast.parse(file.read_text(), str(file)).body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and node.returns is not None
        and ast.unparse(node.returns).strip("'\"").endswith("Config")
    ]


def find_recipe(name: str, folder: Path) -> Recipe:
    """Resolve a short name, `module:function` or `path.py:function`. Raises UserError with near names."""
    if ":" in name:
        source, _, function = name.rpartition(":")
        if source.endswith(".py") or "/" in source:
            path = Path(source).expanduser()
            if not path.is_file():
                raise UserError(f"Recipe {name!r}: there is no file {path}.\nGive it as path/to/file.py:function.")
            return Recipe(name, str(path.resolve()), function)
        return Recipe(name, source, function)
    known = {recipe.name: recipe for recipe in list_recipes(folder)}
    if name in known:
        return known[name]
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UserError(f"Recipe {name!r}: there is no such file.\nGive it as path/to/file.py:function.")
        functions = [recipe.name for recipe in recipes_in(Path(name))]
        raise UserError(
            f"Recipe {name!r} names a file but no function; write {name}:{functions[0] if functions else 'function'}."
        )
    if name.endswith(".toml"):
        raise UserError(
            f"Recipe {name!r}: TOML files of earlier TorchTitan releases are no recipes; a config is a Python function "
            "now.\n"
            "Start from one of --list and set what differs, in a function of your own or as --section.option value."
        )
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UserError(
        f"There is no recipe {name!r}.{hint}\nKnown: {', '.join(known)} (see --list), or give module:function or a "
        "path/to/file.py:function of your own."
    )


def load_recipe(recipe: Recipe) -> Callable[[], Any]:
    """Import the recipe's file or module and return its function. Raises UserError when it is not there."""
    module = _import_file(Path(recipe.source)) if recipe.is_file else _import_module(recipe)
    function = getattr(module, recipe.function, None)
    if not callable(function):
        public = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        near = difflib.get_close_matches(recipe.function, public, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else f" It defines: {', '.join(public) or 'no function'}."
        raise UserError(f"Recipe {recipe.name!r}: {recipe.source} has no function {recipe.function!r}.{hint}")
    return function


def _import_module(recipe: Recipe) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` would: modules beside the user are importable
    try:
        return importlib.import_module(recipe.source)
    except ModuleNotFoundError as error:
        if error.name is None or not (recipe.source + ".").startswith(error.name + "."):
            raise  # the recipe was found; something that it imports was not
        raise UserError(f"Recipe {recipe.name!r}: there is no module {recipe.source!r} to import.") from None


def _import_file(path: Path) -> ModuleType:
    name = f"titan_recipes_user_{path.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path):
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # a recipe may import the file beside it
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
