"""Contract: a file is there whole or not at all, and its elder stays until then."""

import pytest
from neuron_parallel.files import whole_file


def test_the_elder_stays_until_its_successor_is_whole(tmp_path):
    path = tmp_path / "plan.txt"
    path.write_text("old")
    with pytest.raises(KeyError), whole_file(path) as temporary:
        temporary.write_text("ha")
        assert path.read_text() == "old"
        raise KeyError
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]
    with whole_file(path) as temporary:
        temporary.write_text("new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["new"]
