"""Figures 7 and 8: how the weights of training runs part from those of their reference, over the steps and at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from numdev.report.claims.finding import Undecidable
from numdev.report.figures.grid import highest, log_y, lowest, scientific, whiskers
from numdev.report.figures.labels import WHITE, spread
from numdev.report.figures.style import GREY, PAGE, PALE, SMALL, TILED
from numdev.report.reading.scenarios import ROLES, of, ordered
from numdev.report.statistics.estimates import Interval, significant
from numdev.report.studies.groups import Group
from numdev.report.studies.rungs import LARGEST, SIZE, WASSERSTEIN, Rung, rungs
from numdev.results.manifest import Scenario

_MARKERS = "os^vD"
_STYLES = ("-", "--", ":", "-.")
_TITLES = {
    WASSERSTEIN: "Wasserstein distance",
    LARGEST: "Max difference of one weight",
    SIZE: "Relative Frobenius norm",
}
_IN_LADDER = {WASSERSTEIN: "Wasserstein distance, as in the paper", LARGEST: "Max difference", SIZE: "Relative norm"}
_DRAWN = (Group.FLASH, Group.ULP)  # in Figure 7


def draw_weights(rows: pd.DataFrame) -> Figure:
    """Max difference and Wasserstein distance from baseline attention over the steps, a line for each kernel."""
    scenarios = ordered(rows)
    figure = Figure(figsize=(PAGE, 0.75 + 2.35 * len(scenarios)), layout="constrained")
    grid: Any = figure.subplots(len(scenarios), 2, squeeze=False)
    looks: dict[str, tuple[str, Any, str]] = {}
    for pair, scenario in zip(grid, scenarios, strict=True):
        found = [rung for rung in rungs(of(rows, scenario)) if rung.group in _DRAWN]
        for rung in found:
            looks.setdefault(rung.name, _look(rung, len(looks)))
        for axes, metric in zip(pair, (LARGEST, WASSERSTEIN), strict=True):
            _head(axes, _TITLES[metric], scenario if len(scenarios) > 1 else None)
            _over_steps(axes, [(rung, *looks[rung.name]) for rung in found], metric)
            _exponents(axes, [(rung, looks[rung.name][0]) for rung in found], metric)
    keys = [Line2D([], [], color=shade, linestyle=style, marker=marker) for shade, style, marker in looks.values()]
    figure.legend(keys, list(looks), loc="outside upper center", ncols=min(len(looks), 3) or 1, frameon=False)
    figure.supxlabel("training steps", fontsize=8)
    figure.supylabel("difference from the weights of baseline attention", fontsize=8)
    return figure


def _look(rung: Rung, place: int) -> tuple[str, Any, str]:
    """Colour, style and marker of a line of Figure 7; controls are black and have no markers."""
    if rung.group is Group.ULP:
        return rung.group.shade, _STYLES[place % len(_STYLES)], ""
    return TILED, _STYLES[place % len(_STYLES)], _MARKERS[place % len(_MARKERS)]


def _head(axes: Axes, title: str, scenario: Scenario | None) -> None:
    words = "" if scenario is None else f"{scenario.title}\n"
    axes.set_title(f"{words}{title}", loc="left", fontweight="bold", fontsize=8)


Drawn = tuple[Rung, str, Any, str]  # with colour, style and marker


def _over_steps(axes: Axes, found: Sequence[Drawn], metric: str, *, logarithmic: bool = True) -> None:
    """Median lines, and bands from the least to the greatest replicate, on log axes or on linear ones."""
    ends: list[float] = []
    for rung, shade, style, marker in found:
        curve = rung.curve(metric)
        if curve.empty:
            continue
        axes.plot(curve.index, curve["median"], color=shade, linestyle=style, marker=marker, markersize=2.5)
        low = curve["min"].where(curve["min"] > 0, curve["median"])
        axes.fill_between(curve.index, low, curve["max"], color=shade, alpha=0.2, linewidth=0)
        ends += [float(low.min()), float(curve["max"].max())]
    axes.set_xscale("log" if logarithmic else "linear")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if ends and not logarithmic:
        axes.set_ylim(0, max(ends) * 1.05)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: scientific(value) if value else "0"))
    elif ends:
        log_y(axes, min(ends) / 1.5, max(ends) * 1.5)
    else:
        axes.annotate("no difference", (0.5, 0.5), xycoords="axes fraction", ha="center", color=GREY, fontsize=SMALL)
        axes.set_yticks([])


def _exponents(axes: Axes, found: Sequence[tuple[Rung, str]], metric: str) -> None:
    """The power of the step behind the end of each line."""
    ends = [
        (rung.curve(metric)["median"].iloc[-1], rung.exponent(metric), shade) for rung, shade in found if len(rung.curve(metric))
    ]
    if not ends:
        return
    low, high = axes.get_ylim()
    heights = spread([math.log(end / low) / math.log(high / low) for end, _, _ in ends], 0.07)
    steps = [step for rung, _ in found for step in rung.steps()]
    axes.set_xlim(min(steps) / 1.2, max(steps) * (max(steps) / min(steps)) ** 0.3)
    for (_, power, shade), height in zip(ends, heights, strict=True):
        words = f"$\\propto t^{{{significant(power.estimate)}}}$" if math.isfinite(power.estimate) else ""
        place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        axes.annotate(words, (max(steps), height), (6, 0), **place, va="center", color=shade, fontsize=8)


def draw_ladder(rows: pd.DataFrame) -> Figure:
    """Every rung over the steps by three metrics; below, its difference at the last step, and how fast that grows."""
    blocks = [(scenario, rungs(of(rows, scenario))) for scenario in ordered(rows)]
    heights = [_height(found, first=not i) for i, (_, found) in enumerate(blocks)]
    figure = Figure(figsize=(PAGE, 0.6 + sum(heights)), layout="constrained")
    parts: Any = figure.subfigures(len(blocks), 1, height_ratios=heights, squeeze=False)
    for i, ((scenario, found), (part,)) in enumerate(zip(blocks, parts, strict=True)):
        if len(blocks) > 1:
            role = f" ({ROLES[scenario.role]})" if ROLES[scenario.role] else ""
            part.suptitle(f"{scenario.title}{role}", fontsize=8, fontweight="bold", x=0.01, ha="left")
        _block(part, found, whole=not i)
    groups = list(dict.fromkeys(rung.group for _, found in blocks for rung in found if rung.group is not Group.SHAM))
    keys: list[Any] = [Line2D([], [], color=group.shade, linewidth=2) for group in groups]
    words = [group.words for group in groups]
    if any(_band(found) for _, found in blocks):
        keys, words = [*keys, Patch(color=PALE)], [*words, "2 to 5 times below FP16, the paper's range"]
    figure.legend(keys, words, loc="outside upper center", ncols=3, frameon=False)
    return figure


def _height(found: Sequence[Rung], *, first: bool) -> float:
    """Of a scenario, inches; the first alone is drawn over the steps too, so that a figure keeps to a page."""
    return (2.1 if first else 0.2) + 0.65 + 0.19 * len(found)


def _block(part: Any, found: list[Rung], *, whole: bool) -> None:
    """One scenario: its lines, if wanted, and below them its dots."""
    below = 0.65 + 0.19 * len(found)
    parts: Any = part.subfigures(1 + whole, 1, height_ratios=[2.1, below] if whole else [below], squeeze=False)
    if whole:
        grid: Any = parts[0][0].subplots(1, 3, width_ratios=[2, 1, 1])
        for axes, metric in zip(grid, (WASSERSTEIN, LARGEST, SIZE), strict=True):
            _head(axes, _IN_LADDER[metric], None)
            _over_steps(axes, list(_lines(found)), metric, logarithmic=metric != WASSERSTEIN)
            axes.set_xlabel("training steps")
    last, rate = parts[-1][0].subplots(1, 2, sharey=True, width_ratios=[3, 2])
    band = _band(found)
    if band is not None:
        last.axvspan(*band, color=PALE, zorder=0, linewidth=0)
    _dots(last, [(rung, _safe(rung, end=True), _zeros(rung)) for rung in found], "exactly 0")
    _dots(rate, [(rung, _safe(rung, end=False), "") for rung in found], "does not grow")
    last.set_yticks(range(len(found)), [rung.name for rung in found])
    last.set_ylim(len(found) - 0.5, -0.5)
    _head(last, f"At the last step, {found[0].end:,}" if found else "At the last step", None)
    _head(rate, "Growth per step", None)
    last.set_xlabel("Wasserstein distance")
    rate.set_xlabel("Wasserstein distance per step")


def _lines(found: Sequence[Rung]) -> Any:
    """Rungs of a group share a colour and differ in style."""
    seen: dict[Group, int] = {}
    for rung in found:
        place = seen[rung.group] = seen.get(rung.group, -1) + 1
        yield rung, rung.group.shade, _STYLES[place % len(_STYLES)], ""


def _safe(rung: Rung, *, end: bool) -> Interval | None:
    """The difference at the end, or its growth per step; None where no run got there."""
    try:
        return rung.end_of(WASSERSTEIN) if end else rung.rate()
    except Undecidable:
        return None


def _band(found: Sequence[Rung]) -> tuple[float, float] | None:
    """A fifth to a half of what FP16 in place of FP32 does: where the source sees flash attention."""
    halves = [_safe(rung, end=True) for rung in found if rung.group is Group.PRECISION and rung.name.startswith("FP16")]
    known = [half.estimate for half in halves if half is not None and half.estimate > 0]
    return (known[0] / 5, known[0] / 2) if known else None


def _zeros(rung: Rung) -> str:
    """What stands behind the value at the last step where some replicates, not all, end with the weights of their references."""
    last = rung.rows.loc[rung.rows["step"] == rung.end, WASSERSTEIN]
    count = int((last == 0).sum())
    return f" (0 in {count} of {len(last)} replicates)" if 0 < count < len(last) else ""


def _dots(axes: Axes, found: Sequence[tuple[Rung, Interval | None, str]], zero: str) -> None:
    """A row per rung: interval, value on a log axis and a note of its own; words where no value is positive."""
    axes.set_xscale("log")
    drawn = [interval for _, interval, _ in found if interval is not None and interval.estimate > 0]
    if drawn:
        low, high = min(map(lowest, drawn)), max(map(highest, drawn))
        wide = max(high / low, 10.0)  # then a power of ten is inside, and has a name
        axes.set_xlim(low / wide**0.15, high * wide**0.3)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    for place, (rung, interval, note) in enumerate(found):
        look: dict[str, Any] = {"va": "center", "fontsize": SMALL, "color": rung.group.shade, "bbox": WHITE}
        if interval is None or not interval.estimate > 0:
            words = "stopped early" if interval is None or math.isnan(interval.estimate) else zero
            axes.annotate(words, (0, place), (4, 0), ("axes fraction", "data"), "offset points", **look)
            continue
        axes.errorbar(interval.estimate, place, xerr=whiskers([_shown(interval)]), color=rung.group.shade, marker="o")
        axes.annotate(
            scientific(interval.estimate) + note, (highest(interval), place), (5, 0), textcoords="offset points", **look
        )


def _shown(interval: Interval) -> Interval:
    """With the lower end where a log axis can show it."""
    low = interval.low if interval.low > 0 else interval.estimate
    return Interval(interval.estimate, low, interval.high, interval.count)
