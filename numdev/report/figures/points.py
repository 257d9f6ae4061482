"""The figure of a study that names none: the deviation of every point, over an axis of numbers where the study has one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.measurement.deviation.metrics import NONFINITE
from numdev.report.figures.grid import (
    Panel,
    at_least_a_decade,
    by_scenario,
    chosen,
    draw_grid,
    head,
    limits,
    lowest,
    means,
    name_steps,
    plain_ticks,
    replicates,
    whiskers,
)
from numdev.report.figures.plot import Plot
from numdev.report.figures.style import BASELINE, GREY, PAGE, SERIES, TILED
from numdev.report.reading.frames import COMPARISON, DEFAULTS
from numdev.report.reading.scenarios import LABEL, PRIMARY, ROLE, SCENARIO, TITLE
from numdev.report.reading.view import numbered

METRIC, TEXT = "rmse", "RMSE from golden, absolute"
NEEDED = (SCENARIO, TITLE, ROLE, *COMPARISON, PRIMARY, "cluster", "format", METRIC, *NONFINITE)
_SHADES = SERIES
_MARKERS = "os^vD<>"
_MOST = 40  # points of a panel, a line each
_ROW = 0.2  # inches of such a line
_POINT = "point"  # a column of rows: the number of their point, then whether it has a line


def draw_points(rows: pd.DataFrame) -> Figure:
    """RMSE from golden of every point: lines over the label with the most numbers, or a line of the figure for each point."""
    rows = rows[[name for name in map(str, rows) if name in NEEDED or name.startswith(LABEL)]]  # panels and lines are copies
    axis = axis_of(chosen(rows, reference="golden"))
    return _listed(rows) if axis is None else _over(rows, axis)


def axis_of(rows: pd.DataFrame) -> str | None:
    """The label with the most different positive numbers, at least three; None where there is none, or too many lines."""
    counts = {name: rows[name].nunique() for name in labels(rows) if _is_positive(rows[name])}
    best = max(counts, key=lambda name: counts[name], default=None)
    if best is None or counts[best] < 3 or rows[_rest(rows, best)].drop_duplicates().shape[0] > len(_SHADES):
        return None
    return best


def labels(rows: pd.DataFrame) -> list[str]:
    """The labels that any row has."""
    return [str(name) for name in rows if str(name).startswith(LABEL) and rows[name].notna().any()]


def _is_positive(values: pd.Series[Any]) -> bool:
    numbers = pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
    return numbers and bool(values.notna().all()) and bool((values > 0).all())


def _rest(rows: pd.DataFrame, axis: str) -> list[str]:
    return [name for name in labels(rows) if name != axis]


def _series(rows: pd.DataFrame, names: list[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Rows by their labels, in words."""
    if not names:
        yield DEFAULTS, rows
        return
    for values, own in rows.groupby(names, sort=False, dropna=False):
        pairs: Any = zip(names, values, strict=True)
        name = ", ".join(f"{name.removeprefix(LABEL)} = {value}" for name, value in pairs if not pd.isna(value))
        yield name or DEFAULTS, own


def _over(rows: pd.DataFrame, axis: str) -> Figure:
    """A panel per scenario, over the numbers of a label; a line for every combination of the other labels."""
    variant = chosen(rows, reference="golden")
    rest = _rest(variant, axis)
    shades = dict(zip([name for name, _ in _series(variant, rest)], zip(_SHADES, _MARKERS, strict=True), strict=False))

    def draw(axes: Axes, panel: Panel) -> None:
        plain_ticks(axes, panel.rows[axis].astype(float).unique().tolist())
        for name, own in _series(panel.rows, rest):
            points = means(own, axis, METRIC)
            if points:
                intervals = [interval for _, interval in points]
                values = [interval.estimate for interval in intervals]
                shade, marker = shades[name]
                axes.errorbar([x for x, _ in points], values, whiskers(intervals), color=shade, marker=marker)

    def ends(own: pd.DataFrame) -> tuple[float, float]:
        return at_least_a_decade(*limits(own, (METRIC,), axis, *rest))

    figure = draw_grid(by_scenario(variant), draw, ends, axes_text=(axis.removeprefix(LABEL), TEXT))
    if rest:
        keys = [Line2D([], [], color=shade, marker=marker) for shade, marker in shades.values()]
        figure.legend(keys, list(shades), loc="outside upper right", ncols=2, frameon=False)
    return figure


def _listed(rows: pd.DataFrame) -> Figure:
    """A panel per scenario, a line for each point; a bar is its baseline's."""
    names = labels(rows)
    point = numbered(rows, names)
    rows = rows.assign(**{_POINT: point})
    every = chosen(rows, reference="golden")[_POINT].unique()
    rows = rows.assign(**{_POINT: np.isin(point, every[:_MOST])})  # of the others no line is made
    panels = [panel for row in by_scenario(rows) for panel in row]
    shown = [name for name, _ in _series(_kept(chosen(rows, reference="golden")), names)]
    figure = Figure(figsize=(PAGE, 1.0 + _ROW * len(shown)), layout="constrained")
    grid: Any = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axes, panel in zip(grid[0], panels, strict=True):
        head(axes, panel, len(panels) + 1)
        axes.set_xscale("log")
        name_steps(axes.xaxis)
        for subject, shade, marker in (("baseline", BASELINE, "|"), ("variant", TILED, "o")):
            for name, own in _series(_kept(chosen(panel.rows, subject, "golden")), names):
                interval = replicates(own, METRIC)
                if interval is None:
                    at_end: Any = {"transform": axes.get_yaxis_transform(), "linestyle": "none"}
                    axes.plot(0.98, shown.index(name), color=shade, marker="x", **at_end)
                elif lowest(interval) > 0:
                    axes.errorbar(interval.estimate, shown.index(name), xerr=whiskers([interval]), color=shade, marker=marker)
        axes.margins(x=0.15)
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
    grid[0][0].set_yticks(range(len(shown)), shown)
    grid[0][0].set_ylim(len(shown) - 0.5, -0.5)
    keys = [
        Line2D([], [], color=shade, marker=marker, linestyle="") for shade, marker in ((TILED, "o"), (BASELINE, "|"), (GREY, "x"))
    ]
    figure.legend(keys, ["variant", "baseline", "NaN or Inf"], loc="outside upper right", ncols=3, frameon=False)
    left = f"; the first {_MOST} of {len(every)} points" if len(every) > _MOST else ""
    figure.supxlabel(f"{TEXT}{left}", fontsize=8)
    return figure


def _kept(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the points that have a line."""
    return rows[rows[_POINT]]


POINTS = Plot(
    draw_points,
    "One panel per scenario: the RMSE of the primary output from golden on a log axis, for every point of the study, geometric "
    "means over seeds with their 95 % confidence intervals.",
)
"""Of a study that names no figure."""
