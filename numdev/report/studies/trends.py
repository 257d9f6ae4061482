"""Figures 5 and 6: how the difference goes with the sequence length, with the block area and with the shape of a tile.

A factor of two would not be seen on an axis over the sixteen decades from BF16 to FP64. So the large panel and the small ones
show BF16 alone, and the narrow one every format in units of its own u, where the slopes can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.report.claims.evidence import DEVIATION, over_baseline, over_column, select
from numdev.report.claims.verdicts import MARGIN
from numdev.report.figures.grid import (
    Panel,
    at_least_a_decade,
    chosen,
    draw_reproduced,
    head,
    highest,
    in_u,
    limits,
    log_y,
    lowest,
    means,
    multiples,
    plain_ticks,
    whiskers,
)
from numdev.report.figures.labels import WHITE, Name, corner, paper_goes, spread
from numdev.report.figures.style import BASELINE, BLACK, GREY, PAGE, PALE, SERIES, SMALL, TILED, colour
from numdev.report.reading.scenarios import ROLES, SCENARIO, formats, of, ordered
from numdev.report.statistics import Interval, ratio, significant
from numdev.report.studies.attention import AREA, AROUND, FIG4_RATIO, LENGTH, inputs, narrowest
from numdev.report.studies.formats import policy_colour
from numdev.report.studies.marks import BESIDE, DASHED, line, measured, name_ends, name_formats, titled
from numdev.results.manifest import Role

_ROOM = 0.2  # share of the vertical axis above the data: a line of words


class _Across(NamedTuple):
    """The abscissa of a difference: its column, symbol and name on the axis, and the paper's trend."""

    column: str
    symbol: str
    text: str
    paper: str
    rises: bool

    def exponent(self, rows: pd.DataFrame, metric: str) -> str:
        """The exponent in the label of a line."""
        value = measured(over_column, rows, self.column, metric, self.symbol)
        return f"$\\propto {self.symbol}^{{{significant(value.estimate)}}}$" if value and math.isfinite(value.estimate) else ""


_ACROSS = {
    "length": _Across(LENGTH, "N", "sequence length N, tokens", "paper: grows with N", True),
    "area": _Across(AREA, "A", "block area A = Br · Bc, elements", "paper: falls with the area", False),
}
_METRICS = {"max_difference": "max |tiled − baseline|", "mean_absolute": "mean |D| and std of D"}


def draw_trend(rows: pd.DataFrame, over: str, metrics: Sequence[str]) -> Figure:
    """Metrics at BF16, absolute, in the source's scenario; every format in u beside it; the other scenarios below."""
    own, across, first = chosen(rows), _ACROSS[over], metrics[0]
    main = narrowest(own)["format"].iloc[0]
    text = f"{_METRICS[first]}\nat {main.upper()}, absolute"

    def lines(axes: Axes, panel: Panel) -> pd.DataFrame:
        here = panel.rows[panel.rows["format"] == main]
        for metric in metrics:
            line(axes, means(here, across.column, metric), elinewidth=0.8, **_look(main, first=metric == first))
        _places(axes, here, across)
        return here

    def top(large: Axes, narrow: Axes, panel: Panel) -> None:
        here = lines(large, panel)
        large.set_ylim(0, large.get_ylim()[1] * 1.3)
        corner(large, across.exponent(here, first), down=16, color=colour(main), fontsize=8)
        paper_goes(large, across.paper, up=across.rises)
        large.set(xlabel=across.text, ylabel=text)
        if len(metrics) > 1:
            keys = [Line2D([], [], **_look(main, first=is_first)) for is_first in (True, False)]
            large.legend(keys, ["mean of |D|", "standard deviation of D"], loc="upper left", frameon=False)
        _every_format(narrow, panel.rows, across, first)

    def small(axes: Axes, panel: Panel) -> None:
        corner(axes, across.exponent(lines(axes, panel), first))

    def ends(each: pd.DataFrame) -> tuple[float, float]:
        return limits(each[each["format"] == main], tuple(metrics), across.column, room=_ROOM)

    return draw_reproduced(own, top, multiples(own, small, ends, (across.text, text)))


def _look(fmt: str, *, first: bool) -> dict[str, Any]:
    shade = colour(fmt)
    face, dash = (shade, "-") if first else ("white", "--")
    return {"color": shade, "linestyle": dash, "marker": "o", "markerfacecolor": face}


def _places(axes: Axes, rows: pd.DataFrame, across: _Across) -> None:
    """Names the places that were measured, every other one where there are many."""
    places = sorted(rows[across.column].dropna().astype(float).unique().tolist())
    if places:
        axes.set_xscale("log")
        plain_ticks(axes, places[:: 2 if len(places) > 4 else 1])
        span = max(places[-1] / places[0], 2.0)
        axes.set_xlim(places[0] / span**0.08, places[-1] * span**0.08)


