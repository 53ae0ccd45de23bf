"""Contract: a kill between any two file operations leaves a whole step that is found; nothing good is removed first."""

import shutil

import pytest
from titan_recipes.checkpoint.steps import (
    complete_steps,
    finish_step,
    is_step,
    recover,
    saving_folder,
    set_aside_later,
    step_folder,
)


def write(folder, content):
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_text(content)
    (folder / ".metadata").touch()


def content(folder, step):
    return (step_folder(folder, step) / "__0_0.distcp").read_text()


class Killed(Exception):
    pass


@pytest.mark.parametrize("operation", range(4))
def test_a_kill_at_any_operation_of_a_replacement_leaves_the_old_step_or_the_new(tmp_path, monkeypatch, operation):
    write(step_folder(tmp_path, 9), "old")
    write(saving_folder(tmp_path, 9), "new")
    done = 0

    def counted(function):
        def run(*arguments, **options):
            nonlocal done
            if done == operation:
                raise Killed
            done += 1
            return function(*arguments, **options)

        return run

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.rename", counted(type(tmp_path).rename))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        try:
            finish_step(tmp_path, 9)
        except Killed:
            assert complete_steps(tmp_path) == [9]
    recover(tmp_path)
    assert complete_steps(tmp_path) == [9] and content(tmp_path, 9) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step-9"]


def test_what_was_half_written_goes_and_the_step_it_would_have_replaced_stays(tmp_path):
    write(step_folder(tmp_path, 9), "old")
    saving_folder(tmp_path, 9).mkdir()
    recover(tmp_path)
    assert content(tmp_path, 9) == "old" and not saving_folder(tmp_path, 9).exists()


def test_an_old_step_comes_back_when_the_new_one_was_not_whole(tmp_path):
    write(tmp_path / ".replaced-step-9", "old")
    step_folder(tmp_path, 9).mkdir()
    assert complete_steps(tmp_path) == [9]
    recover(tmp_path)
    assert content(tmp_path, 9) == "old"


def test_later_steps_are_set_aside_and_not_deleted(tmp_path):
    for step in (2, 4, 6):
        write(step_folder(tmp_path, step), str(step))
    moved = set_aside_later(tmp_path, 2)
    assert complete_steps(tmp_path) == [2]
    assert [path.name for path in moved] == ["step-4", "step-6"] and all(is_step(path) for path in moved)
    assert set_aside_later(tmp_path, 2) == []
