"""What the paper does not draw: where the policies part ways, total against arithmetic error, and the number of rescales."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.report.figures.grid import chosen, log_y, means, plain_ticks, replicates, whiskers
from numdev.report.figures.trends import in_u, limits, spread
from numdev.report.settings import describe, formats, inputs, ordered
from numdev.report.statistics import Interval
from numdev.report.style import BLUE, GREY, PAGE, SMALL, VERMILION, colour

N, AREA = "problem.shape.keys", "tiling.area"
_POLICIES = {"uniform": VERMILION, "kernel": BLUE}
_INPUTS = {"uniform": "-", "normal": "--"}
_METRIC = "max_difference"


def parting(rows: pd.DataFrame) -> Figure:
    """Max difference from golden over N of every policy, recurrence and kind of inputs, and of the baseline on the same inputs.

    Of the narrowest format that the rows have.
    """
    own = rows[rows["format"] == formats(rows)[0]]
    figure = Figure(figsize=(PAGE, 3.6), layout="constrained")
    axes = figure.add_subplot()
    variant, baseline = chosen(own, reference="golden"), chosen(own, "baseline", "golden")
    log_y(axes, *limits(pd.concat([variant, baseline]), (_METRIC,)))
    ends = []
    for setting in ordered(own["setting"]):
        mine = variant[variant["setting"] == setting]
        if not mine.empty:
            shade = _POLICIES.get(str(mine["policy"].iloc[0]), GREY)
            ends.append(_line(axes, mine, shade, f"{setting}: {describe(mine)}"))
    for _, mine in baseline.groupby("problem.source.kind" if "problem.source.kind" in baseline else "format", dropna=False):
        first = mine[mine["setting"] == ordered(mine["setting"])[0]]
        ends.append(_line(axes, first, GREY, f"baseline: {inputs(first)}"))
    places = own[N].astype(float).unique().tolist()
    plain_ticks(axes, places)
    axes.set_xlim(min(places) * 0.9, max(places) * (max(places) / min(places)) ** 0.75)
    _label(axes, [end for end in ends if end])
    axes.set_xlabel("sequence length N, tokens")
    axes.set_ylabel(f"max |O − golden| at {formats(rows)[0]},\nabsolute")
    return figure


_End = tuple[float, float, str, str]  # x, y, text, colour


def _line(axes: Axes, rows: pd.DataFrame, shade: str, text: str) -> _End | None:
    points = means(rows, N, _METRIC)
    if not points:
        return None
    across, intervals = [x for x, _ in points], [interval for _, interval in points]
    kind = str(rows["problem.source.kind"].iloc[0]) if "problem.source.kind" in rows else ""
    divided = "variant.softmax.normalise" in rows and (rows["variant.softmax.normalise"] == "each").all()
    style: dict[str, Any] = {"linestyle": _INPUTS.get(kind, ":"), "marker": "s" if divided else "o", "elinewidth": 0.7}
    axes.errorbar(across, [i.estimate for i in intervals], whiskers(intervals), color=shade, **style)
    return across[-1], intervals[-1].estimate, text, shade


def _label(axes: Axes, ends: list[_End]) -> None:
    """Every line's name on the right, a hair line to its end."""
    low, high = axes.get_ylim()
    decades = math.log(high / low)
    heights = spread([math.log(y / low) / decades for _, y, _, _ in ends], 0.062)
    right = axes.get_xlim()[1]
    start = max(x for x, _, _, _ in ends) * 1.25
    for (x, y, text, shade), height in zip(ends, heights, strict=True):
        level = low * math.exp(height * decades)
        axes.plot([x, start], [y, level], color=shade, linewidth=0.4, alpha=0.6)
        axes.annotate(text, (start, level), (2, 0), textcoords="offset points", va="center", color=shade, fontsize=SMALL)
    axes.set_xlim(right=right)


