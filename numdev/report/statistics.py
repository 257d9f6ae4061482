"""What replicates say about a ratio, a trend or an order: estimates with 95 % confidence intervals of Student's t.

Replicates are seeds. Everything that is compared was measured on the same inputs, so comparisons are paired by seed;
several measurements of one seed are not independent and count as one replicate, by their mean.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

import numpy as np
from numpy.typing import NDArray

from numdev.record import student_quantile, summary

Floats = NDArray[np.float64]

_NOISE = 1e-12  # logarithms below 1e3 in FP64, and their mean, are off by less: equal values have slope 0, not 1e-16


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % confidence interval.

    Attributes:
        estimate, low, high: NaN where there was nothing to estimate from; infinitely wide from one replicate alone.
        count: replicates that entered.
        excluded: values or pairs left out, because they are zero or not finite and so have no logarithm.
    """

    estimate: float
    low: float
    high: float
    count: int
    excluded: int = 0

    def text(self) -> str:
        """Such as `9.1 [8.7, 9.5]`: as many decimals as the width of the interval gives a meaning to."""
        if math.isnan(self.estimate):
            return "unknown"
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            return f"{significant(self.estimate)} (one replicate)"
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
        """Down to the first digit of half the width, or the second behind a 1; 2 to 4 digits of the estimate."""
        first = math.floor(math.log10(abs(self.estimate))) if self.estimate else 0
        half = (self.high - self.low) / 2
        wanted = -math.floor(math.log10(half / 2))
        return max(0, 1 - first, min(wanted, 3 - first))

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    def within(self, low: float, high: float) -> bool:
        """Whether the whole interval lies between two bounds."""
        return low <= self.low and self.high <= high

    def outside(self, low: float, high: float) -> bool:
        """Whether no value of the interval lies between two bounds."""
        return self.high < low or self.low > high


NOTHING = Interval(math.nan, math.nan, math.nan, 0)


def significant(value: float, digits: int = 2) -> str:
    """A number in as many significant digits: 9.1, 0.053, 120, 3.2e-5."""
    if not math.isfinite(value):
        return "unknown" if math.isnan(value) else f"{value:g}"
    if value != 0 and not 1e-3 <= abs(value) < 1e4:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    text = f"{value:#.{digits}g}"
    return f"{float(text):.0f}" if "e" in text else text.removesuffix(".")


def mean(values: Sequence[float]) -> Interval:
    """The mean and its interval."""
    found = summary(list(values))
    return Interval(found.mean, found.low, found.high, found.count)


def typical(values: Sequence[float]) -> Interval:
    """The geometric mean, its interval by Student's t on the logarithms: what stands on a log axis.

    Where the values of two things are paired, the ratio of their geometric means is `ratio`. With a zero among them, which
    has no logarithm, or NaN, it is the arithmetic mean.
    """
    if not all(value > 0 and math.isfinite(value) for value in values):
        return mean(values)
    found = mean([math.log(value) for value in values])
    return Interval(math.exp(found.estimate), _exp(found.low), _exp(found.high), found.count)


def ratio(a: Iterable[SupportsFloat], b: Iterable[SupportsFloat], seeds: Iterable[Hashable] | None = None) -> Interval:
    """The geometric mean of `a / b` over pairs, its interval by Student's t on the logarithms.

    Args:
        a: values, at least 0.
        b: what each of them is paired with.
        seeds: the replicate of each pair; each pair is one of its own unless given. Pairs of one seed are averaged
            first. If all are of one seed, the pairs themselves are the replicates.

    A pair of zeros is a ratio of 1: neither deviates. A pair with one zero has no finite log-ratio, nor has one that
    is not finite; these are left out and counted in `excluded`.
    """
    top, bottom = _floats(a), _floats(b)
    equal = (top == 0) & (bottom == 0)
    usable = equal | (np.isfinite(top) & np.isfinite(bottom) & (top > 0) & (bottom > 0))
    logs = np.zeros(top.shape)
    positive = usable & ~equal
    logs[positive] = np.log(top[positive]) - np.log(bottom[positive])
    groups = np.arange(len(top)) if seeds is None else np.array(list(seeds))
    excluded = int((~usable).sum())
    if not usable.any():
        return Interval(math.nan, math.nan, math.nan, 0, excluded)
    found = mean(_by_seed(logs[usable], groups[usable]))
    return Interval(math.exp(found.estimate), _exp(found.low), _exp(found.high), found.count, excluded)


def _floats(values: Iterable[SupportsFloat]) -> Floats:
    return np.array([float(value) for value in values])


def _by_seed(values: Floats, seeds: NDArray[np.generic]) -> list[float]:
    names = np.unique(seeds)
    if len(names) == 1:
        return [float(value) for value in values]
    return [float(values[seeds == name].mean()) for name in names]


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)


def slope(x: Iterable[SupportsFloat], y: Iterable[SupportsFloat], seeds: Iterable[Hashable]) -> Interval:
    """The exponent `b` of `y ~ x^b`: one line through (log x, log y) per seed, and an interval over their slopes.

    A single seed's interval is that of its own regression, with n - 2 degrees of freedom. Values of y that are zero or
    not finite are left out and counted; so are seeds left with fewer than two different x.
    """
    across, up, groups = _floats(x), _floats(y), np.array(list(seeds))
    usable = np.isfinite(up) & (up > 0) & (across > 0)
    across, up, groups = np.log(across[usable]), np.log(up[usable]), groups[usable]
    excluded = int((~usable).sum())
    lines = []
    for name in np.unique(groups):
        here = groups == name
        if len(np.unique(across[here])) < 2:
            excluded += int(here.sum())
        else:
            lines.append(_line(across[here], up[here]))
    if not lines:
        return Interval(math.nan, math.nan, math.nan, 0, excluded)
    if len(lines) == 1:
        estimate, half = lines[0]
        return Interval(estimate, estimate - half, estimate + half, 1, excluded)
    found = mean([estimate for estimate, _ in lines])
    return Interval(found.estimate, found.low, found.high, found.count, excluded)


def _line(x: Floats, y: Floats) -> tuple[float, float]:
    """Slope of the least-squares line, and half its 95 % interval by Student's t with n - 2 degrees of freedom."""
    centred = x - x.mean()
    square = float(centred @ centred)
    risen = y - y.mean()
    estimate = 0.0 if float(abs(risen).max()) < _NOISE else float(centred @ risen) / square
    freedom = len(x) - 2
    if freedom < 1:
        return estimate, math.inf
    residual = risen - estimate * centred
    error = math.sqrt(float(residual @ residual) / freedom / square)
    return estimate, student_quantile(0.95, freedom) * error


@dataclass(frozen=True)
class Signs:
    """How often the first of a pair was larger, smaller or equal."""

    larger: int
    smaller: int
    equal: int

    @property
    def count(self) -> int:
        return self.larger + self.smaller + self.equal

    @property
    def p(self) -> float:
        """Two-sided, of the sign test on the unequal pairs."""
        n, fewer = self.larger + self.smaller, min(self.larger, self.smaller)
        return min(1.0, sum(math.comb(n, i) for i in range(fewer + 1)) / 2.0 ** (n - 1))


def signs(a: Iterable[SupportsFloat], b: Iterable[SupportsFloat]) -> Signs:
    """The signs of `a - b` over pairs."""
    first, second = _floats(a), _floats(b)
    return Signs(int((first > second).sum()), int((first < second).sum()), int((first == second).sum()))


def apart(above: Interval, below: Interval) -> bool:
    """Whether one interval lies wholly above another."""
    return above.low > below.high
