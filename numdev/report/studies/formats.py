"""Figures 3 and 4: deviation over number formats, and the ratio of tiled attention to the baseline."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from numdev.arithmetic.formats import Format
from numdev.report.claims.comparisons import AROUND, DEVIATION, over, over_baseline, per_replicate
from numdev.report.claims.finding import ABOVE, Evidence, Question, Undecidable, about, known_formats, left_out, select
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
from numdev.report.figures.labels import WHITE
from numdev.report.figures.plot import BELOW, Plot
from numdev.report.figures.style import BASELINE, BLACK, FP32_INSIDE, GREY, SMALL, TILED, colour
from numdev.report.reading.scenarios import ROLES, SCENARIO, formats, of, ordered, primary
from numdev.report.statistics.estimates import Interval, significant, typical
from numdev.report.studies.attention import claim
from numdev.report.studies.beyond import draw_total
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.published import FIG4_RATIO, GOLDEN


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
        f"At bf16 the ratio of the max deviations from golden, tiled / baseline, is {total.text()}, and {arithmetic.text()} if "
        f"golden sees the same rounded inputs.{left_out(total)}"
    )
    return Evidence(total.text(), sentence, (Question(total, about(FIG4_RATIO, AROUND)),))


def draw_fig3(rows: pd.DataFrame) -> Figure:
    """Max difference between tiled attention and the baseline at the same format; beside it in units of the format's u."""
    found = chosen(rows)

    def top(large: Axes, narrow: Axes, panel: Panel) -> None:
        log_y(large, *_limits(panel.rows))
        _over_formats(large, panel.rows, named=True)
        large.set_xlabel("number format F")
        large.set_ylabel("max |tiled − baseline|,\nabsolute")
        scaled = in_u(panel.rows, (DEVIATION,))
        log_y(narrow, *at_least_a_decade(*limits(scaled, (DEVIATION,))))
        for place, name in enumerate(formats(scaled)):
            _dot(narrow, float(place), replicates(scaled[scaled["format"] == name], DEVIATION), colour(name))
        _name(narrow, formats(scaled))
        narrow.set_title("The same in u of F", loc="left")
        narrow.set_xlabel("number format F")

    def small(axes: Axes, panel: Panel) -> None:
        _over_formats(axes, panel.rows)

    lower = multiples(
        found, small, _limits, ("number format F (dashed: its unit roundoff u)", "max |tiled − baseline|,\nabsolute")
    )
    return draw_reproduced(found, top, lower)


def draw_fig4(rows: pd.DataFrame) -> Figure:
    """Max difference of tiled attention and of the baseline from golden; their ratio at every format and in every scenario."""
    found = primary(rows)
    found = found[found["reference"] == "golden"]

    def top(large: Axes, narrow: Axes, panel: Panel) -> None:
        names = formats(panel.rows)
        log_y(large, *_limits(panel.rows))
        for subject, shift, shade in (("variant", -0.12, TILED), ("baseline", 0.12, BASELINE)):
            own = panel.rows[panel.rows["subject"] == subject]
            for place, name in enumerate(names):
                _dot(large, place + shift, replicates(own[own["format"] == name], DEVIATION), shade)
        keys = [Line2D([], [], color=shade, marker="o", linestyle="") for shade in (TILED, BASELINE)]
        large.legend(keys, ["tiled attention", "baseline"], loc="upper right", frameon=False)
        _name(large, names)
        large.set_xlabel("number format F")
        large.set_ylabel("max |result − golden|,\nabsolute")
        _ratios_by_format(narrow, panel.rows, names)

    scenarios = ordered(found)
    lower = Lower(lambda part: _ratios_by_scenario(part, found), 0.75 + 0.165 * len(scenarios))
    return draw_reproduced(found, top, lower)


def _ratios_by_format(axes: Axes, rows: pd.DataFrame, names: list[str]) -> None:
    """The ratio at every format of the source's scenario."""
    ratios = [_over(rows[rows["format"] == name]) for name in names]
    log_y(axes, *_around([interval for interval in ratios if interval]))
    for place, (name, interval) in enumerate(zip(names, ratios, strict=True)):
        if interval is not None:
            axes.errorbar(place, interval.estimate, whiskers([interval]), color=colour(name), marker="o")
    for value, look in _LINES:
        axes.axhline(value, zorder=0, **look)
    _name(axes, names)
    axes.set_title("Tiled / baseline", loc="left")
    axes.set_xlabel("number format F")


def _ratios_by_scenario(part: SubFigure, rows: pd.DataFrame) -> None:
    """A dot with its interval for every scenario at BF16, or at the narrowest format; lines at 1 and at the paper's ratio."""
    names = formats(rows)
    fmt = "bf16" if "bf16" in names else names[0]
    axes = part.subplots(1, 1)
    scenarios = ordered(rows)
    found = [_over(rows[(rows[SCENARIO] == scenario.name) & (rows["format"] == fmt)]) for scenario in scenarios]
    low, high = _around([interval for interval in found if interval])
    axes.set_xscale("log")
    axes.set_xlim(low, high * (high / low) ** 0.32)
    name_steps(axes.xaxis)
    for place, (scenario, interval) in enumerate(zip(scenarios, found, strict=True)):
        look: dict[str, Any] = {"va": "center", "fontsize": SMALL, "textcoords": "offset points", "bbox": WHITE}
        if interval is None or not interval.estimate > 0:
            axes.annotate("unknown", (0, place), (4, 0), xycoords=("axes fraction", "data"), **look)
            continue
        shade = policy_colour(of(rows, scenario))
        axes.errorbar(interval.estimate, place, xerr=whiskers([interval]), color=shade, marker="o", markersize=4.5)
        axes.annotate(_told(interval), (highest(interval), place), (6, 0), **look)
    for value, look in _LINES:
        axes.axvline(value, zorder=0, **look)
        words = "as the baseline" if value == 1 else f"paper: {value:g}"
        place_of: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        axes.annotate(words, (value, 1), (0, 2), ha="center", va="bottom", fontsize=SMALL, color=GREY, **place_of)
    roles = [f" ({ROLES[scenario.role]})" if ROLES[scenario.role] else "" for scenario in scenarios]
    axes.set_yticks(range(len(scenarios)), [f"{one.title}{role}" for one, role in zip(scenarios, roles, strict=True)])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(scenarios) - 0.4, -0.6)
    axes.grid(axis="x")
    axes.set_xlabel(f"max |result − golden| at {fmt.upper()}, tiled / baseline")


