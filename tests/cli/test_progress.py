from __future__ import annotations

import io

import pytest
from rich.console import Console

from numdev.cli.progress import Progress
from numdev.results.study import StudyPoint

POINT = StudyPoint(None, None, None, 1, "here", {"tiling.bc": 16})


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=80, highlight=False)


def printed(on: Console) -> list[str]:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue().splitlines()


def test_lines_are_few_and_name_the_point() -> None:
    on = console(terminal=False)
    with Progress(1000, on) as progress:
        report = progress.of("toy", 1000)
        for done in range(1000):
            report(done, 1000, POINT)
        progress.finished(1000)
    lines = printed(on)
    assert len(lines) == 11
    assert lines[0].startswith("0/1000 points, 0 s")
    assert lines[5].startswith("500/1000 points")
    assert "left" in lines[5]
    assert "toy: here tiling.bc=16" in lines[5]
    assert lines[-1].startswith("1000/1000 points")


def test_a_slow_point_gets_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    on = console(terminal=False)
    with Progress(1000, on) as progress:
        report = progress.of("toy", 1000)
        for done in range(4):
            now[0] = 40.0 * done
            report(done, 1000, POINT)
    assert [line.split("  ")[0] for line in printed(on)] == [
        "0/1000 points, 0 s",
        "2/1000 points, 80 s, about 39920 s left",
    ]


def test_studies_follow_one_another_and_correct_the_total() -> None:
    on = console(terminal=False)
    with Progress(12, on) as progress:
        progress.of("first", 8)(7, 8, POINT)
        progress.finished(8)
        progress.of("second", 4)(1, 3, POINT)
        assert progress.done == 9
        progress.finished(11)
    assert printed(on)[-1].startswith("11/11 points")


def test_a_terminal_gets_a_bar() -> None:
    on = console(terminal=True)
    with Progress(4, on) as progress:
        progress.of("toy", 4)(2, 4, POINT)
    text = "\n".join(printed(on))
    assert "2/4" in text
    assert "\x1b[" in text


def test_jobs_that_share_a_terminal_get_lines() -> None:
    on = console(terminal=True)
    with Progress(4, on, live=False) as progress:
        progress.of("toy", 4)(0, 4, POINT)
    assert printed(on) == ["0/4 points, 0 s  toy: here tiling.bc=16"]
