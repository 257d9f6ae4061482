"""Workers: every task has its result, errors come back, and no process outlives what it works for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from numdev.errors import BadInput, NumdevError
from numdev.workers import Pool, Tell

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(("count", "tasks"), [(1, 3), (2, 7), (3, 2), (2, 0)])
def test_each_task_has_its_result_and_what_was_told_comes_before_it(count: int, tasks: int) -> None:
    offset = 100  # known to the workers without being sent

    def work(task: int, tell: Tell) -> int:
        tell(task)
        return task + offset

    told: dict[int, int] = {}
    results = []
    with Pool(count, work) as pool:
        for said in pool.run(range(tasks)):
            if said.is_result:
                assert told.pop(said.worker) + offset == said.value
                results.append(said.value - offset)
            else:
                told[said.worker] = said.value
        assert [said.value - offset for said in pool.run(range(tasks)) if said.is_result] or not tasks, "again"
    assert sorted(results) == list(range(tasks))
    assert not multiprocessing.active_children()


def test_tasks_are_begun_in_their_order() -> None:
    with Pool(1, lambda task, tell: task) as pool:
        assert [said.value for said in pool.run("a fast task")] == list("a fast task")


def test_two_workers_work_at_once() -> None:
    """Each waits for a byte of the other: one after the other they would wait for ever."""
    ends = [os.pipe(), os.pipe()]

    def work(task: int, tell: Tell) -> bytes:
        os.write(ends[task][1], b"x")
        return os.read(ends[1 - task][0], 1)

    with Pool(2, work) as pool:
        assert [said.value for said in pool.run((0, 1))] == [b"x", b"x"]
    for end in (end for pipe in ends for end in pipe):
        os.close(end)


class Unsendable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (BadInput("seeds", 0, "give one"), BadInput, "^seeds: 0 cannot be used; give one$"),
        (ValueError("three"), ValueError, "^three\n"),
        (Unsendable("four"), NumdevError, "^workers: Unsendable cannot be sent .*: four\n?"),
    ],
)
def test_an_error_of_a_task_is_raised_and_ends_the_others(error: Exception, kind: type[Exception], words: str) -> None:
    def work(task: int, tell: Tell) -> None:
        if task:
            raise error
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(kind, match=words), Pool(2, work) as pool:
        list(pool.run((0, 1)))
    assert time.monotonic() - start < 30
    assert not multiprocessing.active_children()


def test_a_worker_that_is_killed_is_named() -> None:
    def work(task: int, tell: Tell) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(NumdevError, match=r"^workers: one of them ended with -9; .* use workers=1"), Pool(2, work) as pool:
        list(pool.run((0,)))


def test_what_a_worker_has_opened_is_closed_when_it_is_ended(tmp_path: Path) -> None:
    """As a file that is half written is removed; Ctrl-C does not reach the worker, only its parent."""
    half, whole = tmp_path / "half", tmp_path / "whole"

    def work(task: int, tell: Tell) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        half.touch()
        try:
            tell("open")
            while True:
                time.sleep(0.01)
        finally:
            half.rename(whole)

    def interrupted() -> None:
        with Pool(1, work) as pool:
            for said in pool.run((0,)):
                assert said.value == "open"
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert whole.exists()


KILLED = """
import os, sys, time
from numdev.workers import Pool

def work(task, tell):
    open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
    while task:  # one that tells something now and then; the other waits for a task
        time.sleep(0.01)
        tell(0)

with Pool(3, work) as pool:
    list(pool.run([0, 1, 1]))
"""


def test_no_worker_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    until(lambda: len(list(tmp_path.iterdir())) == 3 or parent.poll() is not None)
    children = psutil.Process(parent.pid).children()
    assert len(children) == 3
    parent.kill()
    parent.wait()
    assert not psutil.wait_procs(children, timeout=20)[1]