def total(rows: pd.DataFrame) -> Figure:
    """Total against arithmetic error, RMSE, a point per format and setting: on the diagonal the algorithm's own share is all."""
    figure = Figure(figsize=(PAGE * 0.6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    values = []
    for subject, face in (("variant", True), ("baseline", False)):
        whole, own = (in_u(chosen(rows, subject, r), ("rmse",)) for r in ("golden", "golden_same_inputs"))
        for name in formats(rows):
            for setting in ordered(rows["setting"]):
                pair = [replicates(t[(t["format"] == name) & (t["setting"] == setting)], "rmse") for t in (own, whole)]
                x, y = pair
                if x is None or y is None or not (x.estimate > 0 and y.estimate > 0):
                    continue
                values += [x.estimate, y.estimate]
                _point(axes, x, y, colour(name), filled=face)
    if values:
        ends = [min(values) / 2, max(values) * 2]
        axes.plot(ends, ends, color=GREY, linewidth=0.6, zorder=0)
    keys = [Line2D([], [], color=colour(name), marker="o", linestyle="") for name in formats(rows)]
    keys += [Line2D([], [], color=GREY, marker="o", linestyle="", markerfacecolor=face) for face in (GREY, "white")]
    figure.legend(keys, [*formats(rows), "tiled", "baseline"], loc="outside upper center", ncols=6, frameon=False)
    axes.set_xlabel("arithmetic error: RMSE from golden of the same inputs, in u of F")
    axes.set_ylabel("total error: RMSE from golden,\nin u of F")
    return figure


def _point(axes: Axes, x: Interval, y: Interval, shade: str, *, filled: bool) -> None:
    axes.errorbar(
        x.estimate,
        y.estimate,
        xerr=whiskers([x]),
        yerr=whiskers([y]),
        color=shade,
        marker="o",
        markerfacecolor=shade if filled else "white",
        elinewidth=0.7,
        capsize=0,
    )


def rescales(rows: pd.DataFrame) -> Figure:
    """Max difference from the baseline over the block area, and R = ceil(N / Bc) - 1, the number of rescales, on the right."""
    settings = [s for s in ordered(rows["setting"]) if not rows[rows["setting"] == s].empty]
    figure = Figure(figsize=(PAGE, 2.1 * math.ceil(len(settings) / 3) + 0.4), layout="constrained")
    for place, setting in enumerate(settings):
        own = rows[rows["setting"] == setting]
        axes = figure.add_subplot(math.ceil(len(settings) / 3), 3, place + 1)
        axes.set_title(setting, loc="left", fontweight="bold")
        found = chosen(own[own["format"] == formats(own)[0]])
        points = means(found, AREA, _METRIC)
        if points:
            low, high = limits(found, (_METRIC,))
            log_y(axes, min(low, high / 10), high)  # at least a decade, so that the ticks are round numbers
            intervals = [interval for _, interval in points]
            shade = colour(formats(own)[0])
            axes.errorbar([x for x, _ in points], [i.estimate for i in intervals], whiskers(intervals), color=shade, marker="o")
        _count(axes, found)
        plain_ticks(axes, found[AREA].astype(float).unique().tolist(), turned=True)
    figure.supxlabel("block area Br · Bc, elements; R = ceil(N / Bc) − 1, the number of rescales", fontsize=8)
    figure.supylabel("max |tiled − baseline|, \nabsolute (filled); R (open, right)", fontsize=8)
    return figure


def _count(axes: Axes, rows: pd.DataFrame) -> None:
    tiles = rows.drop_duplicates(AREA).sort_values(AREA)
    counts = [math.ceil(int(n) / int(bc)) - 1 for n, bc in zip(tiles[N], tiles["variant.tiling.bc"], strict=True)]
    right = axes.twinx()
    right.plot(tiles[AREA].astype(float), counts, color=GREY, marker="o", markerfacecolor="white", linestyle=":")
    right.set_yscale("symlog", linthresh=1)
    right.set_yticks(sorted({c for c in counts if c in (0, 1, 3, 7, 15, 31, 63, 127)} or set(counts)))
    right.get_yaxis().set_major_formatter(lambda value, _: f"{value:g}")
    right.minorticks_off()
    right.tick_params(colors=GREY)
    right.spines["right"].set_visible(True)
    right.grid(visible=False)
