"""Ratios, trends and orders from replicates: estimates, confidence intervals of Student's t, and tests.

A replicate is a seed, or a head of captured tensors. Everything that is compared was measured on the same inputs, so comparisons
are paired by replicate; several measurements of one replicate are not independent and count once, by their mean.

Replicates of one *cluster*, such as the heads of a layer, are alike. If all heads of a model counted as independent, what is
common to a layer would count once for every head. So each cluster has an interval of its own, over its replicates, and the
interval of the whole is the smallest that contains them all. A decision by it is a decision in every cluster, and says nothing
about other clusters: "over the heads of these 2 layers". An interval with layers as replicates would speak about the whole
model, but two layers leave one degree of freedom, and the 95 % interval then extends 12.7 standard errors to each side.

Nothing here knows a study or a claim.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import SupportsFloat

import numpy as np
from numpy.typing import NDArray

from numdev.results.record import student_quantile, summary

Floats = NDArray[np.float64]

STEP = math.log(2)
"""How far beyond a bound a replicate is taken to lie that differs from equal ones, in logarithms: see `Share.p`."""
_NOISE = 1e-12  # logarithms below 1e3 in FP64, and their mean, are off by less: equal values have slope 0, not 1e-16


@dataclass(frozen=True)
class Share:
    """The replicates of one cluster: their mean, its standard error, and the degrees of freedom of that.

    One replicate alone has an infinite error. Replicates that are all equal have none, and bound a share in place of a mean.
    """

    mean: float
    error: float
    freedom: int

    @staticmethod
    def of(values: list[float]) -> Share:
        array = np.array(values)
        if len(values) == 1:
            return Share(values[0], math.inf, 0)
        spread = 0.0 if float(np.ptp(array)) <= _NOISE * float(np.abs(array).max()) else float(array.std(ddof=1))
        return Share(summary(values).mean, spread / math.sqrt(len(values)), len(values) - 1)

    @property
    def half(self) -> float:
        """Half the width of the two-sided 95 % interval."""
        return student_quantile(0.95, self.freedom) * self.error if 0 < self.error < math.inf else self.error

    def p(self, distance: float) -> float:
        """The two-sided p-value of the hypothesis that the mean of all replicates lies `distance` away from this mean.

        It is the least 1 - confidence whose interval excludes that. Equal replicates have no standard error: what they bound is
        the share s of replicates that differ from them, which is below `largest_share(count)` (Clopper & Pearson 1934). One that
        differs is taken to lie at most a factor of two, `STEP`, beyond the bound that is `distance` away: a maximum of one ulp
        becomes two, and if half of the values over R in log x double, their exponent changes by at most `1.5 log 2 / R`, which
        is below `STEP` where x spans a factor of 4.5 or more. Then the mean lies at the bound only if
        `s >= distance / (distance + STEP)`, and `count` replicates show none that differs with probability `(1 - s)^count`, which
        is never 0.
        """
        if math.isinf(distance) or math.isinf(self.error):
            return 0.0 if math.isinf(distance) else 1.0
        if self.error == 0:
            return (STEP / (max(0.0, distance) + STEP)) ** (self.freedom + 1)
        from scipy.special import stdtr  # late: points of one replicate, which have no interval, are shown without scipy

        return min(1.0, 2 * float(stdtr(self.freedom, -distance / self.error)))


def largest_share(count: int) -> float:
    """The share of replicates that can differ where `count` of them are equal, with 95 % confidence: `1 - 0.05^(1/count)`."""
    return 1 - (1 - 0.95) ** (1 / count)


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % confidence interval: NaN from nothing, and infinitely wide from one replicate alone."""

    estimate: float
    low: float
    high: float
    count: int  # replicates that entered
    excluded: int = 0  # values or pairs left out, because they are zero or not finite and so have no logarithm
    shares: tuple[Share, ...] = field(default=(), compare=False, repr=False)  # what it was made from, one for each cluster
    logarithmic: bool = field(default=False, compare=False, repr=False)  # whether `shares` are logarithms, as of a ratio

    def outside(self, low: float, high: float) -> bool:
        """Whether no value of the interval lies between two bounds."""
        return self.high < low or self.low > high

    def scaled(self, bound: float) -> float:
        """A bound on the scale of `shares`."""
        return (math.log(bound) if bound > 0 else -math.inf) if self.logarithmic else bound

    def text(self) -> str:
        """Text such as `9.1 [8.7, 9.5]`, with as many decimals as the width of the interval justifies."""
        if math.isnan(self.estimate):
            return "unknown"
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            alone = "one replicate" if self.count == 1 else "a cluster of one replicate"
            return f"{significant(self.estimate)} ({alone})"
        if math.isclose(self.low, self.high, rel_tol=1e-9):
            return f"{significant(self.estimate, 3)} in every replicate"
        numbers = (self.estimate, self.low, self.high)
        if all(number == 0 or 1e-3 <= abs(number) < 1e4 for number in numbers):
            places = self._decimals()
            estimate, low, high = (f"{number:.{places}f}" for number in numbers)
        else:
            estimate, low, high = (significant(number) for number in numbers)
        return f"{estimate} [{low}, {high}]"

    def _decimals(self) -> int:
        """Down to the first digit of half the width, or to the second if the first is 1; the estimate has 2 to 4 digits."""
        first = math.floor(math.log10(abs(self.estimate))) if self.estimate else 0
        half = (self.high - self.low) / 2
        digits = -math.floor(math.log10(half / 2))
        return max(0, 1 - first, min(digits, 3 - first))


def significant(value: float, digits: int = 2) -> str:
    """A number with `digits` significant digits: 9.1, 0.053, 120, 3.2e-5."""
    if not math.isfinite(value):
        return "unknown" if math.isnan(value) else f"{value:g}"
    if value != 0 and not 1e-3 <= abs(value) < 1e4:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    text = f"{value:#.{digits}g}"
    return f"{float(text):.0f}" if "e" in text else text.removesuffix(".")


