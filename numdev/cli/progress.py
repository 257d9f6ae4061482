"""Consoles and progress: results go to stdout, all else to stderr; a bar on a terminal, few lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

if TYPE_CHECKING:
    from numdev.results.study import Study, StudyPoint

ERRORS = Console(stderr=True, highlight=False, soft_wrap=True)
_NARROWEST_FILE = 120  # columns where no terminal sets a width
_LINES = 10  # of a study, at most so many where there is no terminal ...
_SECONDS = 60.0  # ... unless one of them would take longer than this


def output() -> Console:
    """For results: as wide as the terminal, and wide enough for a table where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _NARROWEST_FILE)
    return console


def is_live() -> bool:
    """Whether there is a terminal for a bar, to which no other job of a sweep writes at the same time."""
    hydra = HydraConfig.get()
    return ERRORS.is_terminal and (hydra.mode is RunMode.RUN or str(hydra.launcher._target_).endswith(".BasicLauncher"))


class Progress(RichProgress):
    """Points done of all points, elapsed time, time left, and what comes next, with the replicates that it has done."""

    def __init__(self, total: int, console: Console, *, live: bool, text: str = "") -> None:
        point = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True), markup=False)
        columns = (MofNCompleteColumn(), BarColumn(20), TimeElapsedColumn(), TimeRemainingColumn(), point)
        super().__init__(*columns, console=console, transient=True, expand=True, disable=not live)
        self.done, self._text, self._part = 0, text, 0.0  # `done` are points in the store, of all studies so far
        self._task, self._total = self.add_task(text, total=total), total
        self._begin = self._last_time = time.monotonic()
        self._last_line = -1 if total > 1 else 0  # a short point by itself prints no line

    def of(self, study: Study, expected: int) -> Callable[[int, int, StudyPoint], None]:
        """The callback of one study, whose points come after those that are done."""
        before, rest = self.done, self._total - expected  # of the other studies
        titles = {scenario.name: scenario.title for scenario in study.scenarios}

        def report(done: int, total: int, point: StudyPoint) -> None:
            self._total = rest + total
            titled = replace(point, scenario=titles.get(point.scenario, point.scenario))
            self.point(before + done, f"{study.name}: {titled.text()}")

        return report

    def point(self, done: int, text: str = "") -> None:
        """So many points are done, and this one comes."""
        self.done, self._text, self._part = done, text, 0.0
        self._show(text)

    def replicates(self, done: int, total: int) -> None:
        """So many replicates of the current point are done."""
        self._part = done / total
        self._show(f"{self._text}, replicate {done} of {total}".removeprefix(", "))

    def within(self, done: int, total: int, text: str) -> None:
        """So many steps of the current replicate are done; `text` names the run and its figures."""
        self._show(f"{self._text}; {text}, step {done} of {total}".removeprefix("; "), at_once=done == 0)

    def _show(self, text: str, *, at_once: bool = False) -> None:
        """Move the bar; without one print a line, unless at once only if the last is a minute old or a tenth is done."""
        done = self.done + self._part
        self.update(self._task, completed=done, total=self._total, description=text)
        now, line = time.monotonic(), self.done * _LINES // max(self._total, 1)
        if self.disable and (at_once or line != self._last_line or now - self._last_time >= _SECONDS):
            self._last_line, self._last_time = line, now
            elapsed = now - self._begin
            left = f", about {elapsed / done * (self._total - done):.0f} s left" if done else ""
            self.console.print(f"{self.done}/{self._total} points, {elapsed:.0f} s{left}  {text}".rstrip(), markup=False)
