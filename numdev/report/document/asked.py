"""The figure that somebody asks for by `plot=`, of everything that some studies and sweeps have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from numdev.report.document.usual import shown_by
from numdev.report.figures.plot import Plot
from numdev.report.figures.style import to_png, to_svg
from numdev.report.figures.sweep import plot_of
from numdev.report.reading.frames import Results
from numdev.report.reading.tidy import EVERY
from numdev.results.store import write_atomically


@dataclass(frozen=True)
class Asked:
    """A figure that somebody asks for.

    Attributes:
        plot: draws it.
        rows: what it is drawn from.
        notes: what the reader should know of the rows: points that are missing, damaged files.
    """

    plot: Plot
    rows: pd.DataFrame
    notes: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        """The figure as PNG and SVG; `path` is without its suffix."""
        write(path, self.plot, self.rows, self.plot.title)


def asked_of(loaded: Results, plot: Mapping[str, Any]) -> Asked:
    """The figure of some studies and sweeps, over every column that they have.

    Args:
        loaded: their results, all of one kind of measurement.
        plot: what is asked for, as `numdev.report.figures.sweep.plot_of` takes it.

    Raises:
        BadInput: for a name that they do not have.
    """
    every = loaded.with_axes(EVERY)
    rows = shown_by(every, np.arange(len(every.stored)), plot)
    return Asked(plot_of(rows, plot), rows, tuple(loaded.notes))


def write(path: Path, plot: Plot, rows: pd.DataFrame, title: str, *findings: str) -> None:
    """A figure as PNG and SVG; `path` is without its suffix, `findings` end its description."""
    figure = plot(rows)
    write_atomically(path.with_name(f"{path.name}.png"), to_png(figure))
    write_atomically(path.with_name(f"{path.name}.svg"), to_svg(figure, title, " ".join([plot.alt, *findings])))
