from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from numdev.cli.progress import Progress
from numdev.results.store import Scenario
from numdev.results.study import Study, StudyPoint
from tests.cli.commands import SMALL, Command, unless

POINT = StudyPoint(None, None, None, 1, "here", {"tiling.bc": 16})
TOY = Study("toy", "Toy", scenarios=(Scenario("here", "uniform inputs"),))


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=80, highlight=False)


def printed(on: Console) -> list[str]:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue().splitlines()


def test_lines_are_few_and_name_the_point() -> None:
    on = console(terminal=False)
    with Progress(1000, on, live=False) as progress:
        report = progress.of(TOY, 1000)
        for done in range(1000):
            report(done, 1000, POINT)
        progress.point(1000)
    lines = printed(on)
    assert len(lines) == 11
    assert lines[0].startswith("0/1000 points, 0 s")
    assert lines[5].startswith("500/1000 points")
    assert "left" in lines[5]
    assert "toy: uniform inputs tiling.bc=16" in lines[5]
    assert lines[-1].startswith("1000/1000 points")


def test_studies_follow_one_another_and_correct_the_total() -> None:
    on = console(terminal=False)
    with Progress(12, on, live=False) as progress:
        progress.of(TOY, 8)(7, 8, POINT)
        progress.point(8)
        progress.of(TOY, 4)(1, 3, POINT)
        assert progress.done == 9
        progress.point(11)
    assert printed(on)[-1].startswith("11/11 points")


def test_the_replicates_of_a_studys_point_move_the_bar() -> None:
    on = console(terminal=True)
    with Progress(2, on, live=True) as progress:
        progress.of(TOY, 2)(0, 2, POINT)
        progress.replicates(3, 4)
        assert (progress.tasks[0].completed, progress.done) == (0.75, 0)
        assert progress.tasks[0].description.endswith("tiling.bc=16, replicate 3 of 4")
        progress.within(10, 20, "replicate 0: loss 0.5, 3 steps/s")
        assert progress.tasks[0].description.endswith("3 steps/s, step 10 of 20")


def test_one_point_gets_lines_only_where_it_takes_long_or_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    on = console(terminal=False)
    with Progress(1, on, live=False) as progress:
        progress.within(0, 100, "replicate 0: waits for another process, which trains it")
        for done in range(1, 11):
            now[0] = 25.0 * done
            progress.within(done, 100, "replicate 0: loss 0.5")
            progress.replicates(done, 10)
    text = " ".join(printed(on))  # of lines as wide as the console
    assert text.startswith("0/1 points, 0 s  replicate 0: waits for another process, which trains it")
    assert re.findall(r"step (\d+) of 100", text) == ["0", "3", "6", "9"]


@pytest.mark.parametrize("words", [("seeds=3",), ("study=toy", "seeds=3", "precision=bf16", "tiling.bc=8")])
def test_the_command_tells_every_replicate(
    numdev: Command, toy_configs: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(Progress, "replicates", lambda self, done, total: told.append((done, total)))
    assert numdev("measure", "--config-dir", str(toy_configs), *unless(words, SMALL), *words).code == 0
    assert told == [(1, 3), (2, 3), (3, 3)]
