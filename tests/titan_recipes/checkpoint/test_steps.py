"""Contract: a kill between any two file operations leaves a whole step that is found; nothing good is removed first."""

import multiprocessing
import random
import shutil
import time

import pytest
from titan_recipes.checkpoint import steps
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
    write(step_folder(tmp_path, 4), "again")
    (again,) = set_aside_later(tmp_path, 2)  # in the same second
    assert again.parent != moved[0].parent and all(is_step(path) for path in (again, *moved))


def write_step(folder, step, history):
    """What DCP does: shards first, then .metadata by rename; then the step gets its name."""
    saving = steps.saving_folder(folder, step)
    saving.mkdir()
    for shard in range(3):
        (saving / f"__{shard}_0.distcp").write_text(history * 50_000)
    (saving / "metadata.tmp").write_text(history)
    (saving / "metadata.tmp").rename(saving / ".metadata")
    steps.finish_step(folder, step)


def save_on(folder, pipe):
    for step in range(1, 10**6):
        write_step(folder, step, "a")
        pipe.send((step, "a"))
        for old in steps.complete_steps(folder)[:-2]:
            shutil.rmtree(steps.purging(folder, old))


def save_one_step_again(folder, pipe):
    for turn in range(10**6):
        history = "ab"[turn % 2]
        write_step(folder, 5, history)
        pipe.send((5, history))


def go_back_and_on(folder, pipe):
    for turn in range(10**6):
        for step in (1, 2, 3):
            write_step(folder, step, "ab"[turn % 2])
            pipe.send((step, "ab"[turn % 2]))
        for old in folder.glob("rolled-back-*"):  # named by the second, and this loop goes back more often
            shutil.rmtree(old)
        steps.set_aside_later(folder, 1)
        pipe.send((1, "ab"[turn % 2]))


def kill_while(work, folder, seed):
    """Kill -9 in `work`; the newest step after it is whole, of one history, and none before the last that was done."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(folder, theirs))
    process.start()
    theirs.close()
    chance, done, end = random.Random(seed), [ours.recv()], time.monotonic()
    end += chance.uniform(0.0, 0.3)
    while time.monotonic() < end:
        if ours.poll(0.001):
            done.append(ours.recv())
    process.kill()
    process.join()
    while ours.poll():
        try:
            done.append(ours.recv())
        except EOFError:
            break
    before = steps.complete_steps(folder)
    steps.recover(folder)
    assert steps.complete_steps(folder) == before  # `before` is what --resume offers
    newest = steps.step_folder(folder, before[-1])
    if work is not go_back_and_on:  # which takes the newest away on purpose
        assert before[-1] >= done[-1][0]
    assert before[0] <= done[-1][0]
    history = (newest / ".metadata").read_text()
    assert [(newest / f"__{shard}_0.distcp").read_text() for shard in range(3)] == [history * 50_000] * 3
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


WORKS = [save_on, save_one_step_again, go_back_and_on]


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("seed", range(2))
def test_kill_9_loses_no_step_that_was_done(tmp_path, work, seed):
    kill_while(work, tmp_path, seed)


@pytest.mark.soak
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("seed", range(2, 42))
def test_kill_9_loses_no_step_that_was_done_for_40_seeds(tmp_path, work, seed):
    kill_while(work, tmp_path, seed)
