"""What the paper does not draw: deviation from golden by policy, total against arithmetic error, and the number of rescales."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.report.figures.grid import (
    Panel,
    at_least_a_decade,
    chosen,
    head,
    highest,
    in_u,
    limits,
    log_y,
    lowest,
    means,
    plain_ticks,
    replicates,
    whiskers,
)
from numdev.report.figures.labels import Name, spread
from numdev.report.figures.style import BASELINE, FP32_INSIDE, GREY, PAGE, SMALL, TILED, colour
from numdev.report.reading.scenarios import ROLES, SCENARIO, formats, of, ordered
from numdev.report.statistics.estimates import Interval
from numdev.report.studies.attention import inputs, is_strict

N, AREA = "problem.shape.keys", "tiling.area"
_POLICIES = {"uniform": TILED, "kernel": FP32_INSIDE}
_INPUTS = {"uniform": "-", "normal": "--"}
_METRIC = "max_difference"
_ACROSS = 5  # panels beside one another that show the rescales


def draw_parting(rows: pd.DataFrame) -> Figure:
    """Max difference from golden over N of every policy, recurrence and kind of inputs, and of the baseline on the same inputs.

    Of the narrowest format that the rows have.
    """
    own = rows[rows["format"] == formats(rows)[0]]
    figure = Figure(figsize=(PAGE, 4.5), layout="constrained")
    axes = figure.add_subplot()
    variant, baseline = chosen(own, reference="golden"), chosen(own, "baseline", "golden")
    log_y(axes, *limits(pd.concat([variant, baseline]), (_METRIC,), N))
    ends = []
    for scenario in ordered(own):
        mine = of(variant, scenario)
        if not mine.empty:
            shade = _POLICIES.get(str(mine["policy"].iloc[0]), GREY)
            ends.append(_line(axes, mine, shade, scenario.title))
    for _, mine in baseline.groupby("problem.source.kind" if "problem.source.kind" in baseline else "format", dropna=False):
        first = of(mine, ordered(mine)[0])
        ends.append(_line(axes, first, BASELINE, f"baseline: {inputs(first)}"))
    places = own[N].astype(float).unique().tolist()
    plain_ticks(axes, places)
    axes.set_xlim(min(places) * 0.9, max(places) * (max(places) / min(places)) ** 0.75)
    _label(axes, [end for end in ends if end])
    axes.set_xlabel("sequence length N, tokens")
    axes.set_ylabel(f"max |O − golden| at {formats(rows)[0].upper()},\nabsolute")
    return figure


def _line(axes: Axes, rows: pd.DataFrame, shade: str, text: str) -> Name | None:
    points = means(rows, N, _METRIC)
    if not points:
        return None
    across, intervals = [x for x, _ in points], [interval for _, interval in points]
    kind = str(rows["problem.source.kind"].iloc[0]) if "problem.source.kind" in rows else ""
    divided = "variant.softmax.normalise" in rows and (rows["variant.softmax.normalise"] == "each").all()
    style: dict[str, Any] = {"linestyle": _INPUTS.get(kind, ":"), "marker": "s" if divided else "o", "elinewidth": 0.7}
    axes.errorbar(across, [i.estimate for i in intervals], whiskers(intervals), color=shade, **style)
    return across[-1], intervals[-1].estimate, text, shade


def _label(axes: Axes, ends: list[Name]) -> None:
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


class _Point(NamedTuple):
    """Arithmetic error, total error, number or letter, colour, and title."""

    x: Interval
    y: Interval
    text: str
    shade: str
    title: str


def draw_total(rows: pd.DataFrame) -> Figure:
    """Total over arithmetic error, RMSE, of the narrowest format: on the diagonal the algorithm's own share is all.

    Numbers of tiled attention stand right of the diagonal, letters of the baselines left of it, and a list says what they are.
    """
    fmt = formats(rows)[0]
    own = in_u(rows[rows["format"] == fmt], ("rmse",))
    figure = Figure(figsize=(PAGE, 3.1), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    tiled = [_point(of(own, scenario), "variant", str(i), scenario.title) for i, scenario in enumerate(ordered(own), 1)]
    baselines = [_point(rows, "baseline", chr(ord("a") + i), title) for i, (title, rows) in enumerate(_baselines(own).items())]
    sides = {True: [p for p in tiled if p], False: [p for p in baselines if p]}
    points = [point for side in sides.values() for point in side]
    for filled, side in sides.items():
        for x, y, _, shade, _ in side:
            bars: dict[str, Any] = {"xerr": whiskers([x]), "yerr": whiskers([y]), "elinewidth": 0.7, "capsize": 0}
            face = shade if filled else "white"
            axes.errorbar(x.estimate, y.estimate, color=shade, marker="o", markerfacecolor=face, **bars)
    if points:
        _square(axes, [value for x, y, *_ in points for i in (x, y) for value in (lowest(i), highest(i))])
    for filled, side in sides.items():
        _along(axes, side, points, right=filled)
    keys = [
        Line2D([], [], color=p.shade, marker="o", linestyle="", markerfacecolor="white" if p in sides[False] else p.shade)
        for p in points
    ]
    look: dict[str, Any] = {"loc": "outside right center", "frameon": False, "fontsize": SMALL, "handlelength": 1}
    figure.legend(keys, [f"{point.text}  {point.title}" for point in points], **look)
    axes.set_xlabel(f"arithmetic error at {fmt.upper()}:\nRMSE from golden on the\nsame rounded inputs, in u of F")
    axes.set_ylabel(f"total error at {fmt.upper()}:\nRMSE from golden, in u of F")
    return figure


def _baselines(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The first scenario for each baseline: those with the same inputs share it, but for one that rounds every operation."""
    first: dict[str, pd.DataFrame] = {}
    for scenario in ordered(rows):
        own = of(rows, scenario)
        strict = ", all steps in F" if is_strict(own) else ""
        first.setdefault(f"baseline, {inputs(own)}{strict}", own)
    return first


