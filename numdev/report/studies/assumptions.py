"""How the ratio of Figure 4 depends on what the paper leaves open: N and the inputs."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numdev.report.claims.claim import OURS
from numdev.report.claims.comparisons import AROUND, DEVIATION, beside_baseline, over_baseline
from numdev.report.claims.finding import FLAT, Evidence, Question, Undecidable, about, left_out
from numdev.report.figures.grid import highest, log_y, lowest, plain_ticks, whiskers
from numdev.report.figures.labels import WHITE, Name, spread
from numdev.report.figures.plot import Plot
from numdev.report.figures.style import GREY, PAGE, PALE, SERIES, SMALL, TILED
from numdev.report.reading.scenarios import ROLES, of, ordered
from numdev.report.statistics.estimates import Interval, significant, slope
from numdev.report.studies.attention import LENGTH, claim
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.published import FIG4_RATIO, GOLDEN
from numdev.results.manifest import Role

_MARKERS = "os^Dv<>P"


def weigh_fig4_assumptions(rows: pd.DataFrame) -> Evidence:
    """The ratio of Figure 4 is about ten at every N, and has no trend in N."""
    bf16 = rows[rows["format"] == "bf16"]
    lengths = sorted(bf16[LENGTH].unique())
    if len(lengths) < 2:
        raise Undecidable("only one N was measured")
    each = {n: over_baseline(bf16[bf16[LENGTH] == n], DEVIATION) for n in lengths}
    pairs = beside_baseline(bf16, DEVIATION, "golden", LENGTH)
    times = (pairs[DEVIATION] / pairs[f"{DEVIATION}_baseline"]).where(pairs[f"{DEVIATION}_baseline"] > 0)
    exponent = slope(pairs[LENGTH].astype(float), times, pairs["seed"], pairs["cluster"])
    told = ", ".join(f"{one.text()} at {n}" for n, one in each.items())
    figure = (
        f"{' to '.join(significant(each[n].estimate) for n in (lengths[0], lengths[-1]))} at N = {lengths[0]} to {lengths[-1]}"
    )
    sentence = f"The ratio of the max deviations from golden, tiled / baseline, by N: {told}; it scales as N^{exponent.text()}."
    questions = [Question(exponent, FLAT), *(Question(one, about(FIG4_RATIO, AROUND)) for one in each.values())]
    return Evidence(figure, sentence + left_out(exponent), tuple(questions))


def draw_fig4_assumptions(rows: pd.DataFrame) -> Figure:
    """The ratio at BF16 over N, a line for each scenario, beside the paper's ten times."""
    bf16 = rows[rows["format"] == "bf16"]
    lines = [(scenario, _ratios(of(bf16, scenario))) for scenario in ordered(bf16)]
    drawn = [(scenario, points) for scenario, points in lines if points]
    figure = Figure(figsize=(PAGE, 2.9), layout="constrained")
    axes = figure.add_subplot()
    values = [i for _, points in drawn for _, i in points]
    ends = [*map(lowest, values), *map(highest, values), FIG4_RATIO / AROUND, FIG4_RATIO * AROUND]
    log_y(axes, min(ends) / 1.2, max(ends) * 1.4)
    names: list[Name] = []
    for place, (scenario, points) in enumerate(drawn):
        marker = _MARKERS[place % len(_MARKERS)]
        shade = TILED if scenario.role is Role.ASSUMED else SERIES[place % len(SERIES)]
        across, intervals = [n for n, _ in points], [interval for _, interval in points]
        heights = [interval.estimate for interval in intervals]
        axes.errorbar(across, heights, whiskers(intervals), color=shade, marker=marker, elinewidth=0.7)
        role = f" ({ROLES[scenario.role]})" if ROLES[scenario.role] else ""
        names.append((across[-1], heights[-1], f"{scenario.title}{role}", shade))
        if scenario.role is Role.ASSUMED:
            _say(axes, across, heights)
    places = sorted({n for _, points in drawn for n, _ in points})
    plain_ticks(axes, places)
    _paper(axes)
    if names:
        axes.set_xlim(places[0] / 1.12, places[-1] * (places[-1] / places[0]) ** 0.8)
        _label(axes, names)
    axes.set_xlabel("sequence length N, tokens")
    axes.set_ylabel("max |O − golden|, tiled / baseline,\nat BF16")
    return figure


def _ratios(rows: pd.DataFrame) -> list[tuple[float, Interval]]:
    """The ratio at each N that has one."""
    found = []
    for n, here in rows.groupby(LENGTH, sort=True):
        try:
            interval = over_baseline(here, DEVIATION)
        except Undecidable:
            continue
        if interval.estimate > 0:
            found.append((float(str(n)), interval))
    return found


def _say(axes: Axes, across: list[float], heights: list[float]) -> None:
    """Writes each ratio above its marker."""
    for x, y in zip(across, heights, strict=True):
        axes.annotate(significant(y), (x, y), (0, 5), textcoords="offset points", ha="center", fontsize=SMALL, bbox=WHITE)


def _paper(axes: Axes) -> None:
    axes.axhspan(FIG4_RATIO / AROUND, FIG4_RATIO * AROUND, color=PALE, zorder=0)
    axes.axhline(FIG4_RATIO, color=GREY, linewidth=0.8, linestyle=(0, (3, 2)), zorder=0)
    words: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
    place: dict[str, Any] = {"xytext": (-3, 3), "ha": "right", "va": "bottom"}
    axes.annotate("paper: 10 times, N and inputs not given", (1, FIG4_RATIO), **place, color=GREY, fontsize=SMALL, **words)


def _label(axes: Axes, names: list[Name]) -> None:
    """Every line's name on the right of it, moved apart from the others."""
    low, high = axes.get_ylim()
    decades = math.log(high / low)
    heights = spread([math.log(y / low) / decades for _, y, _, _ in names], 0.07)
    for (x, _, text, shade), height in zip(names, heights, strict=True):
        level = low * math.exp(height * decades)
        axes.annotate(text, (x, level), (8, 0), textcoords="offset points", va="center", color=shade, fontsize=SMALL)


CHAPTERS = (
    Chapter(
        place=22,
        study="fig4_assumptions",
        title="How Figure 4 depends on our assumptions",
        question="The paper gives neither $N$ nor the inputs of Figure 4. How much does its ratio depend on them?",
        measured="The ratio of Figure 4 at BF16, over $N$ and over distributions of the inputs, every step in BF16, "
        "FlashAttention-1.",
        paper="Roughly ten times, for _randomly initialized_ query, key and value vectors (section IV).",
        claims=(
            claim(
                "fig4_assumptions",
                "fig4_assumptions",
                "The ratio of Figure 4 is about 10 whatever N is",
                f"{OURS}; {GOLDEN} give neither N nor the inputs of Figure 4",
                weigh_fig4_assumptions,
                is_ours=True,
            ),
        ),
        figures={
            "fig4_assumptions": Plot(
                draw_fig4_assumptions,
                "The ratio of Figure 4 (largest deviation from golden, tiled / baseline, at BF16) over the sequence length N, "
                "one line for each distribution of the inputs, with 95 % confidence intervals. The dashed line marks the paper's "
                "10, the band half to twice that.",
            ),
        },
    ),
)
