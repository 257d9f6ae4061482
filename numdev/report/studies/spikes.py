"""The paper's open question: do large logits, ties, or a deviation of attention precede loss spikes?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from numdev.report.claims.claim import OURS
from numdev.report.claims.finding import LARGER, Evidence, NotMeasured, Question, Region, Undecidable
from numdev.report.figures.grid import log_y
from numdev.report.figures.plot import Plot
from numdev.report.figures.style import GREY, PAGE, TILED
from numdev.report.reading.frames import WATCH, Results
from numdev.report.reading.scenarios import LABEL
from numdev.report.statistics.estimates import mean, significant, typical
from numdev.report.statistics.excursions import FACTOR, WINDOW
from numdev.report.studies.aligned import AFTER, BEFORE, FIGURES, Spike, Watched, lift_at, lifts, spikes, watched
from numdev.report.studies.published import GOLDEN
from numdev.report.studies.training import chapter, claim

_RUNG = f"{LABEL}rung"
_INSIDE, _OUTSIDE = "BF16 inside", "FP32 inside"  # the entries of the study's axis that the last claim compares
_LEAST = 3  # seeds with a known value for a band: the interval of two is 12.7 standard errors to each side
_MORE = Region(low=0.0)


def _found(rows: pd.DataFrame) -> tuple[list[Watched], list[Spike]]:
    """The runs of some rows and their spikes.

    Raises:
        NotMeasured: where no run was watched, or no loss spiked.
        Undecidable: where no spike has a run to be compared with.
    """
    if rows.empty:
        raise NotMeasured("no run was watched; give rung.watch=true")
    runs = watched(rows)
    count = sum(len(run.spikes) for run in runs)
    if not count:
        raise NotMeasured(f"the loss of none of {len(runs)} runs spiked")
    found = spikes(runs)
    if not found:
        raise Undecidable(f"{count} spikes, and no replicate without one near the same step to compare with; give more seeds")
    return runs, found


def _lifted(figure: str) -> Callable[[pd.DataFrame], Evidence]:
    """Weighs whether a figure is larger in the step before a spike than at ordinary steps."""

    def weigh(rows: pd.DataFrame) -> Evidence:
        runs, found = _found(rows)
        before, at = (lift_at(found, figure, offset) for offset in (-1, 0))
        if not before.count:
            raise Undecidable(f"{FIGURES[figure]} is 0 or not known at every spike")
        seeds = len({spike.run.seed for spike in found})
        spiked = sum(bool(run.spikes) for run in runs)
        out = f" Left out, because it is 0 or not known: {before.excluded}." if before.excluded else ""
        sentence = (
            f"{_upper(FIGURES[figure])} one step before a spike over ordinary steps: {before.text()}; at the spike "
            f"{at.text()}. {len(found)} spikes of {seeds} seeds; {spiked} of {len(runs)} runs spiked.{out}"
        )
        return Evidence(before.text(), sentence, (Question(before, LARGER),))

    return weigh


def _upper(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}"


def weigh_inside(rows: pd.DataFrame) -> Evidence:
    """The loss spikes more often with BF16 inside attention than with FP32 inside."""
    runs, _ = _found(rows)
    names = {str(key): str(name) for key, name in rows.groupby("key")[_RUNG].first().items()} if _RUNG in rows else {}
    counts = pd.Series({(names.get(run.key, ""), run.scenario, run.seed): len(run.spikes) for run in runs}, dtype=float).unstack(
        0
    )
    for name in (_INSIDE, _OUTSIDE):
        if name not in counts:
            raise NotMeasured(f"no run was trained with {name}")
    more = (counts[_INSIDE] - counts[_OUTSIDE]).dropna().groupby(level=1).sum()
    value = mean(more.tolist())
    told = ", ".join(f"{name} {int(own.sum())} in {int(own.count())} runs" for name, own in counts.items())
    sentence = f"Spikes: {told}. More with {_INSIDE} than with {_OUTSIDE}, by seed: {value.text()}."
    return Evidence(f"{value.text()} more spikes", sentence, (Question(value, _MORE),))


def draw_aligned(rows: pd.DataFrame) -> Figure:
    """The lift of every figure around spikes, with a band of its 95 % intervals by Student's t over seeds."""
    try:
        runs, found = _found(rows)
    except Undecidable as reason:
        figure = Figure(figsize=(PAGE, 0.5), layout="constrained")
        figure.text(0.5, 0.5, str(reason), ha="center", va="center", color=GREY, fontsize=8)
        return figure
    figure = Figure(figsize=(PAGE, 4.2), layout="constrained")
    panels: Any = figure.subplots(2, 3, sharex=True).flat
    steps = np.arange(-BEFORE, AFTER + 1)
    for axes, (name, words) in zip(panels, FIGURES.items(), strict=True):
        _panel(axes, steps, lifts(found, name))
        axes.set_title(_upper(words), loc="left", fontweight="bold", fontsize=8)
    figure.supxlabel(
        f"steps after a spike; {len(found)} spikes in {sum(bool(run.spikes) for run in runs)} of {len(runs)} runs", fontsize=8
    )
    figure.supylabel("over ordinary steps", fontsize=8)
    return figure