def _point(rows: pd.DataFrame, subject: str, text: str, title: str) -> _Point | None:
    """The point of tiled attention or of its baseline in one scenario."""
    x, y = (replicates(chosen(rows, subject, reference), "rmse") for reference in ("golden_same_inputs", "golden"))
    if x is None or y is None or not (x.estimate > 0 and y.estimate > 0):
        return None
    shade = _POLICIES.get(str(rows["policy"].iloc[0]), GREY) if subject == "variant" else BASELINE
    return _Point(x, y, text, shade, title)


def _square(axes: Axes, values: list[float]) -> None:
    """Sets axes of equal aspect, with room for names on both sides of the diagonal."""
    low, high = at_least_a_decade(min(values) / 2, max(values) * 2)
    axes.set_ylim(low, high)
    axes.set_xlim(low / (high / low) ** 0.1, high * (high / low) ** 0.1)
    axes.set_aspect("equal")
    axes.grid(visible=False)
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.6, zorder=0)
    axes.annotate("total = arithmetic", (low, low), (14, 4), textcoords="offset points", color=GREY, fontsize=SMALL)


def _along(axes: Axes, side: list[_Point], points: list[_Point], *, right: bool) -> None:
    """Names beside the diagonal and all intervals, at the height of their points but moved apart, each with a hair line."""
    low, high = axes.get_ylim()
    span, gap = math.log(high / low), 0.045
    heights = spread([math.log(p.y.estimate / low) / span for p in side], gap)
    line = math.exp(gap * span / 2)
    for point, height in zip(side, heights, strict=True):
        level = low * math.exp(height * span)
        met = [p.x for p in points if lowest(p.y) / line < level < highest(p.y) * line]
        start = (
            max([level, point.x.estimate, *map(highest, met)]) * 1.2
            if right
            else min([level, point.x.estimate, *map(lowest, met)]) / 1.2
        )
        axes.plot([point.x.estimate, start], [point.y.estimate, level], color=point.shade, linewidth=0.4, alpha=0.6)
        place: dict[str, Any] = {"ha": "left" if right else "right", "va": "center", "color": point.shade, "fontsize": SMALL}
        axes.annotate(point.text, (start, level), (2 if right else -2, 0), textcoords="offset points", **place)


def draw_rescales(rows: pd.DataFrame) -> Figure:
    """Max difference from the baseline over the block area, and R = ceil(N / Bc) - 1, the number of rescales, on the right.

    Of the narrowest format; all panels have the same vertical axes.
    """
    fmt = formats(rows)[0]
    own = chosen(rows[rows["format"] == fmt])
    scenarios = ordered(own)
    down = math.ceil(len(scenarios) / _ACROSS)
    figure = Figure(figsize=(PAGE, 1.75 * down + 0.4), layout="constrained")
    counts = [count for _, count in _counts(own)]
    low, high = at_least_a_decade(*limits(own, (_METRIC,), AREA))
    for place, scenario in enumerate(scenarios):
        here = of(own, scenario)
        axes = figure.add_subplot(down, _ACROSS, place + 1)
        head(axes, Panel(scenario.title, ROLES[scenario.role], here, large=False), _ACROSS)
        log_y(axes, low, high)
        points = means(here, AREA, _METRIC)
        intervals = [interval for _, interval in points]
        axes.errorbar([x for x, _ in points], [i.estimate for i in intervals], whiskers(intervals), color=colour(fmt), marker="o")
        plain_ticks(axes, sorted(here[AREA].astype(float).unique())[::2], turned=True)
        axes.tick_params(labelleft=place % _ACROSS == 0)
        _count(
            axes, _counts(here), (min(counts), max(counts)), named=place % _ACROSS == _ACROSS - 1 or place == len(scenarios) - 1
        )
    figure.supxlabel("block area Br · Bc, elements; R = ceil(N / Bc) − 1, the number of rescales", fontsize=8)
    figure.supylabel(f"max |tiled − baseline| at {fmt.upper()},\nabsolute (filled); R (open, right)", fontsize=8)
    return figure


def _counts(rows: pd.DataFrame) -> list[tuple[float, int]]:
    """The number of rescales at each block area."""
    tiles = rows.drop_duplicates([SCENARIO, AREA]).sort_values(AREA)
    sizes = zip(tiles[AREA], tiles[N], tiles["variant.tiling.bc"], strict=True)
    return [(float(area), math.ceil(int(n) / int(bc)) - 1) for area, n, bc in sizes]


def _count(axes: Axes, counts: list[tuple[float, int]], ends: tuple[int, int], *, named: bool) -> None:
    """The number of rescales on the right, on the same axis in every panel, behind the difference."""
    right = axes.twinx()
    right.plot(*zip(*counts, strict=True), color=GREY, marker="o", markerfacecolor="white", linestyle=":")
    right.set_yscale("symlog", linthresh=1)
    least, most = ends
    right.set_ylim(0.8 if least else -0.3, most * 1.4 + 1)
    right.set_yticks([tick for tick in (0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 1023) if least <= tick <= max(most, 1)])
    right.get_yaxis().set_major_formatter(lambda value, _: f"{value:g}")
    right.minorticks_off()
    right.tick_params(colors=GREY, labelright=named)
    right.spines["right"].set_visible(True)
    right.grid(visible=False)
    axes.set_zorder(right.get_zorder() + 1)
    axes.patch.set_visible(False)
