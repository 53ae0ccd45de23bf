"""Contract: a docstring is a sentence of its own. It begins with no preposition, whose noun a reader would have to
guess.

That a public name has a docstring at all is held by ruff's `D` rules, in `nox -s lint`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT, python_files

PREPOSITIONS = """
    about above across after against along among around as at before behind below beneath beside between beyond by
    despite down during except for from in inside into like near of off on onto out outside over past per since
    through throughout to toward towards under until up upon via with within without
"""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring: of modules, classes and functions, and of the field or constant above."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()


def begins_with_a_preposition(text: str) -> bool:
    """Say whether the first word is a preposition: `out(T)`, `per-device` and `as_dict` are not."""
    word = re.match(r"([A-Za-z]+)(?=[\s,.:;]|$)", text)
    return word is not None and word[1].lower() in PREPOSITIONS.split()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Of reductions, where they are other tensors."""', True),
        ('x = 1\n"""For recipes: a function."""', True),
        ('class A:\n    b: int\n    """Without experts."""', True),
        ('def f():\n    """\n    On gloo, reduce by sum."""', True),
        ('"""out(where to, gradient) for each product."""', False),
        ('"""Per-device settings."""', False),
        ('"""Reduce-scatter results, when they are not the gradients."""', False),
    ],
)
def test_the_rule_finds_what_it_should(source, found):
    assert any(begins_with_a_preposition(text) for _, text in docstrings(source)) == found


def offences(file: Path) -> list[str]:
    """Return a file's docstrings that begin with a preposition, each as `path:line: text`."""
    found = docstrings(file.read_text(encoding="utf-8"))
    bad = [(line, text.split("\n")[0]) for line, text in found if begins_with_a_preposition(text)]
    return [f"{file.relative_to(ROOT)}:{line}: {text}" for line, text in bad]


def test_no_docstring_begins_with_a_preposition():
    bad = [offence for file in python_files() for offence in offences(file)]
    assert not bad, "say the noun first:\n" + "\n".join(bad)
