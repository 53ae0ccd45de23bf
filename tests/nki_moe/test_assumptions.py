"""Contract of assumptions.py: nothing is assumed unless a user names it, and a name that says nothing is an error."""

import pytest
from nki_moe.assumptions import KNOWN, VARIABLE, assumed


def test_nothing_is_assumed_until_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert KNOWN and not any(assumed(name) for name in KNOWN)
    monkeypatch.setenv(VARIABLE, " gather-transpose,")
    assert assumed("gather-transpose")


def test_an_unknown_name_is_refused_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "gather-transpose,nested-loops")
    with pytest.raises(ValueError, match="NKI_MOE_ASSUME names nested-loops; known are: gather-transpose"):
        assumed("gather-transpose")
