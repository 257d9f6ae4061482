"""The figures of a report, drawn by several processes where there are many: they take most of a report's time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from numdev.cores import usable_cores
from numdev.report.document.asked import write
from numdev.report.figures.plot import Plot
from numdev.workers import Pool, Tell

_FEWEST = 8  # below, starting processes takes about as long as it saves


@dataclass(frozen=True)
class Picture:
    """A figure that is to be drawn; see `numdev.report.document.asked.write`."""

    path: Path
    plot: Plot
    rows: pd.DataFrame
    title: str
    findings: tuple[str, ...] = ()

    def write(self) -> None:
        write(self.path, self.plot, self.rows, self.title, *self.findings)


def write_all(pictures: Sequence[Picture], workers: int | None = None) -> None:
    """Write figures as PNG and SVG, the same bytes by any number of processes.

    Args:
        pictures: in any order.
        workers: processes; one for each usable core if there are many figures, on Linux, unless given.

    Raises:
        StoreError: if a file cannot be written.
    """
    count = workers or (min(usable_cores(), len(pictures) // (_FEWEST // 2)) if sys.platform == "linux" else 1)
    if count < 2 or len(pictures) < 2:
        for picture in pictures:
            picture.write()
        return

    def draw(place: int, tell: Tell) -> Any:
        pictures[place].write()

    with Pool(count, draw) as pool:
        for _ in pool.run(range(len(pictures))):
            pass
