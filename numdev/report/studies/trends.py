"""Figures 5 and 6c: how the difference goes with the sequence length and with the block area.

A factor of two would not be seen on an axis over the sixteen decades from BF16 to FP64. So the large panel and the small ones
show BF16 alone, and the narrow one every format in units of its own u, where the slopes can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.report.claims.comparisons import DEVIATION, EVERY, resolution
from numdev.report.claims.finding import GROWS, SHRINKS, Evidence, Question, Region, Undecidable, by_format, left_out
from numdev.report.figures.grid import (
    Panel,
    chosen,
    draw_reproduced,
    in_u,
    limits,
    log_y,
    means,
    multiples,
    plain_ticks,
    whiskers,
)
from numdev.report.figures.labels import corner, paper_goes, spread
from numdev.report.figures.plot import BELOW, Plot
from numdev.report.figures.style import SMALL, colour
from numdev.report.reading.scenarios import formats
from numdev.report.statistics.estimates import Interval, significant
from numdev.report.studies.attention import claim, over_area, over_length
from numdev.report.studies.beyond import draw_rescales
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.published import GOLDEN

_ROOM = 0.2  # share of the vertical axis above the data: a line of words


def weigh_fig5a(rows: pd.DataFrame) -> Evidence:
    """The max difference grows with N."""
    return _weighed(rows, over_length, "N", GROWS)


def weigh_fig5b(rows: pd.DataFrame) -> Evidence:
    """Mean and standard deviation of the difference grow with N. Both see every element."""

    def judge(rows: pd.DataFrame) -> Evidence:
        centre, spread = over_length(rows, "mean_absolute"), over_length(rows, "std")
        sentence = f"the mean of |D| scales as N^{centre.text()}, the standard deviation of D as N^{spread.text()}."
        figure = f"mean N^{centre.text()}, std N^{spread.text()}"
        return Evidence(figure, sentence + left_out(centre, spread), (Question(centre, GROWS), Question(spread, GROWS)))

    return by_format(rows, judge)


def weigh_fig6c(rows: pd.DataFrame) -> Evidence:
    """Larger tiles make the difference smaller."""
    return _weighed(rows, over_area, "area", SHRINKS)


def _weighed(rows: pd.DataFrame, over: Callable[[pd.DataFrame, str], Interval], base: str, way: Region) -> Evidence:
    """Judges, in each format, with which power of `base` the max difference goes."""

    def judge(rows: pd.DataFrame) -> Evidence:
        exponent, every = over(rows, DEVIATION), over(rows, EVERY)
        sentence = f"the max difference scales as {base}^{exponent.text()}.{left_out(exponent)}{resolution(rows)}"
        beside = Evidence(f"{base}^{every.text()}", "", (Question(every, way),))
        return Evidence(f"{base}^{exponent.text()}", sentence, (Question(exponent, way),), beside)

    return by_format(rows, judge)


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


def draw_fig5a(rows: pd.DataFrame) -> Figure:
    """Max difference from the baseline over N."""
    return _trend(rows, _LENGTH, ("max_difference",), "max |tiled − baseline|")


def draw_fig5b(rows: pd.DataFrame) -> Figure:
    """Mean of |D| and standard deviation of D over N."""
    return _trend(rows, _LENGTH, ("mean_absolute", "std"), "mean |D| and std of D")


def draw_fig6c(rows: pd.DataFrame) -> Figure:
    """Max difference from the baseline over the block area."""
    return _trend(rows, _AREA, ("max_difference",), "max |tiled − baseline|")


def _trend(rows: pd.DataFrame, across: _Across, metrics: tuple[str, ...], text: str) -> Figure:
    """At BF16, absolute, in the source's scenario; every format in u beside it; the other scenarios below."""
    found = chosen(rows)
    main = "bf16" if "bf16" in formats(found) else formats(found)[0]

    def top(large: Axes, narrow: Axes, panel: Panel) -> None:
        own = panel.rows[panel.rows["format"] == main]
        for metric in metrics:
            _line(large, means(own, across.column, metric), main, metric == metrics[0])
        _places(large, own, across)
        large.set_ylim(0, large.get_ylim()[1] * 1.3)
        corner(large, _power(own, across, metrics[0]), down=16, color=colour(main), fontsize=8)
        paper_goes(large, across.paper, up=across.rises)
        large.set_xlabel(across.text)
        large.set_ylabel(f"{text}\nat {main.upper()}, absolute")
        if len(metrics) > 1:
            keys = [Line2D([], [], color=colour(main), linestyle="-", marker="o")]
            keys += [Line2D([], [], color=colour(main), linestyle="--", marker="o", markerfacecolor="white")]
            large.legend(keys, ["mean of |D|", "standard deviation of D"], loc="upper left", frameon=False)
        _every_format(narrow, panel.rows, across, metrics[0])

    def small(axes: Axes, panel: Panel) -> None:
        own = panel.rows[panel.rows["format"] == main]
        for metric in metrics:
            _line(axes, means(own, across.column, metric), main, metric == metrics[0])
        _places(axes, own, across)
        corner(axes, _power(own, across, metrics[0]))

    def ends(own: pd.DataFrame) -> tuple[float, float]:
        return limits(own[own["format"] == main], metrics, across.column, room=_ROOM)

    return draw_reproduced(found, top, multiples(found, small, ends, (across.text, f"{text}\nat {main.upper()}, absolute")))


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
    ends = []
    for name in formats(scaled):
        own = scaled[scaled["format"] == name]
        end = _line(axes, means(own, across.column, metric), name, first=True)
        if end is not None:
            ends.append((end, f"{name.upper()} {_power(own, across, metric)}", colour(name)))
    _places(axes, scaled, across)
    left, right = axes.get_xlim()
    axes.set_xlim(left, right * (right / left) ** 0.75)
    _label(axes, ends)
    axes.set_title("Every format, in u of F", loc="left")
    axes.set_xlabel(across.text.partition(",")[0])


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


