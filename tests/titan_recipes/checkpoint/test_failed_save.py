"""Contract: a save that fails says why, where, and what is left; a full disk is called one."""

import shutil
from collections import namedtuple

from titan_recipes.checkpoint.failed_save import explain_failed_save
from torch.distributed.checkpoint import CheckpointException

Usage = namedtuple("Usage", "total used free")


def test_a_full_disk_is_named_though_the_zip_writer_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 100, 0))
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / ".metadata").touch()
    cause = RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed\nframe #0: ...")
    text = explain_failed_save(tmp_path, 6, CheckpointException("save", {1: (cause, None)}))
    assert text.startswith(f"Step 6 could not be saved in {tmp_path}: No space left on device; rank 1: PytorchStream")
    assert "frame" not in text and "--resume goes on from step 4" in text and len(text.splitlines()) == 2


def test_another_fault_is_not_put_down_to_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 0, 2**40))
    text = explain_failed_save(tmp_path / "not" / "there", 2, OSError(30, "Read-only file system", "/x/y"))
    assert "Read-only file system: '/x/y'" in text and "No space" not in text and "no step was saved" in text
