"""Contract: an old module name says the new one, every new one is there, and all that recipes use is at the top."""

import importlib

import pytest
import titan_recipes
from titan_recipes.moved import MOVED


def test_an_old_module_name_says_the_new_one():
    with pytest.raises(ModuleNotFoundError, match=r"titan_recipes\.spec is now titan_recipes\.models\.spec"):
        importlib.import_module("titan_recipes.spec")
    with pytest.raises(AttributeError, match=r"titan_recipes\.trainer is now titan_recipes\.train\.trainer"):
        titan_recipes.trainer  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'titan_recipes\.nothing'"):
        importlib.import_module("titan_recipes.nothing")


@pytest.mark.parametrize("new", sorted(set(MOVED.values())))
def test_every_new_name_is_a_module(new):
    importlib.import_module(f"titan_recipes.{new}")


@pytest.mark.parametrize("name", titan_recipes.__all__)
def test_what_recipes_use_is_at_the_top_and_shown(name):
    assert callable(getattr(titan_recipes, name)) and name in dir(titan_recipes)


def test_the_version_is_the_packages():
    assert titan_recipes.__version__ == importlib.metadata.version("titan-recipes")
