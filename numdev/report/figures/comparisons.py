"""FlashAttention-3's Table 3 beside the published figures; tiled attention better or worse than the baseline."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from numdev.report.claims.fa3 import FACTOR, of_policy, rmse
from numdev.report.claims.finding import Undecidable
from numdev.report.claims.published import FA3_RATIO, FA3_RMSE, FIG4_RATIO
from numdev.report.figures.grid import highest, name_steps, whiskers
from numdev.report.figures.labels import WHITE
from numdev.report.figures.style import BLUE, GREY, PAGE, PALE, SMALL, VERMILION
from numdev.report.reading.scenarios import formats, of, ordered
from numdev.report.statistics.estimates import Interval, significant, typical

_POLICIES = {"uniform": ("every step in F", VERMILION), "kernel": ("FP32 inside", BLUE)}
_PUBLISHED: dict[str, Any] = {
    "marker": "D",
    "markerfacecolor": "white",
    "color": GREY,
    "linestyle": "",
    "markersize": 5,
}


def fa3_table3(rows: pd.DataFrame) -> Figure:
    """RMSE against FP64 of each method with its 95 % interval, the published figure, and a factor 1.5 around that."""
    figure = Figure(figsize=(PAGE * 0.75, 2.6), layout="constrained")
    axes = figure.add_subplot()
    names = list(FA3_RMSE)
    for place, name in enumerate(names):
        published = FA3_RMSE[name]
        axes.barh(place, published * FACTOR - published / FACTOR, 0.6, left=published / FACTOR, color=PALE, zorder=0)
        axes.plot(published, place, **_PUBLISHED)
        _measured(axes, rows, name, place)
    keys = [Line2D([], [], color=BLUE, marker="o"), Line2D([], [], **_PUBLISHED), Patch(color=PALE)]
    words = ["measured, 95 % interval", "published", "published ×/÷ 1.5"]
    figure.legend(keys, words, loc="outside upper right", ncols=3, frameon=False)
    axes.set_xscale("log")
    drawn = axes.dataLim
    axes.set_xlim(drawn.x0 / 1.4, drawn.x1 * 3)  # room for the figures on the right
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("RMSE of O against FP64, absolute")
    return figure


def _beside(shade: str) -> dict[str, Any]:
    return {"textcoords": "offset points", "va": "center", "fontsize": SMALL, "color": shade}


def _measured(axes: Axes, rows: pd.DataFrame, name: str, place: int) -> None:
    """One method's point, and how it compares with the published figure."""
    try:
        found = rmse(rows, name)
        interval = typical(found["value"].tolist(), found["cluster"].tolist())
    except Undecidable:
        axes.annotate("not measured", (FA3_RMSE[name], place), (8, 0), **_beside(GREY))
        return
    low, high = whiskers([interval])
    axes.errorbar(interval.estimate, place, xerr=[low, high], color=BLUE, marker="o", markersize=4.5)
    right = max(highest(interval), FA3_RMSE[name] * FACTOR)
    axes.annotate(significant(interval.estimate), (right, place), (6, 0), **_beside(BLUE))


def sign(rows: pd.DataFrame) -> Figure:
    """The variant's deviation from golden over the baseline's, by precision policy: right of 1 is worse."""
    lines = _lines(rows)
    figure = Figure(figsize=(PAGE, 1.1 + 0.26 * max(len(lines), 1)), layout="constrained")
    axes = figure.add_subplot()
    for place, (_, policy, largest, root) in enumerate(lines):
        shade = _POLICIES[policy][1]
        for interval, face, shift in ((largest, shade, -0.15), (root, "white", 0.15)):
            axes.errorbar(
                interval.estimate,
                place + shift,
                xerr=whiskers([interval]),
                color=shade,
                marker="o",
                markerfacecolor=face,
            )
        right = max(highest(largest), highest(root))
        axes.annotate(significant(largest.estimate), (right, place), (5, 0), bbox=WHITE, **_beside(shade))
    _frame(axes, lines)
    return figure


def _frame(axes: Axes, lines: list[tuple[str, str, Interval, Interval]]) -> None:
    """The line of no difference, what the papers found, and which side is which."""
    values = [value for _, _, *pair in lines for i in pair for value in _ends(i)] + [FIG4_RATIO, FA3_RATIO]
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 1.3, max(values) * 1.8)
    name_steps(axes.xaxis)
    axes.set_yticks(range(len(lines)), [text for text, *_ in lines])
    axes.set_ylim(len(lines) + 0.2, -0.6)
    axes.grid(visible=False)
    axes.set_xlabel("deviation of tiled attention from golden / that of the baseline\n(filled: max difference, open: RMSE)")
    axes.axvline(1, color="black", linewidth=0.8)
    for value, text in ((FIG4_RATIO, "Golden et al.: 10"), (FA3_RATIO, "FlashAttention-3: 1/1.7")):
        axes.axvline(value, color=GREY, linewidth=0.8, linestyle=(0, (3, 2)), zorder=0)
        axes.annotate(text, (value, 1), (0, 3), xycoords=axes.get_xaxis_transform(), ha="center", **_above(GREY))
    for text, side, shift in (("← better than the baseline", "right", -6), ("worse than the baseline →", "left", 6)):
        axes.annotate(text, (1, 0), (shift, 3), xycoords=axes.get_xaxis_transform(), ha=side, bbox=WHITE, **_above("black"))


def _ends(interval: Interval) -> tuple[float, float]:
    """How far an interval is shown: at most five times to either side, so that an uncertain one does not dwarf the rest."""
    low, high = (value if math.isfinite(value) else interval.estimate for value in (interval.low, interval.high))
    return max(low, interval.estimate / 5), min(high, interval.estimate * 5)


def _above(shade: str) -> dict[str, Any]:
    return {"textcoords": "offset points", "va": "bottom", "fontsize": SMALL, "color": shade}


def _lines(rows: pd.DataFrame) -> list[tuple[str, str, Interval, Interval]]:
    """Label, policy and both ratios of each line of the picture."""
    found = []
    for scenario in ordered(rows):
        here = of(rows, scenario)
        for name in formats(here):
            own = here[here["format"] == name]
            for policy, (words, _) in _POLICIES.items():
                try:
                    pair = of_policy(own, policy, "max_difference"), of_policy(own, policy, "rmse")
                except Undecidable:
                    continue
                found.append((f"{scenario.title}: {name}, {words}", policy, *pair))
    return found
