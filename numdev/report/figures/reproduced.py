"""A figure of a source, made again: its scenario large and in its own quantity, and the other scenarios below."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from numdev.report.figures.grid import Draw, Limits, Panel, head, log_y, panel_of, wrapped
from numdev.report.figures.style import PAGE
from numdev.report.reading.scenarios import of, ordered
from numdev.results.manifest import Scenario

Top = Callable[[Axes, Axes, Panel], None]
_TOP, _ROW = 2.25, 1.36  # inches


@dataclass(frozen=True)
class Lower:
    """What stands below the large panel: what draws it, and how high it is, inches."""

    draw: Callable[[SubFigure], None]
    height: float


def draw_reproduced(rows: pd.DataFrame, top: Top, lower: Lower | None) -> Figure:
    """The scenario of the source in a large panel and in a narrow one beside it, then what stands below.

    Args:
        rows: of every scenario.
        top: fills the large panel and the narrow one; the titles are set before.
        lower: None where there is nothing more.
    """
    heights = [_TOP, *([lower.height] if lower else [])]
    figure = Figure(figsize=(PAGE, sum(heights)), layout="constrained")
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    large, narrow = parts[0][0].subplots(1, 2, width_ratios=[2, 1])
    panel = panel_of(rows, source_of(rows), large=True)
    head(large, panel, 1)
    top(large, narrow, panel)
    if lower is not None:
        lower.draw(parts[1][0])
    return figure


def source_of(rows: pd.DataFrame) -> Scenario:
    """The scenario that stands for the source: the first by its role."""
    return ordered(rows)[0]


def multiples(rows: pd.DataFrame, draw: Draw, limits: Limits, axes_text: tuple[str, str]) -> Lower | None:
    """Small panels of every scenario but the source's, with one log axis; None where there is no other."""
    others = ordered(rows)[1:]
    if not others:
        return None
    panels = wrapped(panel_of(rows, scenario, large=False) for scenario in others)
    across = len(panels[0])

    def fill(part: SubFigure) -> None:
        spec = part.add_gridspec(len(panels), across)
        shared: Axes | None = None
        for i, row in enumerate(panels):
            for j, panel in enumerate(row):
                axes = part.add_subplot(spec[i, j], sharey=shared)
                if shared is None:
                    shared = axes
                    log_y(axes, *limits(pd.concat([of(rows, scenario) for scenario in others])))
                head(axes, panel, across)
                draw(axes, panel)
                axes.tick_params(labelleft=j == 0)
        part.supxlabel(axes_text[0], fontsize=8)
        part.supylabel(axes_text[1], fontsize=8)

    return Lower(fill, _ROW * len(panels) + 0.25)