def mean(
    values: Iterable[float],
    replicates: Sequence[Hashable] | None = None,
    clusters: Sequence[Hashable] | None = None,
    excluded: int = 0,
    *,
    logarithmic: bool = False,
) -> Interval:
    """The mean over all clusters with equal weight; each end of its interval is that of the cluster that reaches farthest.

    Each value is a replicate of its own, and all are of one cluster, unless stated. Clusters of one replicate each are no
    clusters: then the replicates are independent. `excluded` were left out; of `logarithmic` values it is the geometric mean.
    """
    of_replicate: dict[Hashable, list[float]] = {}
    cluster_of: dict[Hashable, Hashable] = {}
    for place, value in enumerate(values):
        name = place if replicates is None else replicates[place]
        of_replicate.setdefault(name, []).append(float(value))
        cluster_of[name] = None if clusters is None else clusters[place]
    if len(set(cluster_of.values())) == len(cluster_of):
        cluster_of = dict.fromkeys(cluster_of)
    of_cluster: dict[Hashable, list[float]] = {}
    for name, own in of_replicate.items():
        of_cluster.setdefault(cluster_of[name], []).append(math.fsum(own) / len(own))
    if not of_cluster:
        return Interval(math.nan, math.nan, math.nan, 0, excluded)
    shares = tuple(map(Share.of, of_cluster.values()))
    estimate = math.fsum(share.mean for share in shares) / len(shares)
    ends = estimate, min(share.mean - share.half for share in shares), max(share.mean + share.half for share in shares)
    if logarithmic:
        ends = _exp(ends[0]), _exp(ends[1]), _exp(ends[2])
    return Interval(*ends, len(of_replicate), excluded, shares, logarithmic)


def typical(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Interval:
    """The geometric mean of replicates, its interval by Student's t on the logarithms: what stands on a log axis.

    Where the values of two things are paired, the ratio of their geometric means is `ratio`. With a zero among them, which
    has no logarithm, or NaN, it is the arithmetic mean.
    """
    if not all(value > 0 and math.isfinite(value) for value in values):
        return mean(values, None, clusters)
    return mean(np.log(_floats(values)), None, clusters, logarithmic=True)


def ratio(
    a: Iterable[SupportsFloat],
    b: Iterable[SupportsFloat],
    replicates: Iterable[Hashable] | None = None,
    clusters: Iterable[Hashable] | None = None,
) -> Interval:
    """The geometric mean of `a / b` over pairs, its interval by Student's t on the logarithms.

    Args:
        a: values, at least 0.
        b: what each of them is paired with.
        replicates: the replicate of each pair; each pair is one of its own unless given. Pairs of one replicate are
            averaged first.
        clusters: the cluster of each pair; all are of one unless given.

    A pair of zeros is a ratio of 1: neither deviates. A pair with one zero has no finite log-ratio, nor has one that
    is not finite; these are left out and counted in `excluded`.
    """
    top, bottom = _floats(a), _floats(b)
    positive = np.isfinite(top) & np.isfinite(bottom) & (top > 0) & (bottom > 0)
    usable = positive | ((top == 0) & (bottom == 0))
    logs = np.zeros(top.shape)
    logs[positive] = np.log(top[positive]) - np.log(bottom[positive])
    logs[np.abs(logs) < _NOISE] = 0.0
    names, groups = (None if each is None else list(compress(each, usable)) for each in (replicates, clusters))
    return mean(logs[usable], names, groups, int((~usable).sum()), logarithmic=True)


def _floats(values: Iterable[SupportsFloat]) -> Floats:
    return np.array([float(value) for value in values])


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)


def slope(
    x: Iterable[SupportsFloat],
    y: Iterable[SupportsFloat],
    replicates: Iterable[Hashable],
    clusters: Iterable[Hashable] | None = None,
) -> Interval:
    """The exponent `b` of `y ~ x^b`: one line through (log x, log y) per replicate, and an interval over their slopes.

    Values of y that are zero or not finite are left out and counted; so are replicates left with fewer than two different x.
    """
    from scipy.stats import linregress  # late: it takes longer to import than numdev, and most figures need no line

    across, up = _floats(x), _floats(y)
    usable = np.isfinite(up) & (up > 0) & (across > 0)
    lines: dict[Hashable, list[int]] = {}
    for place, name in enumerate(replicates):
        if usable[place]:
            lines.setdefault(name, []).append(place)
    kept = [line for line in lines.values() if len(np.unique(across[line])) > 1]
    logs = [(np.log(across[line]), np.log(up[line])) for line in kept]
    slopes = [0.0 if float(abs(y - y.mean()).max()) < _NOISE else float(linregress(x, y).slope) for x, y in logs]
    groups = None if clusters is None else list(clusters)
    return mean(slopes, None, groups and [groups[line[0]] for line in kept], len(up) - sum(map(len, kept)))


def sign_test(larger: int, smaller: int) -> float:
    """The two-sided p-value of the hypothesis that one of a pair is as often the larger as the smaller; equal pairs are none."""
    from scipy.stats import binomtest  # late: it takes longer to import than numdev, and few tables count signs

    return float(binomtest(larger, larger + smaller).pvalue) if larger + smaller else 1.0


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (Holm 1979): of m, the i-th least becomes max over j <= i of (m - j + 1) p_(j), at most 1.

    To reject where the adjusted value is below 0.05 rejects any true hypothesis at all with probability below 0.05,
    whatever the dependence between tests.
    """
    values = np.array(p, dtype=float)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)))
    return [float(value) for value in adjusted]
