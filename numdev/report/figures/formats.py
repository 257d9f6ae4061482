"""Figures 3 and 4: deviation over number formats, as bars."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numdev.arithmetic.formats import Format
from numdev.report.claims.evidence import over_baseline
from numdev.report.claims.finding import Undecidable
from numdev.report.claims.published import FIG4_RATIO
from numdev.report.figures.grid import Panel, by_scenario, chosen, draw_grid, highest, replicates, whiskers
from numdev.report.figures.labels import WHITE, room_above
from numdev.report.figures.style import BLUE, GREY, SMALL, VERMILION, colour
from numdev.report.reading.scenarios import SCENARIO, formats
from numdev.report.statistics.estimates import Interval, significant

METRIC = "max_difference"
_ROOM = 0.15  # share of the vertical axis above the bars: a line of words


def fig3(rows: pd.DataFrame) -> Figure:
    """Max difference between tiled attention and the baseline at the same format, one bar per format."""
    found = chosen(rows)

    def draw(axes: Axes, panel: Panel) -> None:
        names = formats(panel.rows)
        for place, name in enumerate(names):
            interval = replicates(panel.rows[panel.rows["format"] == name], METRIC)
            _bar(axes, float(place), interval, colour(name), 0.65)
            if panel.large:
                _value(axes, float(place), interval)
            _unit_roundoff(axes, float(place), name, panel.large and place == 0)
        axes.set_xticks(range(len(names)), names)
        axes.tick_params(axis="x", length=0)

    return draw_grid(by_scenario(found), draw, _limits, axes_text=("number format F", "max |tiled − baseline|,\nabsolute"))


def fig4(rows: pd.DataFrame) -> Figure:
    """Max difference of tiled attention and of the baseline from golden; the ratio at BF16 beside the paper's."""
    found = rows[(rows["output"] == "out") & (rows["reference"] == "golden")]

    def draw(axes: Axes, panel: Panel) -> None:
        names = formats(panel.rows)
        for place, name in enumerate(names):
            here = panel.rows[panel.rows["format"] == name]
            for subject, shift, shade in (("variant", -0.2, BLUE), ("baseline", 0.2, VERMILION)):
                interval = replicates(here[here["subject"] == subject], METRIC)
                _bar(axes, place + shift, interval, shade, 0.38)
                if panel.large and place == 0:
                    _inside(axes, place + shift, "tiled" if subject == "variant" else "baseline")
        if "bf16" in names:
            _ratio(axes, panel.rows, float(names.index("bf16")), panel.large)
        axes.set_xticks(range(len(names)), names)
        axes.tick_params(axis="x", length=0)

    def ends(own: pd.DataFrame) -> tuple[float, float]:
        return _limits(own, FIG4_RATIO)

    return draw_grid(by_scenario(found), draw, ends, axes_text=("number format F", "max |result − golden|,\nabsolute"))


def _limits(rows: pd.DataFrame, paper: float = 0.0) -> tuple[float, float]:
    """From a decade below the least mean to above all bars, intervals and lines at `paper`, with room for words above these."""
    values = rows.loc[rows[METRIC] > 0, METRIC]
    if values.empty:
        return 1e-18, 1.0
    low = 10.0 ** (math.floor(math.log10(values.min())) - 1)
    panels = [own for _, own in rows.groupby(SCENARIO)]
    return low, room_above(low, max(_top(own, paper) for own in panels), _ROOM)


def _top(rows: pd.DataFrame, paper: float) -> float:
    """The upper end of what is drawn in one panel; the line of the paper is at `paper` times the baseline."""
    tops = [float(rows[METRIC].max())]
    for (name, subject), own in rows.groupby(["format", "subject"]):
        interval = replicates(own, METRIC)
        if interval is not None and interval.estimate > 0:
            tops.append(highest(interval))
            tops.append(paper * interval.estimate if (name, subject) == ("bf16", "baseline") else 0.0)
    return max(tops)


def _bar(axes: Axes, place: float, interval: Interval | None, shade: str, width: float) -> None:
    """A bar with its interval; a word where there is nothing to draw."""
    if interval is None or not interval.estimate > 0:
        axes.annotate("NaN" if interval is None else "0", (place, 0.02), xycoords=axes.get_xaxis_transform(), ha="center")
        return
    axes.bar(place, interval.estimate, width, color=shade)
    axes.errorbar(place, interval.estimate, whiskers([interval]), color="black", linewidth=0.8, capsize=2)


def _value(axes: Axes, place: float, interval: Interval | None) -> None:
    """The mean above its bar."""
    if interval is not None and interval.estimate > 0:
        top, text = highest(interval), significant(interval.estimate)
        axes.annotate(text, (place, top), (0, 3), textcoords="offset points", ha="center", fontsize=SMALL)


def _unit_roundoff(axes: Axes, place: float, name: str, labelled: bool) -> None:
    """A line across the bar at u, the largest error of rounding a number below 1 once."""
    u = Format.parse(name).u
    axes.hlines(u, place - 0.42, place + 0.42, color="black", linewidth=0.8, linestyle=(0, (2, 1)))
    if labelled:
        axes.annotate("u", (place + 0.42, u), (1, 0), textcoords="offset points", va="center", fontsize=SMALL)


def _inside(axes: Axes, place: float, text: str) -> None:
    """A word at the foot of a bar."""
    axes.annotate(
        text,
        (place, 0),
        (0, 4),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        ha="center",
        va="bottom",
        rotation=90,
        color="white",
        fontsize=7,
    )


def _ratio(axes: Axes, rows: pd.DataFrame, place: float, large: bool) -> None:
    """The ratio at BF16 above all bars, and a line at the paper's multiple of the baseline."""
    bf16 = rows[rows["format"] == "bf16"]
    try:
        times = over_baseline(bf16, METRIC)
    except Undecidable:
        return
    baseline = replicates(bf16[bf16["subject"] == "baseline"], METRIC)
    if baseline is None or math.isnan(times.estimate):
        return
    mark = FIG4_RATIO * baseline.estimate
    axes.hlines(mark, place - 0.45, place + 0.45, color="black", linewidth=0.9, linestyle=(0, (3, 1)))
    text = times.text().replace(" ", "× ", 1) if large else f"{significant(times.estimate)}×"
    look: dict[str, Any] = {"textcoords": "offset points", "ha": "left", "va": "bottom", "fontsize": 7, "bbox": WHITE}
    ours = axes.annotate(text, (place - 0.45, _top(rows, FIG4_RATIO)), (0, 3), fontweight="bold", **look)
    axes.annotate("paper: 10× (dashed)", (1, 0), (5, 0), xycoords=ours, **look | {"fontsize": SMALL, "color": GREY})
