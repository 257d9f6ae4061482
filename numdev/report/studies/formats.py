"""Figures 3 and 4: deviation over number formats, and its ratio to the baseline's; total error against arithmetic error."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from numdev.arithmetic.formats import Format
from numdev.report.claims.evidence import DEVIATION, over_baseline
from numdev.report.figures.grid import (
    Lower,
    Panel,
    at_least_a_decade,
    chosen,
    draw_reproduced,
    highest,
    in_u,
    limits,
    log_y,
    lowest,
    multiples,
    name_steps,
    replicates,
    scientific,
    whiskers,
)
from numdev.report.figures.labels import WHITE, spread
from numdev.report.figures.style import BASELINE, BLACK, FP32_INSIDE, GREY, PAGE, SMALL, TILED, colour
from numdev.report.reading.scenarios import SCENARIO, formats, of, ordered, primary
from numdev.report.statistics import Interval, significant
from numdev.report.studies.attention import FIG4_RATIO, inputs, is_strict, narrowest
from numdev.report.studies.marks import BESIDE, DASHED, bar, lay_rows, measured, name_formats, titled

_LINES: tuple[tuple[float, dict[str, Any]], ...] = ((1.0, {"color": BLACK, "linewidth": 0.8}), (FIG4_RATIO, DASHED))


def policy_colour(rows: pd.DataFrame, other: str = TILED) -> str:
    """Of tiled attention: with FP32 inside, or with every step in the format; `other` where the policy is neither."""
    own = rows[rows["subject"] == "variant"]
    return {"kernel": FP32_INSIDE, "uniform": TILED}.get(str(own["policy"].iloc[0]), other) if len(own) else other


def draw_fig3(rows: pd.DataFrame) -> Figure:
    """Max difference between tiled attention and the baseline at the same format; beside it in units of the format's u."""
    own = chosen(rows)

    def top(large: Axes, narrow: Axes, panel: Panel) -> None:
        log_y(large, *_limits(panel.rows))
        _over_formats(large, panel.rows, named=True)
        large.set(xlabel="number format F", ylabel="max |tiled − baseline|,\nabsolute")
        scaled = in_u(panel.rows, (DEVIATION,))
        log_y(narrow, *at_least_a_decade(*limits(scaled, (DEVIATION,))))
        for place, name in enumerate(formats(scaled)):
            _dot(narrow, place, replicates(scaled[scaled["format"] == name], DEVIATION), colour(name))
        name_formats(narrow, formats(scaled))
        narrow.set_title("The same in u of F", loc="left")
        narrow.set_xlabel("number format F")

    text = ("number format F (dashed: its unit roundoff u)", "max |tiled − baseline|,\nabsolute")
    lower = multiples(own, lambda axes, panel: _over_formats(axes, panel.rows), _limits, text)
    return draw_reproduced(own, top, lower)


def draw_fig4(rows: pd.DataFrame) -> Figure:
    """Max difference of tiled attention and of the baseline from golden; their ratio at every format and in every scenario."""
    own = primary(rows)
    own = own[own["reference"] == "golden"]

    def top(large: Axes, narrow: Axes, panel: Panel) -> None:
        names = formats(panel.rows)
        log_y(large, *_limits(panel.rows))
        for subject, shift, shade in (("variant", -0.12, TILED), ("baseline", 0.12, BASELINE)):
            each = panel.rows[panel.rows["subject"] == subject]
            for place, name in enumerate(names):
                _dot(large, place + shift, replicates(each[each["format"] == name], DEVIATION), shade)
        keys = [Line2D([], [], color=shade, marker="o", linestyle="") for shade in (TILED, BASELINE)]
        large.legend(keys, ["tiled attention", "baseline"], loc="upper right", frameon=False)
        name_formats(large, names)
        large.set(xlabel="number format F", ylabel="max |result − golden|,\nabsolute")
        _ratios_by_format(narrow, panel.rows, names)

    lower = Lower(lambda part: _ratios_by_scenario(part, own), 0.75 + 0.165 * len(ordered(own)))
    return draw_reproduced(own, top, lower)


