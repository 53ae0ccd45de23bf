"""Contract: a rank takes signals before it trains, whatever its launcher does with them, and ends with its launcher."""

import multiprocessing
import os
import signal
import sys
import time

import pytest
from titan_recipes.launch import elastic

CONTEXT = multiprocessing.get_context("fork")


def ready_then_sleep(pipe):
    pipe.send(os.getpid())
    time.sleep(60)


def child(pipe, launcher):
    elastic.run_child(pipe, launcher)


@pytest.fixture
def rank(monkeypatch):
    monkeypatch.setattr(elastic, "run_rank", ready_then_sleep)


def test_a_rank_that_still_starts_ends_of_sigterm_though_its_launcher_catches_it(rank):
    ours, theirs = CONTEXT.Pipe()
    with elastic._signals_passed_on() as received:
        process = CONTEXT.Process(target=child, args=(theirs, os.getpid()))
        process.start()
        assert ours.poll(30) and ours.recv()
        os.kill(os.getpid(), signal.SIGTERM)  # to the launcher, which passes it on
        process.join(30)
    assert received == [signal.SIGTERM] and process.exitcode == -signal.SIGTERM


def test_a_signal_before_there_is_a_rank_is_not_swallowed():
    with pytest.raises(elastic._NoRanksYet), elastic._signals_passed_on() as received:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert received == [signal.SIGTERM]


def launcher(pipe):
    CONTEXT.Process(target=child, args=(pipe, os.getpid())).start()
    time.sleep(60)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux alone ends children with their parent")
def test_a_rank_ends_when_its_launcher_is_killed(rank):
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=launcher, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.poll(30)
    orphan = ours.recv()
    process.kill()
    process.join()
    assert ours.poll(30), f"process {orphan} lives on"  # its end of the pipe is closed
    with pytest.raises(EOFError):
        ours.recv()