def _panel(axes: Any, steps: Any, logs: Any) -> None:
    axes.axhline(1.0, color=GREY, linewidth=0.6)
    axes.axvline(0, color=GREY, linewidth=0.6, linestyle=":")
    known = np.isfinite(logs).any(axis=0)
    if not known.any():
        axes.annotate("0 or not known", (0.5, 0.6), xycoords="axes fraction", ha="center", color=GREY, fontsize=7)
        return
    for own in logs:
        axes.plot(steps, np.exp(own), color=GREY, linewidth=0.4)
    axes.plot(steps[known], np.exp(np.nanmean(logs[:, known], axis=0)), color=TILED)
    bands = [mean(own[np.isfinite(own)].tolist()) for own in logs.T]  # of logarithms
    ends = np.array([(one.low, one.high) if one.count >= _LEAST else (np.nan, np.nan) for one in bands])
    axes.fill_between(steps, *np.exp(ends).T, color=TILED, alpha=0.2, linewidth=0)
    ends = np.exp(logs[np.isfinite(logs)])
    log_y(axes, min(float(ends.min()), 0.5) / 1.1, max(float(ends.max()), 2.0) * 1.1)


def spike_table(results: Results, study: str) -> pd.DataFrame:
    """A row per figure: typical size at ordinary steps, before and at a spike, and the ratios with their intervals, as text."""
    try:
        _, found = _found(results.study(study, WATCH))
    except Undecidable as reason:
        return pd.DataFrame([{"figure": str(reason)}])
    return pd.DataFrame([{"figure": words} | _cells(found, name) for name, words in FIGURES.items()])


def _cells(found: Sequence[Spike], name: str) -> dict[str, str]:
    usual = [spike.run.ordinary(name, spike.place) for spike in found]
    cells = {"ordinary": _size(usual)}
    for offset, words in ((-5, "5 before"), (-1, "1 before"), (0, "at the spike")):
        sizes = [float(spike.run.figures[name][spike.place + offset]) for spike in found]
        cells |= {words: _size(sizes), f"{words}, ratio": lift_at(found, name, offset).text()}
    return cells


def _size(values: Sequence[float]) -> str:
    known = [value for value in values if np.isfinite(value)]
    return significant(typical(known).estimate) if known else "unknown"


_MEASURED = (
    f"A loss spikes at a step where it lies more than {FACTOR:g} standard deviations above the median of the {WINDOW} "
    "ordinary losses before it (by the median absolute deviation); of such steps in a row the first counts. In each step, "
    "attention is compared with exact attention in FP64 on the same inputs. A ratio is that of a figure to its median from "
    "40 to 11 steps before the spike, over the same of the replicates that do not spike near that step, so that what grows "
    "in all of them is no ratio above 1. Replicates are seeds. A ratio above 1 before a spike is a sign of it, and need not "
    "be its cause."
)


def _claim(name: str, text: str, weigh: Callable[[pd.DataFrame], Evidence]) -> Any:
    source = f"{OURS}: {GOLDEN}, section VI, asks whether numeric deviation and loss spikes are connected"
    return replace(claim(name, "spikes_aligned", text, source, weigh, across=True, is_ours=True), table=WATCH)


CHAPTERS = (
    chapter(
        place=350,
        study="spikes",
        title="Loss spikes, and what attention does at and before them",
        question="Do large logits, ties of the largest scores, or a deviation of attention precede or accompany loss spikes?",
        measured=_MEASURED,
        paper="Numeric deviation might add up to loss spikes (section I). The exact step of a spike should be related to the "
        "deviation at that step, which is left to future work (section VI).",
        claims=(
            _claim(
                "spikes_logit", "The largest logit is larger before a loss spike than at ordinary steps", _lifted("largest_logit")
            ),
            _claim(
                "spikes_deviation",
                "Attention deviates farther from exact attention before a loss spike than at ordinary steps",
                _lifted("relative_deviation"),
            ),
            _claim("spikes_ties", "More rows are tied before a loss spike than at ordinary steps", _lifted("tie_rate")),
            _claim("spikes_delta", "Delta is biased more before a loss spike than at ordinary steps", _lifted("delta_bias")),
            _claim("spikes_inside", "The loss spikes more often with BF16 inside attention than with FP32 inside", weigh_inside),
        ),
        figures={
            "spikes_aligned": Plot(
                draw_aligned,
                "Six panels, one for each figure of attention, from 20 steps before a loss spike to 5 after it: its ratio to "
                "ordinary steps, on a log axis. Thin grey lines are seeds, the blue line is their geometric mean, its band the "
                "95 % interval by Student's t where three seeds or more have a value; grey marks 1, dots the spike.",
                table=WATCH,
            ),
        },
        table=spike_table,
    ),
)