def _ratios_by_format(axes: Axes, rows: pd.DataFrame, names: list[str]) -> None:
    """The ratio at every format of the source's scenario."""
    ratios = [measured(over_baseline, rows[rows["format"] == name], DEVIATION) for name in names]
    log_y(axes, *_around(ratios))
    for place, (name, value) in enumerate(zip(names, ratios, strict=True)):
        if value is not None:
            axes.errorbar(place, value.estimate, whiskers([value]), color=colour(name), marker="o")
    for height, look in _LINES:
        axes.axhline(height, **{"zorder": 0} | look)
    name_formats(axes, names)
    axes.set_title("Tiled / baseline", loc="left")
    axes.set_xlabel("number format F")


def _ratios_by_scenario(part: SubFigure, rows: pd.DataFrame) -> None:
    """A dot with its interval for every scenario at BF16, or at the narrowest format; lines at 1 and at the paper's ratio."""
    own, scenarios = narrowest(rows), ordered(rows)
    axes = part.subplots(1, 1)
    ratios = [measured(over_baseline, own[own[SCENARIO] == scenario.name], DEVIATION) for scenario in scenarios]
    low, high = _around(ratios)
    axes.set_xscale("log")
    axes.set_xlim(low, high * (high / low) ** 0.32)
    name_steps(axes.xaxis)
    for place, (scenario, value) in enumerate(zip(scenarios, ratios, strict=True)):
        if value is None or not value.estimate > 0:
            axes.annotate("unknown", (0, place), (4, 0), xycoords=("axes fraction", "data"), bbox=WHITE, **BESIDE)
            continue
        bar(axes, place, value, policy_colour(of(rows, scenario)), markersize=4.5)
        text = value.text() if math.isfinite(value.high) else significant(value.estimate)
        axes.annotate(text, (highest(value), place), (6, 0), bbox=WHITE, **BESIDE)
    for ratio, look in _LINES:
        axes.axvline(ratio, **{"zorder": 0} | look)
        words = "as the baseline" if ratio == 1 else f"paper: {ratio:g}"
        place_of: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "ha": "center", "color": GREY}
        axes.annotate(words, (ratio, 1), (0, 2), **BESIDE | place_of | {"va": "bottom"})
    lay_rows(axes, [titled(scenario) for scenario in scenarios], (-0.6, 0.6))
    axes.grid(visible=True, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"max |result − golden| at {own['format'].iloc[0].upper()}, tiled / baseline")


def _around(values: list[Interval | None]) -> tuple[float, float]:
    """A log axis around all intervals, 1 and the paper's ratio."""
    known = [value for value in values if value is not None]
    ends = [1.0, FIG4_RATIO, *map(lowest, known), *map(highest, known)]
    return min(ends) / 1.6, max(ends) * 1.6


def _limits(rows: pd.DataFrame) -> tuple[float, float]:
    """From a decade below the least mean or unit roundoff to a decade above all intervals."""
    values = rows.loc[rows[DEVIATION] > 0, DEVIATION]
    if values.empty:
        return 1e-18, 1.0
    units = [Format.parse(name).u for name in formats(rows)]
    groups = (own for _, own in rows.groupby(["subject", SCENARIO, "format"]))
    top = max([values.max(), *units, *(highest(one) for own in groups if (one := replicates(own, DEVIATION)) is not None)])
    return 10.0 ** math.floor(math.log10(min(values.min(), *units)) - 0.5), 10.0 ** math.ceil(math.log10(top) + 0.5)


def _over_formats(axes: Axes, rows: pd.DataFrame, *, named: bool = False) -> None:
    """A dot for every format, and its unit roundoff; with `named`, their values too."""
    names = formats(rows)
    for place, name in enumerate(names):
        value, u = replicates(rows[rows["format"] == name], DEVIATION), Format.parse(name).u
        _dot(axes, place, value, colour(name))
        axes.hlines(u, place - 0.3, place + 0.3, color=BLACK, linewidth=0.8, linestyle=(0, (2, 1)))
        if named:
            axes.annotate("u", (place - 0.3, u), (-2, 0), ha="right", **BESIDE)
            if value is not None and value.estimate > 0:
                axes.annotate(scientific(value.estimate), (place, value.estimate), (7, 0), **BESIDE)
    name_formats(axes, names)


