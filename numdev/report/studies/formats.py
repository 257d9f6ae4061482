"""Figures 3 and 4: deviation over number formats, as bars."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numdev.arithmetic.formats import Format
from numdev.report.claims.comparisons import AROUND, DEVIATION, over, over_baseline, per_replicate
from numdev.report.claims.finding import ABOVE, Evidence, Question, Undecidable, about, known_formats, left_out, select
from numdev.report.figures.grid import Panel, by_scenario, chosen, draw_grid, highest, replicates, whiskers
from numdev.report.figures.labels import WHITE, room_above
from numdev.report.figures.plot import PANELS, Plot
from numdev.report.figures.style import BLUE, GREY, SMALL, VERMILION, colour
from numdev.report.reading.primary import primary
from numdev.report.reading.scenarios import SCENARIO, formats
from numdev.report.statistics.estimates import Interval, significant, typical
from numdev.report.studies.attention import claim
from numdev.report.studies.beyond import draw_total
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.published import FIG4_RATIO, GOLDEN

_ROOM = 0.15  # share of the vertical axis above the bars: a line of words


def weigh_fig3(rows: pd.DataFrame) -> Evidence:
    """The difference falls from BF16 over FP16 and FP32 to FP64: at each step, paired by replicate."""
    names = known_formats(rows)
    found = [per_replicate(select(rows, format=name), DEVIATION) for name in names]
    steps = [over(above, below) for above, below in pairwise(found)]
    means = [typical(one["value"].tolist(), one["cluster"].tolist()) for one in found]
    told = ", ".join(f"{name} {m.text()}" for name, m in zip(names, means, strict=True))
    figure = f"{', '.join(significant(m.estimate) for m in means)} from {names[0]} to {names[-1]}"
    sentence = f"Max difference from the baseline: {told}.{left_out(*steps)}"
    return Evidence(figure, sentence, tuple(Question(step, ABOVE) for step in steps))


def weigh_fig4(rows: pd.DataFrame) -> Evidence:
    """At BF16 the variant's deviation from golden is 5 to 20 times the baseline's: a factor 2 around the paper's."""
    bf16 = rows[rows["format"] == "bf16"]
    total = over_baseline(bf16, DEVIATION)
    arithmetic = over_baseline(bf16, DEVIATION, "golden_same_inputs")
    sentence = (
        f"At bf16 the variant deviates {total.text()} times as much from golden as the baseline does, "
        f"{arithmetic.text()} times if golden sees the same rounded inputs.{left_out(total)}"
    )
    return Evidence(total.text(), sentence, (Question(total, about(FIG4_RATIO, AROUND)),))


def draw_fig3(rows: pd.DataFrame) -> Figure:
    """Max difference between tiled attention and the baseline at the same format, one bar per format."""
    found = chosen(rows)

    def draw(axes: Axes, panel: Panel) -> None:
        names = formats(panel.rows)
        for place, name in enumerate(names):
            interval = replicates(panel.rows[panel.rows["format"] == name], DEVIATION)
            _bar(axes, float(place), interval, colour(name), 0.65)
            if panel.large:
                _value(axes, float(place), interval)
            _unit_roundoff(axes, float(place), name, panel.large and place == 0)
        axes.set_xticks(range(len(names)), names)
        axes.tick_params(axis="x", length=0)

    return draw_grid(by_scenario(found), draw, _limits, axes_text=("number format F", "max |tiled − baseline|,\nabsolute"))


def draw_fig4(rows: pd.DataFrame) -> Figure:
    """Max difference of tiled attention and of the baseline from golden; the ratio at BF16 beside the paper's."""
    found = primary(rows)
    found = found[found["reference"] == "golden"]

    def draw(axes: Axes, panel: Panel) -> None:
        names = formats(panel.rows)
        for place, name in enumerate(names):
            here = panel.rows[panel.rows["format"] == name]
            for subject, shift, shade in (("variant", -0.2, BLUE), ("baseline", 0.2, VERMILION)):
                interval = replicates(here[here["subject"] == subject], DEVIATION)
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
    values = rows.loc[rows[DEVIATION] > 0, DEVIATION]
    if values.empty:
        return 1e-18, 1.0
    low = 10.0 ** (math.floor(math.log10(values.min())) - 1)
    panels = [own for _, own in rows.groupby(SCENARIO)]
    return low, room_above(low, max(_top(own, paper) for own in panels), _ROOM)