def _every_format(axes: Axes, rows: pd.DataFrame, across: _Across, metric: str) -> None:
    """One line per format in units of its u, each named with its exponent."""
    scaled = in_u(rows, (metric,))
    log_y(axes, *limits(scaled, (metric,), across.column))
    ends: list[Name] = []
    for name in formats(scaled):
        own = scaled[scaled["format"] == name]
        end = line(axes, means(own, across.column, metric), elinewidth=0.8, **_look(name, first=True))
        ends += [(*end, f"{name.upper()} {across.exponent(own, metric)}", colour(name))] if end else []
    _places(axes, scaled, across)
    left, right = axes.get_xlim()
    axes.set_xlim(left, right * (right / left) ** 0.75)
    name_ends(axes, ends, 0.09, 6)
    axes.set_title("Every format, in u of F", loc="left")
    axes.set_xlabel(across.text.partition(",")[0])


_TILE, _SRAM = "label.tiling.shape", "label.tiling.sram"
_SIDES = ["variant.tiling.br", "variant.tiling.bc"]
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "as_is": ("as in the paper", {"linestyle": "-", "marker": "o", "markersize": 2.5, "zorder": 3.0}),
    "swapped": ("Br and Bc swapped", {"linestyle": "--", "marker": "s", "markersize": 4.5, "zorder": 2.455}),
    "square": ("square, same area", {"linestyle": "--", "marker": "s", "markersize": 4.5, "zorder": 2.455}),
    "square_bc": ("square, same Bc", {"linestyle": ":", "marker": "D", "markersize": 6.0, "zorder": 2.44}),
}
"""Words and style of each shape of the tile. The paper's is small and in front, so that the others stay visible behind it."""


def draw_shapes(rows: pd.DataFrame, other: str, paper: str) -> Figure:
    """Every shape at BF16 over the block area in the source's scenario; the ratio at every format beside it; the rest below."""
    own = chosen(rows)
    as_is = own[own[_TILE] == "as_is"].drop_duplicates([SCENARIO, _SRAM])  # all shapes of one size are drawn at its area
    own = own.merge(as_is[[SCENARIO, _SRAM]].assign(area=as_is[AREA].astype(float)), on=[SCENARIO, _SRAM])
    present = [name for name in _SHAPES if (own[_TILE] == name).any()]
    main = narrowest(own)["format"].iloc[0]

    def look(shape: str) -> dict[str, Any]:
        face = colour(main) if shape == "as_is" else "white"
        return {"color": colour(main), "markerfacecolor": face} | _SHAPES[shape][1]

    def lines(axes: Axes, panel: Panel) -> None:
        here = panel.rows[panel.rows["format"] == main]
        for shape in present:
            line(axes, means(here[here[_TILE] == shape], "area", DEVIATION), elinewidth=0.8, **look(shape))
        plain_ticks(axes, here["area"].tolist()[:: 1 if panel.large else 2], turned=not panel.large)
        times = measured(_against_as_is, here, other)
        words = "" if times is None else f"{other} / paper's: {times.text()}"
        short = "" if times is None else f"ratio {significant(times.estimate, 3)}"
        corner(axes, words if panel.large else short, **({"fontsize": 8} if panel.large else {}))

    def top(large: Axes, narrow: Axes, panel: Panel) -> None:
        lines(large, panel)
        large.set_ylim(0, large.get_ylim()[1] * 1.6)
        corner(large, paper, down=14, color=GREY)
        keys = [Line2D([], [], **look(name)) for name in present]
        large.legend(keys, [_SHAPES[name][0] for name in present], loc="upper left", frameon=False)
        large.set(xlabel=text[0], ylabel=text[1])
        _ratios_by_format(narrow, panel.rows, other)

    def ends(each: pd.DataFrame) -> tuple[float, float]:
        return limits(each[each["format"] == main], (DEVIATION,), "area", _TILE, room=0.3)  # two lines of words

    text = ("block area Br · Bc, elements", f"max |tiled − baseline|\nat {main.upper()}, absolute")
    return draw_reproduced(own, top, multiples(own, lines, ends, text))


def _against_as_is(rows: pd.DataFrame, shape: str) -> Interval | None:
    """The difference with another shape of the tile over that with the paper's; None where no size has two tiles."""
    as_is, other = (select(rows, **{_TILE: value}) for value in ("as_is", shape))
    pairs = as_is.merge(other, on=[_SRAM, "seed"], suffixes=("", "_other"))
    pairs = pairs[(pairs[_SIDES] != pairs[[f"{side}_other" for side in _SIDES]].to_numpy()).any(axis=1)]
    return ratio(pairs[f"{DEVIATION}_other"], pairs[DEVIATION], pairs["seed"], pairs["cluster"]) if len(pairs) else None


