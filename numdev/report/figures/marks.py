"""Elements of figures: log axes with names, words that do not overlap, lines with intervals, intervals in rows, and panels."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from numdev.report.claims.evidence import per_replicate
from numdev.report.figures.theme import BLACK, GREY, PAGE, PALE, SMALL, note
from numdev.report.reading.frames import is_broken
from numdev.report.statistics import Interval, mean, significant, typical

WHITE: dict[str, Any] = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}  # behind words, over a grid
BESIDE: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": SMALL}
DASHED: dict[str, Any] = {"color": GREY, "linewidth": 0.8, "linestyle": (0, (3, 2)), "zorder": 0}
TITLE: dict[str, Any] = {"loc": "left", "fontweight": "bold"}


def page(height: float, width: float = PAGE) -> Figure:
    """A figure of some inches, which keeps its words apart by itself."""
    return Figure(figsize=(width, height), layout="constrained")


def swatch(shade: str, marker: str = "o", **look: Any) -> Line2D:
    """A mark for a legend; a line too where `linestyle` says so."""
    return Line2D([], [], **{"color": shade, "marker": marker, "linestyle": "", **look})


def no_figure(reason: str) -> Figure:
    """A strip that says why there is nothing to see."""
    figure = page(0.5)
    figure.text(0.5, 0.5, reason, ha="center", va="center", color=GREY, fontsize=8)
    return figure


def replicates(rows: pd.DataFrame, metric: str, *, additive: bool = False) -> Interval | None:
    """The geometric mean over replicates, of what is `additive` the arithmetic one; None of NaN, Inf or nothing."""
    if rows.empty or bool(is_broken(rows).any()):
        return None
    values = per_replicate(rows, metric)
    own, clusters = values["value"].tolist(), values["cluster"].tolist()
    return mean(own, None, clusters) if additive else typical(own, clusters)


def highest(interval: Interval) -> float:
    """The upper end of what is drawn of an interval."""
    return interval.high if math.isfinite(interval.high) else interval.estimate


def lowest(interval: Interval) -> float:
    """The lower end of what is drawn of an interval, as far as a log axis shows it."""
    return interval.low if interval.low > 0 and math.isfinite(interval.high) else interval.estimate


def whiskers(*intervals: Interval) -> list[list[float]]:
    """Error bars for matplotlib; none where one replicate leaves the interval infinite."""
    below = [i.estimate - i.low if math.isfinite(i.high) else 0.0 for i in intervals]  # the low end is then 0, not infinite
    return [below, [highest(i) - i.estimate for i in intervals]]


def line(axes: Axes, points: Sequence[tuple[float, Interval]], **look: Any) -> None:
    """Points with their intervals, joined."""
    if points:
        places, values = zip(*points, strict=True)
        axes.errorbar(places, [value.estimate for value in values], whiskers(*values), **look)
        for x, value in points:
            note(axes, x, value.estimate, f"{look.get('label', '')} at {short(x)}: {value.text()}".strip())


def short(value: float) -> str:
    """A number whose unit is a power of two in short: 256, 1k, 16k, 1M; 2000 as it is."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= unit and float(text := f"{value / unit:.3g}") * unit == value:
            return f"{text}{letter}"
    return f"{value:g}"


def scientific(value: float) -> str:
    """A number with two significant digits as a figure shows it: 0.026, and 8.3 × 10⁻¹⁶ instead of 8.3e-16."""
    factor, _, power = significant(value).partition("e")
    return rf"${factor} \times 10^{{{power}}}$" if power else factor


def plain_ticks(axes: Axes, places: Iterable[float], turned: bool = False) -> None:
    """A log axis that names its own places, such as 256, 512, 1k."""
    turn: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if turned else {}
    known = sorted(set(places))
    axes.set_xscale("log")
    axes.set_xticks(known, [short(place) for place in known], **turn)
    axes.xaxis.set_minor_locator(NullLocator())


def log_y(axes: Axes, low: float, high: float) -> None:
    """A log axis from low to high; where that is less than three decades, 2 and 5 are named too."""
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    if math.log10(high / low) < 3:
        name_steps(axes.yaxis)


def at_least_a_decade(low: float, high: float) -> tuple[float, float]:
    """Moves both ends apart by the same factor until they span a decade, so that a few percent do not fill a log axis."""
    missing = math.sqrt(max(1.0, 10 * low / high))
    return low / missing, high * missing


def around(values: Iterable[Interval | None], *more: float, room: float = 0.0) -> tuple[float, float]:
    """The ends of a log axis around positive values with their intervals; its upper share `room` stays free for words.

    Of an interval a factor of 30 is inside, so that a wide one does not dwarf the others.
    """
    known = [value for value in values if value is not None and value.estimate > 0]
    lows = [max(lowest(value), value.estimate / 30) for value in known] + list(more)
    highs = [min(highest(value), value.estimate * 30) for value in known] + list(more)
    if not lows:
        return 0.1, 10.0
    low, high = at_least_a_decade(min(lows) / 1.2, max(highs) * 1.2)
    margin = (high / low) ** 0.04
    return low / margin, low * (high * margin / low) ** (1 / (1 - room))


