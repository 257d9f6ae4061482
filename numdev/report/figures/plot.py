"""A kind of figure: the function that draws it, and its description for those who cannot see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from numdev.report.figures.style import freeze, styled

_DOTS = "Dots are geometric means over seeds or captured heads, bars their 95 % confidence intervals."
PANELS = f"One panel for each scenario, our assumption about the paper first. {_DOTS}"
"""The end of the description of a figure that has a panel for each scenario."""
BELOW = f"Below, one panel for each other scenario. {_DOTS}"
"""The end of the description of a figure that shows the scenario of the source large."""


@dataclass(frozen=True)
class Plot:
    """One kind of figure.

    Attributes:
        draw: rows of one study in, the figure out.
        alt: what it shows, for those who cannot see it.
        needs: the labels without which there is nothing to draw.
        title: of a figure that is not its study's first, which has the study's title.
        table: of the records whose rows it draws; empty for the primary one.
        files: columns of paths in the folder of the results, which `draw` gets as paths that it can open.
    """

    draw: Callable[[pd.DataFrame], Figure]
    alt: str
    needs: tuple[str, ...] = ()
    title: str = ""
    table: str = ""
    files: tuple[str, ...] = ()

    def __call__(self, rows: pd.DataFrame) -> Figure:
        """The figure, laid out."""
        with styled():
            return freeze(self.draw(rows))

    def lacks(self, rows: pd.DataFrame) -> list[str]:
        """The labels that the figure needs and the rows lack."""
        return [name for name in self.needs if f"label.{name}" not in rows or rows[f"label.{name}"].isna().all()]
