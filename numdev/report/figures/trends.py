"""Figures 5 and 6c: how the difference goes with the sequence length and with the block area.

A factor of two would not be seen on an axis over the sixteen decades from BF16 to FP64. In units of each format's u the
formats stand on one scale, and their slopes can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.arithmetic.formats import Format
from numdev.report.claims.evidence import over_area, over_length
from numdev.report.claims.finding import Undecidable
from numdev.report.figures.grid import (
    Panel,
    by_scenario,
    chosen,
    draw_grid,
    highest,
    lowest,
    means,
    plain_ticks,
    replicates,
    whiskers,
)
from numdev.report.figures.labels import corner, paper_goes, room_above, spread
from numdev.report.figures.style import GREY, colour
from numdev.report.reading.scenarios import SCENARIO, formats
from numdev.report.statistics.estimates import Interval, significant

_ROOM = 0.2  # share of the vertical axis above the data: a line of words


@dataclass(frozen=True)
class _Across:
    """What a difference is drawn over: its column, symbol and name on the axis, its exponent, and the paper's trend."""

    column: str
    symbol: str
    text: str
    exponent: Callable[[pd.DataFrame, str], Interval]
    paper: str
    rises: bool


_LENGTH = _Across("problem.shape.keys", "N", "sequence length N, tokens", over_length, "paper: grows with N", True)
_AREA = _Across("tiling.area", "A", "block area A = Br · Bc, elements", over_area, "paper: falls with the area", False)


def fig5a(rows: pd.DataFrame) -> Figure:
    """Max difference from the baseline over N, one line per format."""
    return _trend(rows, _LENGTH, ("max_difference",), "max |tiled − baseline|,\nin u of F")


def fig5b(rows: pd.DataFrame) -> Figure:
    """Mean of |D| and standard deviation of D over N, two lines per format."""
    figure = _trend(rows, _LENGTH, ("mean_absolute", "std"), "D = tiled − baseline,\nin u of F")
    keys = [Line2D([], [], color=GREY, linestyle="-", marker="o")]
    keys += [Line2D([], [], color=GREY, linestyle="--", marker="o", markerfacecolor="white")]
    figure.legend(keys, ["mean of |D|", "standard deviation of D"], loc="outside upper right", ncols=2, frameon=False)
    return figure


def fig6c(rows: pd.DataFrame) -> Figure:
    """Max difference from the baseline over the block area, one line per format."""
    return _trend(rows, _AREA, ("max_difference",), "max |tiled − baseline|,\nin u of F")


def in_u(rows: pd.DataFrame, metrics: tuple[str, ...]) -> pd.DataFrame:
    """Rows with absolute metrics divided by the unit roundoff of their format."""
    scaled = rows.copy()
    units = {name: Format.parse(name).u for name in formats(rows)}
    for metric in metrics:
        scaled[metric] = scaled[metric] / scaled["format"].map(units)
    return scaled


def limits(rows: pd.DataFrame, metrics: tuple[str, ...], *across: str, room: float = 0.0) -> tuple[float, float]:
    """Below and above every interval at values of `across`; the upper share `room` of the axis stays free for words."""
    groups = [group for _, group in rows.groupby(["subject", SCENARIO, "format", *across])]
    found = [replicates(group, metric) for group in groups for metric in metrics]
    intervals = [interval for interval in found if interval is not None and interval.estimate > 0]
    if not intervals:
        return 0.1, 10.0
    low = min(lowest(interval) for interval in intervals) / 1.4
    return low, room_above(low, max(highest(interval) for interval in intervals) * 1.1, room)


def _trend(rows: pd.DataFrame, across: _Across, metrics: tuple[str, ...], text: str) -> Figure:
    found = in_u(chosen(rows), metrics)

    def draw(axes: Axes, panel: Panel) -> None:
        places = panel.rows[across.column].dropna().astype(float).unique().tolist()
        plain_ticks(axes, places)
        ends = []
        for name in formats(panel.rows):
            own = panel.rows[panel.rows["format"] == name]
            lines = [_line(axes, means(own, across.column, metric), name, metric == metrics[0]) for metric in metrics]
            if lines[0] is not None:
                ends.append((lines[0], f"{name} {_power(own, across, metrics[0])}", colour(name)))
        _label(axes, ends, panel.large)
        if panel.large:
            paper_goes(axes, across.paper, up=across.rises)
        if places:
            span = max(max(places) / min(places), 2.0)
            axes.set_xlim(min(places) / span**0.06, max(places) * span ** (0.45 if panel.large else 0.06))

    def ends_of(own: pd.DataFrame) -> tuple[float, float]:
        return limits(own, metrics, across.column, room=_ROOM)

    return draw_grid(by_scenario(found), draw, ends_of, axes_text=(across.text, text))


def _line(axes: Axes, points: list[tuple[float, Interval]], name: str, first: bool) -> tuple[float, float] | None:
    """One metric of one format with its intervals; where its last point is."""
    if not points:
        return None
    across, intervals = [x for x, _ in points], [interval for _, interval in points]
    axes.errorbar(
        across,
        [interval.estimate for interval in intervals],
        whiskers(intervals),
        color=colour(name),
        linestyle="-" if first else "--",
        marker="o",
        markerfacecolor=colour(name) if first else "white",
        elinewidth=0.8,
    )
    return across[-1], intervals[-1].estimate


def _power(rows: pd.DataFrame, across: _Across, metric: str) -> str:
    """The exponent in the label of a line."""
    try:
        value = across.exponent(rows, metric).estimate
    except Undecidable:
        return ""
    return f"$\\propto {across.symbol}^{{{significant(value)}}}$" if math.isfinite(value) else ""


def _label(axes: Axes, ends: list[tuple[tuple[float, float], str, str]], large: bool) -> None:
    """Labels at the ends of lines, moved apart where they would overlap; alone in a small panel, in its corner."""
    if not large:
        for i, (_, text, shade) in enumerate(ends):
            corner(axes, text, down=3 + 11 * i, color=shade)
        return
    low, high = axes.get_ylim()
    decades = math.log(high / low)
    free = 1 - _ROOM
    heights = [free * height for height in spread([math.log(y / low) / decades / free for (_, y), _, _ in ends], 0.085 / free)]
    for ((x, _), text, shade), height in zip(ends, heights, strict=True):
        axes.annotate(
            text,
            (x, height),
            (8, 0),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            va="center",
            color=shade,
            fontsize=7,
        )
