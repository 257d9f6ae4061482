"""What Figure 4's ratio owes to circumstances that the paper leaves open: N, and the inputs."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numdev.report.claims.evidence import AROUND, LENGTH, over_baseline
from numdev.report.claims.finding import Undecidable
from numdev.report.claims.published import FIG4_RATIO
from numdev.report.figures.grid import highest, log_y, lowest, plain_ticks, whiskers
from numdev.report.figures.labels import WHITE, Name, spread
from numdev.report.figures.style import BLUE, GREY, PAGE, PALE, SMALL, VERMILION
from numdev.report.reading.scenarios import ROLES, of, ordered
from numdev.report.statistics.estimates import Interval, significant
from numdev.results.scenario import Role

METRIC = "max_difference"
_MARKERS = "os^Dv<>P"


def fig4_assumptions(rows: pd.DataFrame) -> Figure:
    """The ratio at BF16 over N, a line for each scenario, beside the paper's ten times."""
    bf16 = rows[rows["format"] == "bf16"]
    lines = [(scenario, _ratios(of(bf16, scenario))) for scenario in ordered(bf16)]
    drawn = [(scenario, points) for scenario, points in lines if points]
    figure = Figure(figsize=(PAGE, 2.9), layout="constrained")
    axes = figure.add_subplot()
    values = [i for _, points in drawn for _, i in points]
    ends = [*map(lowest, values), *map(highest, values), FIG4_RATIO / AROUND, FIG4_RATIO * AROUND]
    log_y(axes, min(ends) / 1.2, max(ends) * 1.2)
    names: list[Name] = []
    for (scenario, points), marker in zip(drawn, _MARKERS * len(drawn), strict=False):
        shade = VERMILION if scenario.role is Role.ASSUMED else BLUE
        across, intervals = [n for n, _ in points], [interval for _, interval in points]
        heights = [interval.estimate for interval in intervals]
        axes.errorbar(across, heights, whiskers(intervals), color=shade, marker=marker, elinewidth=0.7)
        role = f" ({ROLES[scenario.role]})" if ROLES[scenario.role] else ""
        names.append((across[-1], heights[-1], f"{scenario.title}{role}", shade))
        if scenario.role is Role.ASSUMED:
            _say(axes, across, heights)
    places = sorted({n for _, points in drawn for n, _ in points})
    plain_ticks(axes, places)
    _paper(axes)
    if names:
        axes.set_xlim(places[0] / 1.12, places[-1] * (places[-1] / places[0]) ** 0.8)
        _label(axes, names)
    axes.set_xlabel("sequence length N, tokens")
    axes.set_ylabel("max |O − golden|, tiled / baseline,\nat bf16")
    return figure


def _ratios(rows: pd.DataFrame) -> list[tuple[float, Interval]]:
    """The ratio at each N at which it can be told."""
    found = []
    for n, here in rows.groupby(LENGTH, sort=True):
        try:
            interval = over_baseline(here, METRIC)
        except Undecidable:
            continue
        if interval.estimate > 0:
            found.append((float(str(n)), interval))
    return found


def _say(axes: Axes, across: list[float], heights: list[float]) -> None:
    """Each ratio in figures above its marker."""
    for x, y in zip(across, heights, strict=True):
        axes.annotate(significant(y), (x, y), (0, 5), textcoords="offset points", ha="center", fontsize=SMALL, bbox=WHITE)


def _paper(axes: Axes) -> None:
    axes.axhspan(FIG4_RATIO / AROUND, FIG4_RATIO * AROUND, color=PALE, zorder=0)
    axes.axhline(FIG4_RATIO, color=GREY, linewidth=0.8, linestyle=(0, (3, 2)), zorder=0)
    words: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
    axes.annotate("paper: 10 times, N and inputs not given", (0, FIG4_RATIO), (3, 2), color=GREY, fontsize=SMALL, **words)


def _label(axes: Axes, names: list[Name]) -> None:
    """Every line's name on the right of it, moved apart from the others."""
    low, high = axes.get_ylim()
    decades = math.log(high / low)
    heights = spread([math.log(y / low) / decades for _, y, _, _ in names], 0.07)
    for (x, _, text, shade), height in zip(names, heights, strict=True):
        level = low * math.exp(height * decades)
        axes.annotate(text, (x, level), (8, 0), textcoords="offset points", va="center", color=shade, fontsize=SMALL)
