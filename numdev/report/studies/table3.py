"""FlashAttention-3's Table 3 beside what the emulation gives."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from numdev.report.claims.comparisons import EVERY, over, per_replicate
from numdev.report.claims.finding import ABOVE, Evidence, Question, Undecidable, Verdict, about, select
from numdev.report.figures.grid import highest, whiskers
from numdev.report.figures.plot import Plot
from numdev.report.figures.style import GREY, PAGE, PALE, SMALL, TILED
from numdev.report.reading.scenarios import STANDS_FOR
from numdev.report.statistics.estimates import Interval, ratio, significant, typical
from numdev.report.studies.attention import claim
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.published import FA3, FA3_RMSE

FACTOR = 1.5  # between a measured RMSE and the published one, whose N and d are not given
_PUBLISHED: dict[str, Any] = {
    "marker": "D",
    "markerfacecolor": "white",
    "color": GREY,
    "linestyle": "",
    "markersize": 5,
}


def weigh_fa3_table3(rows: pd.DataFrame) -> Evidence:
    """Every RMSE within a factor 1.5 of the published one, and every two rows in the published order, by their intervals.

    The published values have no intervals, and two of them are 2 % apart: an order that the replicates cannot tell is undecided.
    """
    found = {name: rmse(rows, name) for name in FA3_RMSE}
    ratios = {name: _over_published(found[name], FA3_RMSE[name]) for name in FA3_RMSE}
    pairs = [
        over(found[first], found[second])
        for first, second in combinations(sorted(FA3_RMSE, key=lambda name: -FA3_RMSE[name]), 2)
        if FA3_RMSE[first] > FA3_RMSE[second]
    ]
    region = about(1.0, FACTOR)
    close = sum(region.verdict(times) is Verdict.HOLDS for times in ratios.values())
    ways = [ABOVE.verdict(pair) for pair in pairs]
    counts = [ways.count(way) for way in (Verdict.HOLDS, Verdict.FAILS, Verdict.UNDECIDED)]
    told = ", ".join(f"{name} {ratios[name].text()}" for name in FA3_RMSE)
    ordered = f"Of {len(pairs)} pairs the interval of {counts[0]} is in the published order, of {counts[1]} in the other, "
    ordered += f"and of {counts[2]} in neither."
    figure = f"{close} of {len(ratios)} within {FACTOR:g}, {counts[0]} of {len(pairs)} pairs in order"
    questions = [*(Question(times, region) for times in ratios.values()), *(Question(pair, ABOVE) for pair in pairs)]
    return Evidence(figure, f"Measured over published: {told}. {ordered}", tuple(questions))


def _over_published(found: pd.DataFrame, published: float) -> Interval:
    return ratio(found["value"], [published] * len(found), found.index, found["cluster"])


def rmse(rows: pd.DataFrame, method: str) -> pd.DataFrame:
    """The RMSE from golden of each replicate of the scenario that stands for one row of the published table."""
    return per_replicate(select(rows, reference="golden", **{STANDS_FOR: method}), EVERY)


def draw_fa3_table3(rows: pd.DataFrame) -> Figure:
    """RMSE against FP64 of each method with its 95 % interval, the published figure, and a factor 1.5 around that."""
    figure = Figure(figsize=(PAGE * 0.75, 2.6), layout="constrained")
    axes = figure.add_subplot()
    names = list(FA3_RMSE)
    for place, name in enumerate(names):
        published = FA3_RMSE[name]
        axes.barh(place, published * FACTOR - published / FACTOR, 0.6, left=published / FACTOR, color=PALE, zorder=0)
        axes.plot(published, place, **_PUBLISHED)
        _measured(axes, rows, name, place)
    keys = [Line2D([], [], color=TILED, marker="o"), Line2D([], [], **_PUBLISHED), Patch(color=PALE)]
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
    axes.errorbar(interval.estimate, place, xerr=[low, high], color=TILED, marker="o", markersize=4.5)
    right = max(highest(interval), FA3_RMSE[name] * FACTOR)
    axes.annotate(significant(interval.estimate), (right, place), (6, 0), **_beside(TILED))


CHAPTERS = (
    Chapter(
        place=80,
        study="fa3_table3",
        title="FlashAttention-3's Table 3",
        question="Does the emulation reproduce the errors that another paper published for FP16 and FP8 attention?",
        measured="Inputs with outliers; the scenario names the method. The publication states neither $N$ nor $d$.",
        paper="RMSE against FP64 of FP16 and FP8 attention, with and without block quantisation and incoherent processing "
        "(Shah et al. 2024, Table 3).",
        claims=(
            claim(
                "fa3_table3",
                "fa3_table3",
                "RMSE of FlashAttention-2 and -3 and of their baselines, in size and order",
                f"{FA3}, Table 3",
                weigh_fa3_table3,
                across=True,
            ),
        ),
        figures={
            "fa3_table3": Plot(
                draw_fa3_table3,
                "One line per method of FlashAttention-3's Table 3, on a log axis: the measured RMSE with its 95 % confidence "
                "interval, the published one as a diamond, and a band from 2/3 to 3/2 of the published one.",
            ),
        },
    ),
)