def _ratios_by_format(axes: Axes, rows: pd.DataFrame, other: str) -> None:
    """The ratio at every format, and the band in which two tiles are alike."""
    axes.axhspan(1 / MARGIN, MARGIN, color=PALE, zorder=0, linewidth=0)
    axes.axhline(1, color=BLACK, linewidth=0.8, zorder=1)
    for place, name in enumerate(formats(rows)):
        times = measured(_against_as_is, rows[rows["format"] == name], other)
        if times is not None:
            axes.errorbar(place, times.estimate, whiskers([times]), color=colour(name), marker="o")
    name_formats(axes, formats(rows))
    axes.tick_params(axis="x", length=3.5)
    axes.margins(y=0.2)
    axes.set_title(f"{other.capitalize()} / as in the paper", loc="left")
    axes.set_xlabel("number format F (grey: alike)")


def draw_assumptions(rows: pd.DataFrame) -> Figure:
    """The ratio of Figure 4 at BF16 over N, a line for each scenario, beside the paper's ten times."""
    bf16 = rows[rows["format"] == "bf16"]
    drawn = {scenario: points for scenario in ordered(bf16) if (points := _ratios_over_n(of(bf16, scenario)))}
    figure = Figure(figsize=(PAGE, 2.9), layout="constrained")
    axes = figure.add_subplot()
    values = [value for points in drawn.values() for _, value in points]
    ends = [*map(lowest, values), *map(highest, values), FIG4_RATIO / AROUND, FIG4_RATIO * AROUND]
    log_y(axes, min(ends) / 1.2, max(ends) * 1.4)
    names: list[Name] = []
    for place, (scenario, points) in enumerate(drawn.items()):
        shade = TILED if scenario.role is Role.ASSUMED else SERIES[place % len(SERIES)]
        end = line(axes, points, color=shade, marker="os^Dv<>P"[place % 8], elinewidth=0.7)
        names += [(*end, titled(scenario), shade)] if end else []
        for x, value in points if scenario.role is Role.ASSUMED else ():
            look: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": SMALL, "bbox": WHITE}
            axes.annotate(significant(value.estimate), (x, value.estimate), (0, 5), **look)
    places = sorted({n for points in drawn.values() for n, _ in points})
    plain_ticks(axes, places)
    axes.axhspan(FIG4_RATIO / AROUND, FIG4_RATIO * AROUND, color=PALE, zorder=0)
    axes.axhline(FIG4_RATIO, **DASHED)
    words = BESIDE | {"xycoords": axes.get_yaxis_transform(), "ha": "right", "va": "bottom", "color": GREY}
    axes.annotate("paper: 10 times, N and inputs not given", (1, FIG4_RATIO), (-3, 3), **words)
    if names:
        axes.set_xlim(places[0] / 1.12, places[-1] * (places[-1] / places[0]) ** 0.8)
        name_ends(axes, names, 0.07, 8)
    axes.set(xlabel="sequence length N, tokens", ylabel="max |O − golden|, tiled / baseline,\nat BF16")
    return figure


def _ratios_over_n(rows: pd.DataFrame) -> list[tuple[float, Interval]]:
    """The ratio at each N that has one."""
    each = [(float(str(n)), measured(over_baseline, own, DEVIATION)) for n, own in rows.groupby(LENGTH, sort=True)]
    return [(n, value) for n, value in each if value is not None and value.estimate > 0]


def draw_parting(rows: pd.DataFrame) -> Figure:
    """Max difference from golden over N of every policy, recurrence and kind of inputs, and of the baseline on the same inputs.

    Of the narrowest format that the rows have.
    """
    own = rows[rows["format"] == formats(rows)[0]]
    figure = Figure(figsize=(PAGE, 4.5), layout="constrained")
    axes = figure.add_subplot()
    variant, baseline = chosen(own, reference="golden"), chosen(own, "baseline", "golden")
    log_y(axes, *limits(pd.concat([variant, baseline]), (DEVIATION,), LENGTH))
    drawn = [(of(variant, one), policy_colour(of(variant, one), GREY), one.title) for one in ordered(own)]
    kind = "problem.source.kind" if "problem.source.kind" in baseline else "format"
    for _, mine in baseline.groupby(kind, dropna=False):
        first = of(mine, ordered(mine)[0])
        drawn.append((first, BASELINE, f"baseline: {inputs(first)}"))
    ends: list[Name] = []
    for mine, shade, text in drawn:
        if len(mine) and (end := line(axes, means(mine, LENGTH, DEVIATION), color=shade, elinewidth=0.7, **_dashes(mine))):
            ends.append((*end, text, shade))
    places = own[LENGTH].astype(float).unique().tolist()
    plain_ticks(axes, places)
    axes.set_xlim(min(places) * 0.9, max(places) * (max(places) / min(places)) ** 0.75)
    _label(axes, ends)
    axes.set(xlabel="sequence length N, tokens", ylabel=f"max |O − golden| at {formats(rows)[0].upper()},\nabsolute")
    return figure


