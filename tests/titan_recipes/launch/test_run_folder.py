"""Contract: --resume finds the newest run that has a whole step, whatever its checkpoint.folder is called."""

import pytest
from titan_recipes.errors import UserError
from titan_recipes.launch.run_folder import run_folder
from titan_recipes.recipes import Recipe

RECIPE = Recipe("debug", "debug.py", "debug")


def test_a_run_whose_checkpoint_folder_has_another_name_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run, folder in (("debug-20260101-000000", "checkpoint"), ("debug-20260102-000000", "weights/kept")):
        step = tmp_path / "outputs" / run / folder / "step-4"
        step.mkdir(parents=True)
        (step / ".metadata").touch()
    (tmp_path / "outputs" / "debug-20260103-000000" / "checkpoint" / "step-2").mkdir(parents=True)  # not whole
    assert run_folder(RECIPE, resume=True) == "outputs/debug-20260102-000000"


def test_without_a_whole_step_there_is_nothing_to_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run of 'debug' with a complete checkpoint"):
        run_folder(RECIPE, resume=True)


def test_a_restart_goes_on_in_the_folder_of_the_first_start(tmp_path, monkeypatch):
    from torch.distributed import TCPStore

    monkeypatch.chdir(tmp_path)
    agent = TCPStore("localhost", 0, is_master=True)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(agent.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    first = run_folder(RECIPE, resume=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run_folder(RECIPE, resume=True) == first
    assert [str(run.relative_to(tmp_path)) for run in (tmp_path / "outputs").iterdir()] == [first]


def test_a_requeued_job_that_saved_nothing_starts_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run_folder(RECIPE, resume=True).startswith("outputs/debug-")
