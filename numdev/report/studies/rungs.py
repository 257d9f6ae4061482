"""The rungs of a study of training: how each run differs from its reference, in words, and its differences over the steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from numdev.report.claims.finding import NotMeasured, Undecidable
from numdev.report.reading.frames import WHOLE
from numdev.report.reading.scenarios import ENTRY_ROLE
from numdev.report.statistics.estimates import Interval, mean, ratio, slope, typical
from numdev.report.studies.groups import Group, group_of, name_of, text_of
from numdev.results.manifest import EntryRole

WASSERSTEIN, LARGEST, SIZE = "wasserstein", "max_difference", "relative_frobenius"
METRICS = {WASSERSTEIN: "Wasserstein distance", LARGEST: "max difference", SIZE: "relative Frobenius norm"}
"""The metrics of a difference of weights, as a reader knows them."""
ACTS = 10.0
"""A control acts where the Wasserstein distance of all weights grows by more than this factor in every replicate.

It is the sum of all differences over the number of weights. While the forward pass sees nothing of a moved weight, that weight
alone differs and the distance stays what it was; ten times as much cannot be its own rounding.
"""


@dataclass(frozen=True)
class Rung:
    """The runs of one point: every replicate of one difference from the reference.

    Attributes:
        name: in words, no two alike in a scenario.
        group: see `Group`.
        is_judged: whether claims speak of it, which a study may decline.
        rows: of all weights together.
        end: the last step of its scenario.
    """

    name: str
    group: Group
    is_judged: bool
    rows: pd.DataFrame
    end: int

    @property
    def is_exact(self) -> bool:
        """Whether every run was resumed from its checkpoint as it is."""
        return "variant.restart" in self.rows and bool((self.rows["variant.restart"] == "exact").all())

    def at(self, step: int, metric: str) -> pd.Series[float]:
        """A metric at one step by replicate, but for runs that stopped before it.

        Raises:
            Undecidable: if none got there, or one holds NaN or Inf.
        """
        here = self.rows[self.rows["step"] == step].set_index("seed")[metric].astype(float)
        if here.empty:
            raise Undecidable(f"{self.name}: no run reached step {step}")
        if not np.isfinite(here).all():
            raise Undecidable(f"{self.name}: {METRICS[metric]} is not finite at step {step}")
        return here

    def last(self, metric: str) -> pd.Series[float]:
        """At the last step; see `at`."""
        return self.at(self.end, metric)

    def stopped(self) -> int:
        """How many replicates ended before the last step."""
        return int((self.rows.groupby("seed")["step"].max() < self.end).sum())

    def exponent(self, metric: str) -> Interval:
        """The exponent of the step in a metric."""
        own = self.rows[self.rows["step"] > 0]
        return slope(own["step"], own[metric], own["seed"])

    def steps(self) -> list[int]:
        """Steps after the first at which the runs differ in every replicate."""
        found = self.rows[self.rows["step"] > 0].groupby("step", sort=True)[list(METRICS)].min().min(axis=1)
        return [int(str(step)) for step, least in found.items() if least > 0]

    def idle(self) -> int:
        """In how many replicates it does not act; see `ACTS`."""
        last, first = self.last(WASSERSTEIN), self.at(0, WASSERSTEIN)
        return int((last <= ACTS * first.reindex(last.index)).sum())

    def growth(self, metric: str) -> Interval:
        """The difference at the last step over that at the first after which runs differ."""
        steps = self.steps()
        return over(self.last(metric), self.at(steps[0], metric)) if steps else ratio([], [])

    def rates(self, metric: str = WASSERSTEIN) -> pd.Series[float]:
        """How much a metric grows per step, by replicate: the slope of a least-squares line through all steps."""
        own = {seed: run[["step", metric]].dropna() for seed, run in self.rows.groupby("seed")}
        return pd.Series({seed: float(np.polyfit(run["step"], run[metric], 1)[0]) for seed, run in own.items() if len(run) > 1})

    def curve(self, metric: str) -> pd.DataFrame:
        """Median, least and greatest of the replicates by step, where the median is positive."""
        found = self.rows[self.rows["step"] > 0].groupby("step", sort=True)[metric].agg(["median", "min", "max"])
        return found[found["median"] > 0]

    def end_of(self, metric: str) -> Interval:
        """The geometric mean of a metric over replicates at the last step."""
        return typical(self.last(metric).tolist())

    def rate(self, metric: str = WASSERSTEIN) -> Interval:
        """The mean of `rates`."""
        return mean(self.rates(metric).tolist())


def over(above: pd.Series[float], below: pd.Series[float]) -> Interval:
    """The ratio of two series, paired by replicate."""
    pairs = pd.DataFrame({"above": above, "below": below}).dropna()
    return ratio(pairs["above"], pairs["below"], pairs.index)


def over_each(above: Rung, below: list[Rung], metric: str) -> Interval:
    """The metric of a rung at the last step over those of some others, whose pairs of one replicate are averaged."""
    parts = [pd.DataFrame({"above": above.last(metric), "below": each.last(metric)}).dropna() for each in below]
    pairs = pd.concat(parts)
    return ratio(pairs["above"], pairs["below"], pairs.index)


def rungs(rows: pd.DataFrame) -> list[Rung]:
    """The rungs of one scenario in the order of `names_of`."""
    own = rows[rows["tensor"] == WHOLE] if len(rows) else rows
    end = int(own["step"].max()) if len(own) else 0
    found = []
    for key, (name, group) in names_of(own).items():
        runs = own[own["key"] == key]
        found.append(Rung(name, group, _is_judged(_first(runs)), runs, end))
    return found


def names_of(rows: pd.DataFrame) -> dict[str, tuple[str, Group]]:
    """Name and group of each point of one scenario by key, in the order of `Group`, those of a group in that of the study."""
    firsts = {str(key): _first(runs) for key, runs in rows.groupby("key", sort=False)}
    names = _distinct({key: name_of(first) for key, first in firsts.items()})
    groups = {key: group_of(first) for key, first in firsts.items()}
    order = list(Group)
    return {key: (names[key], groups[key]) for key in sorted(names, key=lambda key: order.index(groups[key]))}


def _first(rows: pd.DataFrame) -> dict[str, Any]:
    return {str(name): value for name, value in rows.iloc[0].items()}


def of_group(found: list[Rung], *groups: Group) -> list[Rung]:
    """The rungs of which claims speak in some groups.

    Raises:
        NotMeasured: if there are none.
    """
    own = [rung for rung in found if rung.group in groups and rung.is_judged]
    if not own:
        raise NotMeasured(f"no run was trained with {' or '.join(group.words for group in groups)}")
    return own


def _distinct(names: Mapping[str, str]) -> dict[str, str]:
    """Names by key; those that are alike are numbered in order."""
    counts, seen = Counter(names.values()), Counter[str]()
    found = {}
    for key, name in names.items():
        seen[name] += 1
        found[key] = f"{name} {seen[name]}" if counts[name] > 1 else name
    return found


def _is_judged(row: Mapping[str, Any]) -> bool:
    roles = [text_of(row, name) for name in row if name.startswith(ENTRY_ROLE)]
    return EntryRole.ASIDE.value not in roles