def _label(axes: Axes, ends: list[tuple[tuple[float, float], str, str]]) -> None:
    """Labels at the ends of lines, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    decades = math.log(high / low)
    heights = spread([math.log(y / low) / decades for (_, y), _, _ in ends], 0.09)
    for ((x, _), text, shade), height in zip(ends, heights, strict=True):
        place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        axes.annotate(text, (x, height), (6, 0), va="center", color=shade, fontsize=SMALL, **place)


CHAPTERS = (
    Chapter(
        place=30,
        study="fig5a",
        title="The largest difference over the sequence length",
        question="Does the difference grow with the sequence length at a fixed tile? (Figure 5a)",
        measured="The tile stays the same while $N$ grows; captured tensors, which are short, have a smaller tile.",
        paper="The max difference grows with the sequence length, since more tiles mean more rescales (section IV.A).",
        claims=(
            claim(
                "fig5a",
                "fig5a",
                "The max difference grows with the sequence length N at a fixed tile",
                f"{GOLDEN}, section IV.A, Figure 5a",
                weigh_fig5a,
            ),
        ),
        figures={
            "fig5a": Plot(
                draw_fig5a,
                "The largest difference between tiled attention and the baseline at BF16 over the sequence length N, with its "
                "exponent of N; an arrow shows the paper's trend. On the right, every number format in units of its unit "
                f"roundoff u. {BELOW}",
            ),
        },
    ),
    Chapter(
        place=40,
        study="fig5b",
        title="Mean and spread over the sequence length",
        question="Do the mean and the standard deviation of the difference follow the same trend? (Figure 5b)",
        measured="The tile stays the same while $N$ grows; captured tensors, which are short, have a smaller tile.",
        paper="The mean and the standard deviation of the difference show the same trend as its maximum (section IV.A).",
        claims=(
            claim(
                "fig5b",
                "fig5b",
                "Mean and standard deviation of the difference grow with N at a fixed tile",
                f"{GOLDEN}, section IV.A, Figure 5b",
                weigh_fig5b,
            ),
        ),
        figures={
            "fig5b": Plot(
                draw_fig5b,
                "The mean absolute difference between tiled attention and the baseline (solid) and the standard deviation of the "
                "difference (dashed) at BF16 over the sequence length N, with the exponent of the mean; an arrow shows the "
                f"paper's trend. On the right, the mean for every number format in units of its unit roundoff u. {BELOW}",
            ),
        },
    ),
    Chapter(
        place=70,
        study="fig6c",
        title="Larger tiles",
        question="Do larger tiles make the difference smaller? (Figure 6c)",
        measured="Tiles from an SRAM size $M$ with $B_c = ceil(M \\/ 4 d)$ and $B_r = min(B_c, d)$, over $M$.",
        paper="Larger tiles lead to a smaller deviation, because fewer rescales are needed to cover the $N times N$ matrix "
        "(section IV.B).",
        claims=(
            claim(
                "fig6c",
                "fig6c",
                "Larger tiles make the difference smaller",
                f"{GOLDEN}, section IV.B, Figure 6c",
                weigh_fig6c,
            ),
        ),
        figures={
            "fig6c": Plot(
                draw_fig6c,
                "The largest difference between tiled attention and the baseline at BF16 over the block area A = Br Bc, with its "
                "exponent; an arrow shows the paper's trend. On the right, every number format in units of its unit roundoff u. "
                f"{BELOW}",
            ),
            "rescales": Plot(
                draw_rescales,
                "The largest difference between tiled attention and the baseline at the narrowest format over the block area "
                "(filled), and the number of rescales R (open, right axis), one panel for each scenario, all with the same "
                "axes.",
                title="The deviation and the number of rescales over the block area",
            ),
        },
    ),
)
