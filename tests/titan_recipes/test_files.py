"""Contract: a target is the old one or the new one, never a half."""

import pytest
from titan_recipes.files import replacing


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    target = tmp_path / "x.json"
    target.write_text("old")
    with replacing(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new" and list(tmp_path.iterdir()) == [target]


def test_a_block_that_raises_leaves_the_target_and_no_rest(tmp_path):
    target = tmp_path / "folder"
    with pytest.raises(OSError, match="full"), replacing(target) as temporary:
        temporary.mkdir()
        (temporary / "half").write_text("x")
        raise OSError("full")
    assert list(tmp_path.iterdir()) == []
