"""Contract: short names stand for options of TorchTitan; a name of another trainer is an error that says what it is
called here.
"""

import pytest
from titan_recipes.config.short_names import OTHERS, SHORT, expand, refuse_others
from titan_recipes.errors import UserError

LR = "--optimizer.param-groups.{}.optimizer-kwargs.lr"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--lr", "1e-4"], [LR.format(0), "1e-4"]),
        (["--steps=5"], ["--training.steps", "5"]),
        (["--batch", "8", "--validator.no-enable"], ["--training.global_batch_size", "8", "--validator.no-enable"]),
        (["--seq", "64"], ["--training.seq_len", "64"]),
        (["--data", "x.jsonl"], ["--dataloader.dataset_path", "x.jsonl"]),
        (["--data", "data/x.jsonl"], ["--dataloader.dataset_path", "data/x.jsonl"]),
        (["--data", "/data/corpus"], ["--dataloader.dataset_path", "/data/corpus"]),
        (["--data", "owner/name"], ["--dataloader.dataset", "owner/name"]),
        (["--data", "python-docs"], ["--dataloader.dataset", "python-docs"]),
        (["--training.steps", "5"], ["--training.steps", "5"]),
        (["--comm.steps", "--lr=-1"], ["--comm.steps", LR.format(0), "-1"]),
    ],
)
def test_a_short_name_is_the_options_that_it_stands_for(typed, meant):
    assert expand(typed, 1) == meant


def test_a_folder_that_is_there_wins_over_a_hub_id_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert expand(["--data", "owner/name"], 1) == ["--dataloader.dataset_path", "owner/name"]


def test_the_learning_rate_is_every_parameter_groups():
    assert expand(["--lr", "2"], 3) == [LR.format(0), "2", LR.format(1), "2", LR.format(2), "2"]


@pytest.mark.parametrize("name", SHORT)
def test_a_short_name_without_a_value_is_an_error(name):
    for typed in ([f"--{name}"], [f"--{name}", "--training.steps"]):
        with pytest.raises(UserError, match=f"--{name} has no value; it stands for --"):
            expand(typed, 1)


@pytest.mark.parametrize("also", ["--training.steps", "--steps"])
def test_an_option_given_twice_under_two_names_is_an_error(also):
    with pytest.raises(UserError, match=r"--steps and --training.steps are the same: give one"):
        expand(["--steps", "5", also, "6"], 1)


@pytest.mark.parametrize("name", OTHERS)
def test_a_name_of_another_trainer_says_what_it_is_called_here(name):
    with pytest.raises(UserError, match=rf"no option --{name} here\. Its place: "):
        refuse_others(["--training.steps", "5", f"--{name}", "x"])
    with pytest.raises(UserError, match=rf"no option --{name} here"):
        refuse_others([f"--{name.replace('_', '-')}=x"])
    refuse_others([name])
