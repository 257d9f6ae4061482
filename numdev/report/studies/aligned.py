"""Spikes of training losses, and the figures of attention around them, aligned at the step of the spike.

A figure around a spike is divided by its median over ordinary steps of the same run, those from 40 to 11 steps before.
Figures drift over training without any spike, so the same quotient is taken at the same steps of the other replicates of the
run that have no spike near, and their geometric mean divides it: what is left is the *lift*, 1 where a spike makes no
difference. Of signed figures the size enters. Replicates are seeds: runs of one seed start from the same weights and see the
same batches, whatever their attention.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from numdev.report.reading.scenarios import SCENARIO
from numdev.report.statistics.estimates import Floats, Interval, ratio
from numdev.report.statistics.excursions import Excursion, excursions

BEFORE, AFTER = 20, 5  # steps around a spike that are shown
FIGURES = {
    "largest_logit": "largest logit",
    "tie_rate": "share of tied rows",
    "deviation": "largest deviation of O",
    "relative_deviation": "relative deviation of O",
    "delta_bias": "bias of delta (size)",
    "dq_error": "relative error of dQ",
}
"""The figures of attention in a step, as a reader knows them."""
_FAR, _NEAR = 40, 11  # steps before a spike between which its run is ordinary


@dataclass(frozen=True)
class Watched:
    """One run, its loss and the sizes of its figures by step, from step 1."""

    scenario: str
    key: str
    seed: int
    loss: Floats
    figures: Mapping[str, Floats]
    spikes: tuple[Excursion, ...]

    def quotient(self, figure: str, place: int) -> Floats:
        """A figure at the steps around a place over its median at ordinary ones before; NaN where either is nothing."""
        values = self.figures[figure]
        usual = self.ordinary(figure, place)
        around = np.arange(place - BEFORE, place + AFTER + 1)
        inside = (around >= 0) & (around < len(values))
        found = np.full(len(around), np.nan)
        found[inside] = values[around[inside]]
        return np.where(found > 0, found, np.nan) / usual

    def ordinary(self, figure: str, place: int) -> float:
        """The median of a figure over ordinary steps before a place; NaN where it is 0 or there are none."""
        values = self.figures[figure][max(place - _FAR, 0) : max(place - _NEAR + 1, 0)]
        values = values[np.isfinite(values)]
        middle = float(np.median(values)) if len(values) else np.nan
        return middle if middle > 0 else np.nan

    def is_quiet(self, place: int) -> bool:
        """Whether no spike is near a place."""
        return all(spike.last < place - _FAR or spike.first > place + AFTER for spike in self.spikes) and len(self.loss) > place


def watched(rows: pd.DataFrame) -> list[Watched]:
    """The runs of rows of the table `watch`."""
    found = []
    for (scenario, key, seed), run in rows.groupby([SCENARIO, "key", "seed"], sort=False):
        own = run.sort_values("step")
        loss = own["loss"].to_numpy(dtype=float)
        figures = {name: np.abs(own[name].to_numpy(dtype=float)) for name in FIGURES}
        found.append(Watched(str(scenario), str(key), int(str(seed)), loss, figures, tuple(excursions(loss.tolist()))))
    return found


@dataclass(frozen=True)
class Spike:
    """A spike of a run, with the runs that it is compared with."""

    run: Watched
    place: int
    quiet: tuple[Watched, ...]

    def lift(self, figure: str) -> Floats:
        """The logarithm of the lift at each step from `BEFORE` before to `AFTER` after; NaN where it has none."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of steps at which no run has a value
            usual = np.nanmean(np.log([other.quotient(figure, self.place) for other in self.quiet]), axis=0)
        found: Floats = np.log(self.run.quotient(figure, self.place)) - usual
        return found


def spikes(runs: Sequence[Watched]) -> list[Spike]:
    """Every spike that has runs to be compared with: other replicates of the same point without a spike near."""
    return [spike for spike in _all_spikes(runs) if spike.quiet]


def _all_spikes(runs: Sequence[Watched]) -> Iterator[Spike]:
    for run in runs:
        others = [other for other in runs if (other.scenario, other.key) == (run.scenario, run.key) and other is not run]
        for each in run.spikes:
            yield Spike(run, each.first, tuple(other for other in others if other.is_quiet(each.first)))


def lifts(found: Sequence[Spike], figure: str) -> Floats:
    """Mean logarithms of the lift `[seeds, steps]`: spikes of one seed count once, by their mean."""
    by_seed: dict[Hashable, list[Floats]] = {}
    for spike in found:
        by_seed.setdefault(spike.run.seed, []).append(spike.lift(figure))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.array([np.nanmean(own, axis=0) for own in by_seed.values()]).reshape(-1, BEFORE + AFTER + 1)


def lift_at(found: Sequence[Spike], figure: str, offset: int) -> Interval:
    """The lift so many steps after a spike, negative for before it, with its interval over seeds."""
    logs = [spike.lift(figure)[BEFORE + offset] for spike in found]
    return ratio(np.exp(logs), np.ones(len(logs)), [spike.run.seed for spike in found])
