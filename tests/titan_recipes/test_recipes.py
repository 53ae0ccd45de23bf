"""Contract: recipes are found by name, module or file, listed without being imported, and a wrong name gets the near
one.
"""

import pytest
from titan_recipes.errors import UserError
from titan_recipes.recipes import find_recipe, list_recipes, load_recipe

SOURCE = '''
raise_if_imported = 1 / {divisor}

def tiny() -> "Trainer.Config":
    """A tiny run.

    More words.
    """
    return "config"

def helper(x: int) -> int:
    return x

def _hidden() -> "Trainer.Config":
    """Not listed."""
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE.format(divisor=1))
    (tmp_path / "broken.py").write_text(SOURCE.format(divisor=0).replace("def tiny", "def other"))
    return tmp_path


def test_listing_shows_public_recipes_with_their_first_line_and_imports_nothing(folder):
    assert [(r.name, r.summary) for r in list_recipes(folder)] == [
        ("other", "A tiny run."),
        ("tiny", "A tiny run."),
    ]


def test_a_recipe_loads_by_short_name_and_by_file(folder):
    assert load_recipe(find_recipe("tiny", folder))() == "config"
    assert load_recipe(find_recipe(f"{folder}/mine.py:tiny", folder))() == "config"


def test_a_recipe_loads_by_module_from_the_current_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    assert load_recipe(find_recipe("mine:tiny", folder))() == "config"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tinny", "Did you mean 'tiny'"),
        ("zzz", "Known: other, tiny"),
        ("nowhere.py:tiny", "no file nowhere.py"),
        ("nowhere.py", "no such file"),
    ],
)
def test_a_wrong_name_is_an_error_that_helps(folder, name, message):
    with pytest.raises(UserError, match=message):
        find_recipe(name, folder)


def test_a_file_without_a_function_name_is_told_how_to_write_it(folder):
    with pytest.raises(UserError, match=r"mine\.py:tiny"):
        find_recipe(f"{folder}/mine.py", folder)


def test_a_wrong_function_and_a_wrong_module_are_errors_that_help(folder):
    with pytest.raises(UserError, match="Did you mean 'tiny'"):
        load_recipe(find_recipe(f"{folder}/mine.py:tiyn", folder))
    with pytest.raises(UserError, match="no module 'not_a_module'"):
        load_recipe(find_recipe("not_a_module:f", folder))


def test_an_error_inside_a_recipe_is_not_mistaken_for_a_missing_recipe(folder):
    with pytest.raises(ZeroDivisionError):
        load_recipe(find_recipe("other", folder))


def test_a_toml_file_of_an_earlier_torchtitan_is_told_that_recipes_are_functions(folder):
    with pytest.raises(UserError, match=r"TOML files of earlier TorchTitan.*\n.*Start from one of --list"):
        find_recipe("train_configs/qwen3.toml", folder)
