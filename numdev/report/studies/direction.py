"""The direction of the gradients' errors: how much of an error lies along one vector, and whether that vector stays.

A gradient is added to weights step after step. Errors of random directions cancel, one that keeps its direction does not.
"""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.report.claims.comparisons import per_replicate
from numdev.report.claims.finding import LARGER, Evidence, Question, Undecidable, by_format, left_out, select
from numdev.report.figures.grid import Panel, by_scenario, draw_grid, whiskers
from numdev.report.figures.style import GREY
from numdev.report.statistics.estimates import Interval, mean, ratio
from numdev.report.studies.backward import GRADIENTS, SAME_INPUTS, SHADES, SYMBOLS, chosen, measured, narrowest, of_output

SHARE, STAYS = "top_share", "step_alignment"


def weigh_gradients_direction(rows: pd.DataFrame) -> Evidence:
    """The top singular vector of every gradient's error stays from one draw of the inputs to the next, more than by chance."""

    def judge(own: pd.DataFrame) -> Evidence:
        found = {name: alignment(of_output(own, name)) for name in GRADIENTS}
        shares = {name: _share(of_output(own, name)) for name in GRADIENTS}
        figure = ", ".join(f"{SYMBOLS[name]} {interval.text()}" for name, interval in found.items())
        told = ", ".join(f"{SYMBOLS[name]} {interval.text()}" for name, interval in shares.items())
        sentence = f"the |cosine| of the top singular vector with that of the seed before, over that of chance, is {figure}; "
        sentence += f"the share of the error's energy in that vector is {told}.{left_out(*found.values())}"
        return Evidence(f"{figure} times chance", sentence, tuple(Question(one, LARGER) for one in found.values()))

    return by_format(rows, judge)


def alignment(rows: pd.DataFrame) -> Interval:
    """The alignment of the error's top singular vector with that of the seed before, over what it is by chance."""
    found = select(rows, reference=SAME_INPUTS).dropna(subset=STAYS)
    if found.empty:
        raise Undecidable("the direction of an error is compared between seeds, and there is one")
    found = found.assign(times=found[STAYS] / found["problem.shape.head_dim"].map(by_chance))
    own = per_replicate(found, "times")
    return ratio(own["value"], [1.0] * len(own), own.index, own["cluster"])


def by_chance(dim: int) -> float:
    """The mean |cosine| of a random unit vector of so many numbers with any other: `Gamma(d/2) / (sqrt(pi) Gamma((d+1)/2))`."""
    return math.exp(math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2)) / math.sqrt(math.pi)


def _share(rows: pd.DataFrame) -> Interval:
    return _mean(select(rows, reference=SAME_INPUTS), SHARE)


def _mean(rows: pd.DataFrame, metric: str) -> Interval:
    """The mean over replicates; NOTHING without any."""
    own = per_replicate(rows.dropna(subset=metric), metric)
    return mean(own["value"].tolist(), own.index.tolist(), own["cluster"].tolist())


def draw_gradients_direction(rows: pd.DataFrame) -> Figure:
    """How well the top singular vector of each gradient's error keeps its direction, and how much of the error lies in it."""
    own = narrowest(chosen(rows))
    chance = by_chance(int(own["problem.shape.head_dim"].iloc[0]))

    def draw(axes: Axes, panel: Panel) -> None:
        axes.set_yscale("linear")
        axes.set_ylim(0, 1.05)
        axes.axhline(chance, color=GREY, linewidth=0.8, linestyle=(0, (3, 2)), zorder=0)
        names = measured(panel.rows)
        for place, output in enumerate(names):
            here, shade = of_output(panel.rows, output), SHADES[output]
            for metric, shift, face in ((STAYS, -0.12, shade), (SHARE, 0.12, "white")):
                interval = _mean(here, metric)
                if interval.count:
                    bars = whiskers([interval])
                    axes.errorbar(place + shift, interval.estimate, bars, color=shade, marker="o", markerfacecolor=face)
        axes.set_xticks(range(len(names)), [SYMBOLS[name] for name in names])
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.tick_params(axis="x", length=0)

    text = f"gradient (F = {own['format'].iloc[0].upper()})", "top singular vector of the error"
    figure = draw_grid(by_scenario(own), draw, lambda _: (0.1, 1.0), axes_text=text, heights=(2.0, 1.7))
    keys = [
        Line2D([], [], color=GREY, marker="o", linestyle=""),
        Line2D([], [], color=GREY, linestyle=(0, (3, 2)), linewidth=0.8),
    ]
    keys.append(Line2D([], [], color=GREY, marker="o", linestyle="", markerfacecolor="white"))
    words = ["|cosine| with that of the seed before", "the same by chance", "its share of the error's energy"]
    figure.legend(keys, words, loc="outside upper right", ncols=3, frameon=False)
    return figure