def _dashes(rows: pd.DataFrame) -> dict[str, Any]:
    """Solid for uniform inputs, dashed for normal ones; squares for FlashAttention-1."""
    kind = str(rows["problem.source.kind"].iloc[0]) if "problem.source.kind" in rows else ""
    divided = "variant.softmax.normalise" in rows and (rows["variant.softmax.normalise"] == "each").all()
    return {"linestyle": {"uniform": "-", "normal": "--"}.get(kind, ":"), "marker": "s" if divided else "o"}


def _label(axes: Axes, ends: list[Name]) -> None:
    """Every line's name on the right, a hair line to its end."""
    low, high = axes.get_ylim()
    decades = math.log(high / low)
    heights = spread([math.log(y / low) / decades for _, y, _, _ in ends], 0.062)
    right, start = axes.get_xlim()[1], max(x for x, _, _, _ in ends) * 1.25
    for (x, y, text, shade), height in zip(ends, heights, strict=True):
        level = low * math.exp(height * decades)
        axes.plot([x, start], [y, level], color=shade, linewidth=0.4, alpha=0.6)
        axes.annotate(text, (start, level), (2, 0), color=shade, **BESIDE)
    axes.set_xlim(right=right)


_BESIDE = 5  # panels beside one another that show the rescales


def draw_rescales(rows: pd.DataFrame) -> Figure:
    """Max difference from the baseline over the block area, and R = ceil(N / Bc) - 1, the number of rescales, on the right.

    Of the narrowest format; all panels have the same vertical axes.
    """
    fmt = formats(rows)[0]
    own = chosen(rows[rows["format"] == fmt])
    scenarios = ordered(own)
    down = math.ceil(len(scenarios) / _BESIDE)
    figure = Figure(figsize=(PAGE, 1.75 * down + 0.4), layout="constrained")
    counts = [count for _, count in _counts(own)]
    low, high = at_least_a_decade(*limits(own, (DEVIATION,), AREA))
    for place, scenario in enumerate(scenarios):
        here = of(own, scenario)
        axes = figure.add_subplot(down, _BESIDE, place + 1)
        head(axes, Panel(scenario.title, ROLES[scenario.role], here, large=False), _BESIDE)
        log_y(axes, low, high)
        line(axes, means(here, AREA, DEVIATION), color=colour(fmt), marker="o")
        plain_ticks(axes, sorted(here[AREA].astype(float).unique())[::2], turned=True)
        axes.tick_params(labelleft=place % _BESIDE == 0)
        named = place % _BESIDE == _BESIDE - 1 or place == len(scenarios) - 1
        _count(axes, _counts(here), (min(counts), max(counts)), named=named)
    figure.supxlabel("block area Br · Bc, elements; R = ceil(N / Bc) − 1, the number of rescales", fontsize=8)
    figure.supylabel(f"max |tiled − baseline| at {fmt.upper()},\nabsolute (filled); R (open, right)", fontsize=8)
    return figure


def _counts(rows: pd.DataFrame) -> list[tuple[float, int]]:
    """The number of rescales at each block area."""
    tiles = rows.drop_duplicates([SCENARIO, AREA]).sort_values(AREA)
    sizes = zip(tiles[AREA], tiles[LENGTH], tiles["variant.tiling.bc"], strict=True)
    return [(float(area), math.ceil(int(n) / int(bc)) - 1) for area, n, bc in sizes]


def _count(axes: Axes, counts: list[tuple[float, int]], ends: tuple[int, int], *, named: bool) -> None:
    """The number of rescales on the right, on the same axis in every panel, behind the difference."""
    right, (least, most) = axes.twinx(), ends
    right.plot(*zip(*counts, strict=True), color=GREY, marker="o", markerfacecolor="white", linestyle=":")
    right.set_yscale("symlog", linthresh=1)
    right.set_ylim(0.8 if least else -0.3, most * 1.4 + 1)
    right.set_yticks([tick for tick in (0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 1023) if least <= tick <= max(most, 1)])
    right.get_yaxis().set_major_formatter(lambda value, _: f"{value:g}")
    right.minorticks_off()
    right.tick_params(colors=GREY, labelright=named)
    right.spines["right"].set_visible(True)
    right.grid(visible=False)
    axes.set_zorder(right.get_zorder() + 1)
    axes.patch.set_visible(False)