class _Steps(LogLocator):
    def tick_values(self, vmin: float, vmax: float) -> Any:
        """At 1, 2 and 5 of each decade; at the decades alone where there are three or more, or no room for more names."""
        assert isinstance(self.axis, Axis)
        box, is_x = self.axis.axes.get_window_extent(), isinstance(self.axis, XAxis)
        width = 24 if min(vmin, vmax) >= 1e-4 and max(vmin, vmax) < 1e5 else 42  # of a name, in points; it is 9 high
        room = (box.width / width if is_x else box.height / 9) * 72 / self.axis.axes.figure.dpi
        self.set_params(subs=[1, 2, 5] if 3 * math.log10(vmax / vmin) < min(9, room) else [1])
        return super().tick_values(vmin, vmax)


def name_steps(axis: Axis) -> None:
    """Plain numbers on a log axis: 0.02 or 50, and 2 × 10⁻⁹ where there would be many zeros."""

    def words(value: float, _: Any) -> str:
        if 1e-4 <= value < 1e5:
            return f"{value:g}"
        digits, power = f"{value:.0e}".split("e")
        factor = "" if digits == "1" else rf"{digits} \times "
        return f"${factor}10^{{{int(power)}}}$"

    axis.set_major_locator(_Steps())
    axis.set_major_formatter(FuncFormatter(words))
    axis.set_minor_formatter(NullFormatter())


def corner(axes: Axes, words: str, *, down: int = 2, **look: Any) -> None:
    """Small words in the upper right corner, so many points below it."""
    places: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right", "va": "top"}
    axes.annotate(words, (1, 1), (-4, -down), bbox=WHITE, **places, **({"fontsize": SMALL} | look))


@dataclass(frozen=True)
class Dot:
    """A value with its interval in a row, and `text` behind it; `absent` where there is none, or on a log axis none above 0.

    Rows are counted from the top; `look` is that of `errorbar`, and `name` is for those who point at the dot.
    """

    row: float
    value: Interval | None
    shade: str = BLACK
    text: str = ""
    absent: str = "not measured"
    look: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""


def draw_rows(
    axes: Axes,
    names: Sequence[str],
    dots: Iterable[Dot],
    *,
    at: Mapping[float, str] | None = None,
    band: tuple[float, float] | None = None,
    log: bool = True,
) -> None:
    """Intervals in rows with names, the first on top; lines `at` values with words, 1 solid; a quarter of it is for words."""
    known = []
    for dot in dots:
        look: dict[str, Any] = {**BESIDE, "color": dot.shade, "bbox": WHITE}
        value = dot.value
        if value is None or not math.isfinite(value.estimate) or (log and not value.estimate > 0):
            axes.annotate(dot.absent, (0, dot.row), (3, 0), xycoords=("axes fraction", "data"), **look)
            continue
        known.append(value)
        bars = [[value.estimate - lowest(value)], whiskers(value)[1]] if log else whiskers(value)
        axes.errorbar(value.estimate, dot.row, xerr=bars, color=dot.shade, **{"marker": "o", **dot.look})
        note(axes, value.estimate, dot.row, f"{', '.join(filter(None, (names[round(dot.row)], dot.name)))}: {value.text()}")
        if dot.text:
            axes.annotate(dot.text, (highest(value), dot.row), (5, 0), annotation_clip=False, **look)
    if log:
        axes.set_xscale("log")
        axes.set_xlim(*around(known, *(at or ()), *(band or ()), room=0.25))
        name_steps(axes.xaxis)
    reference_lines(axes, at or {}, band, upright=True)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")


def reference_lines(axes: Axes, at: Mapping[float, str], band: tuple[float, float] | None, *, upright: bool) -> None:
    """Lines at values of the metric, solid at 0 and 1, with words at their ends, and a band between two values."""
    if band:
        (axes.axvspan if upright else axes.axhspan)(*band, color=PALE, zorder=0, linewidth=0)
    for place, words in at.items():
        look = DASHED | ({"color": BLACK, "linestyle": "-"} if place in (0, 1) else {})
        if upright:
            axes.axvline(place, **look)
            side: dict[str, Any] = {"ha": "right" if place <= 1 else "left", "va": "bottom", "color": GREY}
            axes.annotate(words, (place, 1), (0, 2), xycoords=axes.get_xaxis_transform(), **BESIDE | side)
        else:
            axes.axhline(place, **look)
            side = {"ha": "left", "va": "bottom", "color": GREY}
            axes.annotate(words, (0, place), (3, 2), xycoords=axes.get_yaxis_transform(), **BESIDE | side)


def grid(
    titles: Sequence[tuple[str, str]], across: int, height: float, text: tuple[str, str], **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel of some inches for each title, which has a note below it; `text` names the axes."""
    down, beside = -(-len(titles) // across), min(across, len(titles))
    figure = page(0.5 + height * down, PAGE if beside > 1 else 0.65 * PAGE)
    every: list[Axes] = list(figure.subplots(down, beside, squeeze=False, **shared).flat)
    for place in range(len(titles), len(every)):
        every[place].remove()
        every[place - beside].tick_params(labelbottom=True)  # which an axis below had, where they share it
    for axes, (title, role) in zip(every, titles, strict=False):
        axes.set_title(textwrap.fill(title, 84 // beside), fontsize=SMALL, pad=12 if role else 4, **TITLE)
        axes.annotate(role, (0, 1), (0, 3), "axes fraction", "offset points", fontsize=SMALL, color=GREY)
    figure.supxlabel(textwrap.fill(text[0], int(14 * figure.get_figwidth())), fontsize=8)
    figure.supylabel(text[1], fontsize=8)
    return figure, every[: len(titles)]
