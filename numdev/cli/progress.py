"""Consoles and progress: results go to stdout, all else to stderr; a bar on a terminal, few lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

if TYPE_CHECKING:
    from numdev.results.study import StudyPoint

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


def has_own_terminal() -> bool | None:
    """False where other jobs write to the same terminal at the same time, so that bars would overwrite each other; else None."""
    hydra = HydraConfig.get()
    alone = hydra.mode is RunMode.RUN or str(hydra.launcher._target_).endswith(".BasicLauncher")
    return None if alone else False


class Progress:
    """Points done of all points, elapsed time, time left, and what comes next; or replicates done of one point.

    A replicate with steps has a second bar below.

    Attributes:
        done: points that are in the store, of all studies so far; or replicates of the one point.
    """

    def __init__(self, total: int, console: Console, *, live: bool | None = None, unit: str = "points", text: str = "") -> None:
        self.done = 0
        self._total, self._console, self._unit = total, console, unit
        self._text = text
        self._start = self._last_time = time.monotonic()
        self._last_line = -1 if unit == "points" else 0  # a short point prints no line
        self._bar: RichProgress | None = None
        self._task: Any = None
        self._steps: Any = None
        if console.is_terminal if live is None else live:
            point = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True), markup=False)
            columns = (MofNCompleteColumn(), BarColumn(20), TimeElapsedColumn(), TimeRemainingColumn(), point)
            self._bar = RichProgress(*columns, console=console, transient=True, expand=True)
            self._task = self._bar.add_task(text, total=total)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def replicates(self, done: int, total: int) -> None:
        """Show that so many replicates of the current point are done."""
        if self._unit == "points":
            self._show(f"{self._text}, replicate {done} of {total}" if done < total else self._text, done / total)
        else:
            self.done, self._total = done, total
            self._show(self._text)

    def within(self, done: int, total: int, text: str) -> None:
        """Show that so many steps of the current replicate are done; `text` names the run and its figures."""
        if self._bar is None:
            self._print(f"{self._text}; {text}, step {done} of {total}".removeprefix("; "), at_once=done == 0)
            return
        if self._steps is None:
            self._steps = self._bar.add_task("", total=total)
        elif done < self._bar.tasks[-1].completed:  # of the next one: its time is counted from now on
            self._bar.reset(self._steps)
        self._bar.update(self._steps, completed=done, total=total, description=text)

    def of(self, name: str, expected: int) -> Callable[[int, int, StudyPoint], None]:
        """The callback of one study, whose points come after those that are done."""
        before, rest = self.done, self._total - expected  # of the other studies

        def report(done: int, total: int, point: StudyPoint) -> None:
            self._total = rest + total
            self.point(before + done, f"{name}: {point.text()}")

        return report

    def point(self, done: int, text: str = "") -> None:
        """So many points are done, and this one comes."""
        self.done, self._text = done, text
        self._show(text)

    def _show(self, text: str, part: float = 0.0) -> None:
        """Show the progress; `part` is the share of the current point that is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done + part, total=self._total, description=text)
        else:
            self._print(text)

    def _print(self, text: str, *, at_once: bool = False) -> None:
        """Print a line; unless at once, only if the last one is a minute old or a tenth of the points is done."""
        now = time.monotonic()
        line = self.done * _LINES // max(self._total, 1) if self._unit == "points" else 0
        if line == self._last_line and now - self._last_time < _SECONDS and not at_once:
            return
        self._last_line, self._last_time = line, now
        elapsed = now - self._start
        left = f", about {elapsed / self.done * (self._total - self.done):.0f} s left" if self.done else ""
        self._console.print(f"{self.done}/{self._total} {self._unit}, {elapsed:.0f} s{left}  {text}".rstrip(), markup=False)