def _told(interval: Interval) -> str:
    """With its interval, if that is finite."""
    return interval.text() if math.isfinite(interval.high) else significant(interval.estimate)


_LINES: tuple[tuple[float, dict[str, Any]], ...] = (
    (1.0, {"color": BLACK, "linewidth": 0.8}),
    (FIG4_RATIO, {"color": GREY, "linewidth": 0.8, "linestyle": (0, (3, 2))}),
)


def _over(rows: pd.DataFrame) -> Interval | None:
    """Tiled over baseline; None where there is nothing to divide."""
    try:
        interval = over_baseline(rows, DEVIATION)
    except Undecidable:
        return None
    return None if math.isnan(interval.estimate) else interval


def _around(found: list[Interval]) -> tuple[float, float]:
    """A log axis around all intervals, 1 and the paper's ratio."""
    ends = [1.0, FIG4_RATIO, *(lowest(one) for one in found), *(highest(one) for one in found)]
    return min(ends) / 1.6, max(ends) * 1.6


def policy_colour(rows: pd.DataFrame) -> str:
    """Of tiled attention: with FP32 inside, or with every step in the format."""
    own = rows[rows["subject"] == "variant"]
    return FP32_INSIDE if len(own) and str(own["policy"].iloc[0]) == "kernel" else TILED


def _limits(rows: pd.DataFrame) -> tuple[float, float]:
    """From a decade below the least mean or unit roundoff to a decade above all intervals."""
    values = rows.loc[rows[DEVIATION] > 0, DEVIATION]
    if values.empty:
        return 1e-18, 1.0
    units = [Format.parse(name).u for name in formats(rows)]
    keys = ["subject", SCENARIO, "format"]
    tops = [highest(one) for _, own in rows.groupby(keys) if (one := replicates(own, DEVIATION)) is not None]
    top = max([float(values.max()), *tops, *units])
    return 10.0 ** math.floor(math.log10(min(values.min(), *units)) - 0.5), 10.0 ** math.ceil(math.log10(top) + 0.5)


def _over_formats(axes: Axes, rows: pd.DataFrame, *, named: bool = False) -> None:
    """A dot for every format, and its unit roundoff; with `named`, their values too."""
    names = formats(rows)
    for place, name in enumerate(names):
        interval = replicates(rows[rows["format"] == name], DEVIATION)
        _dot(axes, float(place), interval, colour(name))
        u = Format.parse(name).u
        axes.hlines(u, place - 0.3, place + 0.3, color=BLACK, linewidth=0.8, linestyle=(0, (2, 1)))
        if named:
            axes.annotate("u", (place - 0.3, u), (-2, 0), textcoords="offset points", ha="right", va="center", fontsize=SMALL)
            if interval is not None and interval.estimate > 0:
                look: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": SMALL}
                axes.annotate(scientific(interval.estimate), (place, interval.estimate), (7, 0), **look)
    _name(axes, names)


def _dot(axes: Axes, place: float, interval: Interval | None, shade: str) -> None:
    """A dot with its interval; a word where there is nothing to draw."""
    if interval is None or not interval.estimate > 0:
        words = "NaN" if interval is None else "0"
        axes.annotate(words, (place, 0.02), xycoords=axes.get_xaxis_transform(), ha="center", fontsize=SMALL)
        return
    axes.errorbar(place, interval.estimate, whiskers([interval]), color=shade, marker="o", markersize=4.5)


def _name(axes: Axes, names: list[str]) -> None:
    axes.set_xticks(range(len(names)), [name.upper() for name in names])
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.tick_params(axis="x", length=0)


CHAPTERS = (
    Chapter(
        place=10,
        study="fig3",
        title="Number formats against the baseline",
        question="By how much does tiled attention differ from the baseline, and how does that depend on the number format? "
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
                "The largest difference between tiled attention and the baseline at the same number format F, on a log axis; a "
                f"dashed line marks the unit roundoff u of F. On the right, the same difference in units of u. {BELOW}",
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
                "Above, the largest deviation of tiled attention and of the baseline from golden at each number format, on a log "
                "axis, and the ratio of the two. Below, that ratio at BF16 in every scenario: dark blue with every step in the "
                "format, light blue with FP32 inside. A solid line marks 1, a dashed line the paper's 10. Dots are geometric "
                "means over seeds or captured heads, bars their 95 % confidence intervals.",
            ),
            "total": Plot(
                draw_total,
                "RMSE from golden at the narrowest format: total error (golden on the unrounded inputs) over arithmetic error "
                "(golden on the same rounded inputs), one numbered point for each scenario. Tiled attention is filled, its "
                "baselines are open and lettered. On the diagonal the two errors are equal; above it, the rounding of the inputs "
                "contributes.",
                title="Total error against arithmetic error",
            ),
        },
    ),
)
