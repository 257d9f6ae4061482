"""Marks that the figures of several studies share: intervals in rows, lines with intervals, names at the ends of lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numdev.report.claims.verdicts import Undecidable
from numdev.report.figures.grid import Panel, head, highest, name_steps, whiskers
from numdev.report.figures.labels import Name, spread
from numdev.report.figures.style import GREY, PAGE, SMALL
from numdev.report.reading.scenarios import ROLES, of, ordered
from numdev.report.statistics import Interval
from numdev.results.manifest import Scenario

BESIDE: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": SMALL}
DASHED: dict[str, Any] = {"color": GREY, "linewidth": 0.8, "linestyle": (0, (3, 2)), "zorder": 0}


def measured(measure: Callable[..., Interval | None], *args: Any) -> Interval | None:
    """A value; None where the rows cannot tell it."""
    try:
        value = measure(*args)
    except Undecidable:
        return None
    return None if value is None or math.isnan(value.estimate) else value


def titled(scenario: Scenario) -> str:
    """The title of a scenario, with its role behind it."""
    return f"{scenario.title} ({ROLES[scenario.role]})" if ROLES[scenario.role] else scenario.title


def line(axes: Axes, points: Sequence[tuple[float, Interval]], **look: Any) -> tuple[float, float] | None:
    """Points with their intervals, joined; the place of the last one, or None where there is none."""
    if not points:
        return None
    values = [value for _, value in points]
    axes.errorbar([x for x, _ in points], [value.estimate for value in values], whiskers(values), **look)
    return points[-1][0], values[-1].estimate


def name_ends(axes: Axes, ends: Sequence[Name], gap: float, right: int, **look: Any) -> None:
    """The name of each line behind its end, at its height but `gap` of the axis apart from the others."""
    low, high = axes.get_ylim()
    span = math.log(high / low)
    heights = spread([math.log(y / low) / span for _, y, _, _ in ends], gap)
    for (x, _, text, shade), height in zip(ends, heights, strict=True):
        axes.annotate(text, (x, height), (right, 0), xycoords=axes.get_xaxis_transform(), color=shade, **BESIDE | look)


def bar(axes: Axes, place: float, value: Interval, shade: str, text: str = "", **look: Any) -> None:
    """A value with its interval in a row, and words behind it."""
    axes.errorbar(value.estimate, place, xerr=whiskers([value]), color=shade, **{"marker": "o"} | look)
    if text:
        axes.annotate(text, (highest(value), place), (5, 0), color=shade, **BESIDE)


def words_in_row(axes: Axes, place: float, text: str, shade: str, **look: Any) -> None:
    """Words at the left of a row that has no value."""
    axes.annotate(text, (0, place), (3, 0), xycoords=("axes fraction", "data"), color=shade, **BESIDE | look)


def lay_rows(axes: Axes, names: Sequence[str], ends: tuple[float, float] = (-0.5, 0.5)) -> None:
    """A row for each name, the first on top, and vertical grid lines."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 1 + ends[1], ends[0])
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")


def scenario_panels(
    rows: pd.DataFrame, names: Sequence[str], draw: Callable[[Axes, pd.DataFrame], None], text: str, row: float = 0.27
) -> Figure:
    """A panel per scenario on a log axis, a row per name, `row` inches high."""
    scenarios = ordered(rows)
    figure = Figure(figsize=(PAGE, 0.9 + row * len(names)), layout="constrained")
    grid: Any = figure.subplots(1, len(scenarios), sharey=True, squeeze=False)
    for axes, scenario in zip(grid[0], scenarios, strict=True):
        head(axes, Panel(scenario.title, ROLES[scenario.role], rows, large=False), len(scenarios) + 1)
        axes.set_xscale("log")
        name_steps(axes.xaxis)
        draw(axes, of(rows, scenario))
        axes.margins(x=0.25)
        lay_rows(axes, names)
    figure.supxlabel(text, fontsize=8)
    return figure


def name_formats(axes: Axes, names: Iterable[str]) -> None:
    """Number formats as categories on the horizontal axis."""
    known = [name.upper() for name in names]
    axes.set_xticks(range(len(known)), known)
    axes.set_xlim(-0.6, len(known) - 0.4)
    axes.tick_params(axis="x", length=0)


class Look(NamedTuple):
    """The style of a line."""

    color: str
    linestyle: Any = "-"
    marker: str = ""


def no_figure(reason: str) -> Figure:
    """A strip that says why there is nothing to see."""
    figure = Figure(figsize=(PAGE, 0.5), layout="constrained")
    figure.text(0.5, 0.5, reason, ha="center", va="center", color=GREY, fontsize=8)
    return figure


def legend(figure: Figure, keys: Mapping[str, Any], columns: int, place: Any = "outside upper right") -> None:
    """Keys by their words, beyond the panels."""
    figure.legend(list(keys.values()), list(keys), loc=place, ncols=columns, frameon=False)
