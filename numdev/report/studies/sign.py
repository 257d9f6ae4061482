"""Whether tiled attention is better or worse than the baseline, by precision policy."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numdev.report.claims.claim import OURS
from numdev.report.claims.comparisons import DEVIATION, EVERY, over_baseline
from numdev.report.claims.finding import LARGER, SMALLER, Evidence, Question, Undecidable, by_format, left_out
from numdev.report.figures.grid import highest, name_steps, whiskers
from numdev.report.figures.labels import WHITE
from numdev.report.figures.plot import Plot
from numdev.report.figures.style import BLACK, FP32_INSIDE, GREY, PAGE, SMALL, TILED
from numdev.report.reading.scenarios import formats, of, ordered
from numdev.report.statistics.estimates import Interval, significant
from numdev.report.studies.attention import claim
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.published import FA3, FA3_RATIO, FIG4_RATIO, GOLDEN

_POLICIES = {"uniform": ("every step in F", TILED), "kernel": ("FP32 inside", FP32_INSIDE)}


def weigh_sign(rows: pd.DataFrame) -> Evidence:
    """Worse than the baseline with every step in the format, better with FP32 inside."""

    def judge(rows: pd.DataFrame) -> Evidence:
        own, every = _of_both(rows, DEVIATION), _of_both(rows, EVERY)
        sentence = (
            f"deviation from golden over the baseline's is {own[0].text()} with every step in the format and "
            f"{own[1].text()} with FP32 inside.{left_out(*own)}"
        )
        return Evidence(_figure(own), sentence, _worse_and_better(own), Evidence(_figure(every), "", _worse_and_better(every)))

    return by_format(rows, judge)


def _of_both(rows: pd.DataFrame, metric: str) -> tuple[Interval, Interval]:
    return of_policy(rows, "uniform", metric), of_policy(rows, "kernel", metric)


def _figure(both: tuple[Interval, Interval]) -> str:
    return f"every step {both[0].text()}, FP32 inside {both[1].text()}"


def _worse_and_better(both: tuple[Interval, Interval]) -> tuple[Question, ...]:
    return Question(both[0], LARGER), Question(both[1], SMALLER)


def of_policy(rows: pd.DataFrame, policy: str, metric: str) -> Interval:
    """The variant's deviation over the baseline's under one precision policy."""
    found = rows[rows["policy"] == policy]
    if found.empty:
        raise Undecidable(f"nothing was measured under the policy {policy}")
    return over_baseline(found, metric)


def draw_sign(rows: pd.DataFrame) -> Figure:
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
    """Draws the axes, the line of no difference, the ratios of the papers, and which side is better."""
    values = [value for _, _, *pair in lines for i in pair for value in _ends(i)] + [FIG4_RATIO, FA3_RATIO]
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 1.3, max(values) * 1.8)
    name_steps(axes.xaxis)
    axes.set_yticks(range(len(lines)), [text for text, *_ in lines])
    axes.set_ylim(len(lines) + 0.2, -0.6)
    axes.grid(visible=False)
    axes.set_xlabel("deviation of tiled attention from golden / that of the baseline\n(filled: max difference, open: RMSE)")
    axes.axvline(1, color=BLACK, linewidth=0.8)
    for value, text in ((FIG4_RATIO, "Golden et al.: 10"), (FA3_RATIO, "FlashAttention-3: 1/1.7")):
        axes.axvline(value, color=GREY, linewidth=0.8, linestyle=(0, (3, 2)), zorder=0)
        axes.annotate(text, (value, 1), (0, 3), xycoords=axes.get_xaxis_transform(), ha="center", **_above(GREY))
    for text, side, shift in (("← better than the baseline", "right", -6), ("worse than the baseline →", "left", 6)):
        axes.annotate(text, (1, 0), (shift, 3), xycoords=axes.get_xaxis_transform(), ha=side, bbox=WHITE, **_above(BLACK))


def _ends(interval: Interval) -> tuple[float, float]:
    """The drawn ends of an interval: at most a factor 5 to each side, so that a wide one does not dwarf the others."""
    low, high = (value if math.isfinite(value) else interval.estimate for value in (interval.low, interval.high))
    return max(low, interval.estimate / 5), min(high, interval.estimate * 5)


def _above(shade: str) -> dict[str, Any]:
    return {"textcoords": "offset points", "va": "bottom", "fontsize": SMALL, "color": shade}


def _beside(shade: str) -> dict[str, Any]:
    return {"textcoords": "offset points", "va": "center", "fontsize": SMALL, "color": shade}


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


CHAPTERS = (
    Chapter(
        place=90,
        study="sign",
        title="Better or worse than the baseline",
        question="Golden et al. find tiled attention worse than the baseline, Shah et al. find it better. Which is it?",
        measured="The same inputs under both precision policies.",
        paper="Ten times worse at BF16 (Golden et al. 2024, Figure 4); 1.7 times better at FP16 (Shah et al. 2024, section 4.3).",
        claims=(
            claim(
                "sign",
                "sign",
                "Tiled attention is worse than the baseline with every step in the format, and better with FP32 inside",
                f"{OURS}: {GOLDEN}, Figure 4, against {FA3}, section 4.3",
                weigh_sign,
                is_ours=True,
            ),
        ),
        figures={
            "sign": Plot(
                draw_sign,
                "One line per scenario, number format and precision policy, on a log axis: the deviation of tiled attention "
                "from golden divided by the baseline's, by max difference (filled) and by RMSE (open). Right of 1 tiled "
                "attention is worse, left of it better; dashed lines stand at the 10 of Golden et al. and the 1/1.7 of "
                "FlashAttention-3.",
            ),
        },
    ),
)
