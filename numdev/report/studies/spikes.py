"""The paper's open question: do large logits, ties, or a deviation of attention precede loss spikes?

A loss is out of range if it lies more than `FACTOR` standard deviations above the median of the ordinary values before it. The
spike score of OLMo 2 (2025, arXiv 2501.00656) counts values of a loss that are at least seven standard deviations away from a
rolling average of the last 1,000. Runs here are shorter, so the window is, and with few values one spike would move mean and
standard deviation by itself: in their place stand the median, and 1.4826 times the median absolute deviation, which estimates the
standard deviation of a normal distribution (Rousseeuw & Croux 1993). The estimate from `W` values has a relative error of about
1.17 / sqrt(W), so that a value of white noise passes 7 estimated deviations more often than 7 true ones: for W = 40, fewer than 1
in 10^5 (tests/report/studies/test_spikes.py).

A figure around a spike is divided by its median over ordinary steps of the same run, those from 40 to 11 steps before. Figures
drift over training without any spike, so the same quotient is taken at the same steps of the other replicates of the run that
have no spike near, and their geometric mean divides it: what is left is the *lift*, 1 where a spike makes no difference. Of
signed figures the size enters. Replicates are seeds: runs of one seed start from the same weights and see the same batches,
whatever their attention.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from numdev.report.claims.evidence import left_out
from numdev.report.claims.verdicts import LARGER, Evidence, NotMeasured, Question, Region, Undecidable
from numdev.report.figures.marks import no_figure
from numdev.report.figures.plot import draw
from numdev.report.reading.frames import LABEL, SCENARIO
from numdev.report.statistics import Floats, Interval, mean, ratio, significant
from numdev.report.studies import TEXTS
from numdev.report.studies.training import in_scenarios, of_group
from numdev.results.record import WINDOW, spike_limit, student_quantile

BEFORE, AFTER = 20, 5  # steps around a spike that are shown
FIGURES: dict[str, str] = TEXTS["watched"]
"""The figures of attention in a step, as a reader knows them."""
_FAR, _NEAR = 40, 11  # steps before a spike between which its run is ordinary


def excursions(values: Sequence[float]) -> list[tuple[int, int]]:
    """The excursions of a series: places of each one's first value out of range, and of the last before one in range.

    The range is that of the last `WINDOW` values that were in range. After `WINDOW` values out of range it is made anew, of
    what follows: they are a level, not an excursion any more. The first `WINDOW` values have no range, and none of them is an
    excursion. NaN is out of range.
    """
    every, ordinary = list[tuple[int, int]](), list[float]()
    is_open = False
    for place, value in enumerate(values):
        before = ordinary[-WINDOW:]
        has_range, limit = len(before) == WINDOW, spike_limit(before)
        if value <= limit and (has_range or np.isfinite(value)):
            ordinary.append(value)
            is_open = False
        elif has_range:
            every = [*every[:-1], (every[-1][0], place)] if is_open else [*every, (place, place)]
            is_open = place - every[-1][0] + 1 < WINDOW
            if not is_open:
                ordinary = []
    return every


@dataclass(frozen=True)
class Watched:
    """One run, its loss and the sizes of its figures by step, from step 1."""

    scenario: str
    key: str
    seed: int
    loss: Floats
    figures: Mapping[str, Floats]
    spikes: tuple[tuple[int, int], ...]

    def quotient(self, figure: str, place: int) -> Floats:
        """A figure at the steps around a place over its median at ordinary ones before; NaN where either is nothing."""
        values, around = self.figures[figure], np.arange(place - BEFORE, place + AFTER + 1)
        inside = (around >= 0) & (around < len(values))
        sizes = np.full(len(around), np.nan)
        sizes[inside] = values[around[inside]]
        return np.where(sizes > 0, sizes, np.nan) / self.ordinary(figure, place)

    def ordinary(self, figure: str, place: int) -> float:
        """The median of a figure over ordinary steps before a place; NaN where it is 0 or there are none."""
        values = self.figures[figure][max(place - _FAR, 0) : max(place - _NEAR + 1, 0)]
        values = values[np.isfinite(values)]
        middle = float(np.median(values)) if len(values) else np.nan
        return middle if middle > 0 else np.nan

    def is_quiet(self, place: int) -> bool:
        """Whether no spike is near a place."""
        return all(last < place - _FAR or first > place + AFTER for first, last in self.spikes) and len(self.loss) > place


def watched(rows: pd.DataFrame) -> list[Watched]:
    """The runs of rows of the table `watch`."""
    runs = []
    for (scenario, key, seed), run in rows.groupby([SCENARIO, "key", "seed"], sort=False):
        own = run.sort_values("step")
        loss = own["loss"].to_numpy(dtype=float)
        figures = {name: np.abs(own[name].to_numpy(dtype=float)) for name in FIGURES}
        runs.append(Watched(str(scenario), str(key), int(str(seed)), loss, figures, tuple(excursions(loss.tolist()))))
    return runs


@dataclass(frozen=True)
class Spike:
    """A spike of a run, with the runs that it is compared with."""

    run: Watched
    place: int
    quiet: tuple[Watched, ...]

    def lift(self, figure: str) -> Floats:
        """The logarithm of the lift at each step from `BEFORE` before to `AFTER` after; NaN where it has none."""
        others = _nanmean(np.log([other.quotient(figure, self.place) for other in self.quiet]))
        lift: Floats = np.log(self.run.quotient(figure, self.place)) - others
        return lift


def _nanmean(values: Any) -> Floats:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of steps at which no run has a value
        means: Floats = np.nanmean(values, axis=0)
        return means


def spikes(runs: Sequence[Watched]) -> list[Spike]:
    """Every spike that has runs to be compared with: other replicates of the same point without a spike near."""
    every = []
    for run in runs:
        others = [other for other in runs if (other.scenario, other.key) == (run.scenario, run.key) and other is not run]
        for place, _ in run.spikes:
            every.append(Spike(run, place, tuple(other for other in others if other.is_quiet(place))))
    return [spike for spike in every if spike.quiet]


def lifts(every: Sequence[Spike], figure: str) -> Floats:
    """Mean logarithms of the lift `[seeds, steps]`: spikes of one seed count once, by their mean."""
    seeds = dict.fromkeys(spike.run.seed for spike in every)
    means = [_nanmean([spike.lift(figure) for spike in every if spike.run.seed == seed]) for seed in seeds]
    return np.array(means).reshape(-1, BEFORE + AFTER + 1)


def lift_at(every: Sequence[Spike], figure: str, offset: int) -> Interval:
    """The lift so many steps after a spike, negative for before it, with its interval over seeds."""
    logs = [spike.lift(figure)[BEFORE + offset] for spike in every]
    return ratio(np.exp(logs), np.ones(len(logs)), [spike.run.seed for spike in every])


def _compared(rows: pd.DataFrame) -> tuple[list[Watched], list[Spike]]:
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
    every = spikes(runs)
    if not every:
        raise Undecidable(f"{count} spikes, and no replicate without one near the same step to compare with; give more seeds")
    return runs, every


def weigh_before(rows: pd.DataFrame, figure: str) -> Evidence:
    """A figure is larger in the step before a spike than at ordinary steps."""
    runs, every = _compared(rows)
    before, at = (lift_at(every, figure, offset) for offset in (-1, 0))
    if not before.count:
        raise Undecidable(f"{FIGURES[figure]} is 0 or not known at every spike")
    seeds = len({spike.run.seed for spike in every})
    sentence = (
        f"One step before a spike over ordinary steps, {FIGURES[figure]}: {before.text()}; at the spike {at.text()}. "
        f"{len(every)} spikes of {seeds} seeds; {_spiked(runs)} runs spiked.{left_out(before)}"
    )
    return Evidence(before.text(), sentence, (Question(before, LARGER),))


def _spiked(runs: Sequence[Watched]) -> str:
    return f"{sum(bool(run.spikes) for run in runs)} of {len(runs)}"


def weigh_inside(rows: pd.DataFrame, more: str, than: str) -> Evidence:
    """The loss spikes more often with one entry of the axis `rung` than with another."""
    runs, _ = _compared(rows)
    axis = f"{LABEL}rung"
    names = {str(key): str(name) for key, name in rows.groupby("key")[axis].first().items()} if axis in rows else {}
    each = {(names.get(run.key, ""), run.scenario, run.seed): len(run.spikes) for run in runs}
    counts = pd.Series(each, dtype=float).unstack(0)
    for name in (more, than):
        if name not in counts:
            raise NotMeasured(f"no run was trained with {name}")
    excess = (counts[more] - counts[than]).dropna().groupby(level=1).sum()
    value = mean(excess.tolist())
    listed = ", ".join(f"{name} {int(own.sum())} in {int(own.count())} runs" for name, own in counts.items())
    sentence = f"Spikes: {listed}. More with {more} than with {than}, by seed: {value.text()}."
    return Evidence(f"{value.text()} more spikes", sentence, (Question(value, Region(low=0.0)),))


def weigh_rate(rows: pd.DataFrame, region: Region) -> Evidence:
    """The share of runs whose loss spikes with flash attention, less that of their references, lies in a region.

    Pairs of one seed are averaged. The least difference that could have been found is `(t_0.975 + t_0.8) s / sqrt(n)`, that whose
    interval excludes 0 with a probability of 80 %, with the spread s over n seeds.
    """
    pairs: list[tuple[str, int, bool, bool]] = []
    for rung in of_group(in_scenarios(rows), "flash"):
        for seed, run in rung.rows.groupby("seed"):
            own = run.sort_values("step")
            ours, theirs = (bool(excursions(own[column].tolist())) for column in ("loss", "baseline_loss"))
            pairs.append((rung.name, int(str(seed)), ours, theirs))
    table = pd.DataFrame(pairs, columns=["run", "seed", "flash", "baseline"])
    value = mean((table["flash"].astype(float) - table["baseline"]).tolist(), table["seed"].tolist())
    listed = ", ".join(
        f"{name} {own['flash'].sum()} and {own['baseline'].sum()} of {len(own)}" for name, own in table.groupby("run")
    )
    alone = int((table["flash"] != table["baseline"]).sum())
    sentence = f"Runs whose loss spikes with flash and with baseline attention: {listed}; {alone} pairs differ. "
    sentence += f"Difference of the shares: {value.text()}."
    if (share := value.shares[0]).freedom and share.error:
        least = share.error * sum(student_quantile(level, share.freedom) for level in (0.95, 0.6))
        sentence += f" One of {significant(least)} would have been found with a probability of 80 %."
    return Evidence(f"{value.text()} more of the runs", sentence, (Question(value, region),))


def draw_aligned(rows: pd.DataFrame) -> Figure:
    """The lift of every figure around spikes, with a band of its 95 % intervals by Student's t over seeds."""
    try:
        runs, every = _compared(rows)
    except Undecidable as reason:
        return no_figure(str(reason))
    steps = range(-BEFORE, AFTER + 1)
    tables = [
        pd.DataFrame(np.exp(lifts(every, name)), columns=steps).rename_axis("seed").reset_index().melt("seed", var_name="step")
        for name in FIGURES
    ]
    table = pd.concat([one.assign(figure=words) for one, words in zip(tables, FIGURES.values(), strict=True)]).dropna()
    text = f"steps after a spike; {len(every)} spikes in {_spiked(runs)} runs", "over ordinary steps"
    return draw(table.astype({"step": float}), x="step", y={"lift": "value"}, facet=["figure"], text=text, at={1: ""})
