"""Contract: a cut file is found by size, a changed byte by its record's CRC, and an unreadable index is told."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from titan_recipes.checkpoint.damage import damage


@pytest.fixture
def step(tmp_path):
    folder = tmp_path / "step-2"
    state = {"w": torch.arange(4096.0), "n": torch.ones(3), "optim": {"step": 5}}
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def test_a_good_step_has_no_damage(step):
    assert damage(step) is None and damage(step, checksums=True) is None


def test_a_missing_and_a_cut_file_are_named(step):
    file = step / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    assert "__0_0.distcp has" in damage(step) and "bytes of at least" in damage(step)
    file.unlink()
    assert damage(step) == "__0_0.distcp is missing"


def test_changed_bytes_are_found_by_checksum_by_the_rank_that_looks_at_them(step):
    file = step / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.find(torch.arange(4096.0).numpy().tobytes())
    data[at + 1000 : at + 2000] = bytes(1000)
    file.write_bytes(data)
    assert damage(step) is None  # sizes do not tell
    found = [damage(step, checksums=True, part=(rank, 2)) for rank in range(2)]
    assert sum(text is not None for text in found) == 1
    assert "of __0_0.distcp changed" in next(text for text in found if text)


@pytest.mark.parametrize("left", [0, 20])
def test_a_cut_index_is_told(step, left):
    file = step / ".metadata"
    file.write_bytes(file.read_bytes()[:left])
    assert damage(step).startswith(".metadata cannot be read (")
