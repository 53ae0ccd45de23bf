"""Contract: ranks stop at the same step, and refuse to resume from different ones. Real gloo ranks, no model."""

import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks


def stop_steps(rank):
    """Rank 1 alone is signalled in step 2; the step before which each rank stops."""
    from titan_recipes.train.stop import StopRequest

    stop = StopRequest()
    stop.install()
    for step in range(6):
        if stop.agreed():
            return step, stop.signal
        if rank == 1 and step == 2:
            signal.raise_signal(signal.SIGTERM)
    return None


def test_a_signal_on_one_rank_stops_all_before_the_same_step():
    assert run_ranks(stop_steps, 2) == [(3, signal.SIGTERM)] * 2


def newest_step(rank, shared, hidden):
    from titan_recipes.device.select import set_device

    set_device("cpu")
    from titan_recipes.checkpoint.manager import StepCheckpoints
    from titan_recipes.errors import UserError

    manager = object.__new__(StepCheckpoints)
    manager.enable = False
    manager.folder = str(hidden if rank == 1 else shared)
    manager.strict_resume, manager.resume_check = False, "size"
    try:
        return manager._find_load_step()
    except UserError as error:
        return str(error)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    for step in (3, 20):
        dcp.save({"x": torch.zeros(2)}, checkpoint_id=str(tmp_path / "c" / f"step-{step}"), no_dist=True)
    return tmp_path / "c"


def test_ranks_that_see_the_same_folder_take_its_newest_step(checkpoint):
    assert run_ranks(newest_step, 2, checkpoint, checkpoint) == [20, 20]


def test_a_folder_that_one_rank_cannot_see_is_an_error_on_every_rank(checkpoint):
    texts = run_ranks(newest_step, 2, checkpoint, checkpoint / "elsewhere")
    assert all("file system that all nodes share" in text for text in texts)
    assert "between -1 and 20" in texts[0]