def _dot(axes: Axes, place: float, value: Interval | None, shade: str) -> None:
    """A dot with its interval; a word where there is nothing to draw."""
    if value is None or not value.estimate > 0:
        words = "NaN" if value is None else "0"
        axes.annotate(words, (place, 0.02), xycoords=axes.get_xaxis_transform(), ha="center", fontsize=SMALL)
        return
    axes.errorbar(place, value.estimate, whiskers([value]), color=shade, marker="o", markersize=4.5)


class _Point(NamedTuple):
    """Arithmetic error, total error, number or letter, colour, title, and whether it is of tiled attention."""

    x: Interval
    y: Interval
    text: str
    shade: str
    title: str
    filled: bool


def draw_total(rows: pd.DataFrame) -> Figure:
    """Total over arithmetic error, RMSE, of the narrowest format: on the diagonal the algorithm's own share is all.

    Numbers of tiled attention stand right of the diagonal, letters of the baselines left of it, and a list says what they are.
    """
    fmt = formats(rows)[0]
    own = in_u(rows[rows["format"] == fmt], ("rmse",))
    figure = Figure(figsize=(PAGE, 3.1), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    baselines: dict[str, pd.DataFrame] = {}  # scenarios with the same inputs share one, but for one that rounds every operation
    for scenario in ordered(own):
        here = of(own, scenario)
        baselines.setdefault(f"baseline, {inputs(here)}{', all steps in F' if is_strict(here) else ''}", here)
    tiled = [_point(of(own, one), "variant", str(i), one.title) for i, one in enumerate(ordered(own), 1)]
    lettered = [_point(here, "baseline", chr(ord("a") + i), title) for i, (title, here) in enumerate(baselines.items())]
    points = [point for point in (*tiled, *lettered) if point is not None]
    for x, y, _, shade, _, filled in points:
        bars: dict[str, Any] = {"xerr": whiskers([x]), "yerr": whiskers([y]), "elinewidth": 0.7, "capsize": 0}
        axes.errorbar(x.estimate, y.estimate, color=shade, marker="o", markerfacecolor=shade if filled else "white", **bars)
    if points:
        _square(axes, [end(value) for point in points for value in (point.x, point.y) for end in (lowest, highest)])
    for filled in (True, False):
        _along(axes, [point for point in points if point.filled == filled], points, right=filled)
    keys = [
        Line2D([], [], color=p.shade, marker="o", linestyle="", markerfacecolor=p.shade if p.filled else "white") for p in points
    ]
    look: dict[str, Any] = {"loc": "outside right center", "frameon": False, "fontsize": SMALL, "handlelength": 1}
    figure.legend(keys, [f"{point.text}  {point.title}" for point in points], **look)
    axes.set_xlabel(f"arithmetic error at {fmt.upper()}:\nRMSE from golden on the\nsame rounded inputs, in u of F")
    axes.set_ylabel(f"total error at {fmt.upper()}:\nRMSE from golden, in u of F")
    return figure


def _point(rows: pd.DataFrame, subject: str, text: str, title: str) -> _Point | None:
    """The point of tiled attention or of its baseline in one scenario."""
    x, y = (replicates(chosen(rows, subject, reference), "rmse") for reference in ("golden_same_inputs", "golden"))
    if x is None or y is None or not (x.estimate > 0 and y.estimate > 0):
        return None
    is_tiled = subject == "variant"
    return _Point(x, y, text, policy_colour(rows, GREY) if is_tiled else BASELINE, title, is_tiled)


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
    step = math.exp(gap * span / 2)
    for point, height in zip(side, heights, strict=True):
        level = low * math.exp(height * span)
        met = [p.x for p in points if lowest(p.y) / step < level < highest(p.y) * step]
        ends = [level, point.x.estimate, *map(highest if right else lowest, met)]
        start = max(ends) * 1.2 if right else min(ends) / 1.2
        axes.plot([point.x.estimate, start], [point.y.estimate, level], color=point.shade, linewidth=0.4, alpha=0.6)
        place: dict[str, Any] = {"ha": "left" if right else "right", "color": point.shade}
        axes.annotate(point.text, (start, level), (2 if right else -2, 0), **BESIDE | place)