def _top(rows: pd.DataFrame, paper: float) -> float:
    """The upper end of what is drawn in one panel; the line of the paper is at `paper` times the baseline."""
    tops = [float(rows[DEVIATION].max())]
    for (name, subject), own in rows.groupby(["format", "subject"]):
        interval = replicates(own, DEVIATION)
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
        times = over_baseline(bf16, DEVIATION)
    except Undecidable:
        return
    baseline = replicates(bf16[bf16["subject"] == "baseline"], DEVIATION)
    if baseline is None or math.isnan(times.estimate):
        return
    mark = FIG4_RATIO * baseline.estimate
    axes.hlines(mark, place - 0.45, place + 0.45, color="black", linewidth=0.9, linestyle=(0, (3, 1)))
    text = times.text().replace(" ", "× ", 1) if large else f"{significant(times.estimate)}×"
    look: dict[str, Any] = {"textcoords": "offset points", "ha": "left", "va": "bottom", "fontsize": 7, "bbox": WHITE}
    ours = axes.annotate(text, (place - 0.45, _top(rows, FIG4_RATIO)), (0, 3), fontweight="bold", **look)
    axes.annotate("paper: 10× (dashed)", (1, 0), (5, 0), xycoords=ours, **look | {"fontsize": SMALL, "color": GREY})


CHAPTERS = (
    Chapter(
        place=10,
        study="fig3",
        title="Number formats against the baseline",
        question="How much does tiled attention differ from the baseline, and how does that depend on the number format? "
        "(Figure 3)",
        measured="Every step rounds to the format unless the scenario says otherwise.",
        paper="The deviation falls as the format changes from BF16 to FP64 (Golden et al. 2024, section IV.A).",
        claims=(
            claim(
                "fig3",
                "fig3",
                "The deviation between tiled attention and the baseline falls from BF16 over FP16 and FP32 to FP64",
                f"{GOLDEN}, section IV.A, Figure 3",
                weigh_fig3,
            ),
        ),
        figures={
            "fig3": Plot(
                draw_fig3,
                "Bars of the max difference between tiled attention and the baseline for each number format, on a log axis, "
                f"with the unit roundoff u of the format as a dashed line. {PANELS}",
            ),
        },
    ),
    Chapter(
        place=20,
        study="fig4",
        title="Against the golden value",
        question="Which of the two is further from exact attention, the tiled algorithm or the baseline? (Figure 4)",
        measured="The reference is FP64 attention on the unrounded inputs, so that both errors are total errors.",
        paper="At BF16 FlashAttention deviates roughly ten times as much from the golden value as baseline attention (section "
        "IV.A).",
        claims=(
            claim(
                "fig4",
                "fig4",
                "At BF16 tiled attention deviates about 10 times as much from golden as the baseline",
                f"{GOLDEN}, section IV.A, Figure 4",
                weigh_fig4,
            ),
        ),
        figures={
            "fig4": Plot(
                draw_fig4,
                "Pairs of bars for each number format, on a log axis: the max difference of tiled attention and of the "
                "baseline from golden. The ratio of the pair is written above BF16, and a dashed line stands at the paper's "
                f"ten times. {PANELS}",
            ),
            "total": Plot(
                draw_total,
                "One numbered point per scenario, with a list of their titles, of the narrowest format, on log axes of equal "
                "aspect: total error, from golden on the unrounded inputs, over arithmetic error, from golden on the same "
                "rounded inputs; tiled attention filled, its baselines open and with letters. On the diagonal the two are "
                "equal; above it, the rounding of the inputs has its share.",
                title="Total error against arithmetic error",
            ),
        },
    ),
)
