"""Whether B is larger or smaller than A by more than a tolerance: the ratio B / A, its p-value, and those of many tests at once.

The tolerance T is a ratio of at least 1. The hypothesis tested is |log ratio| <= log T, and p < 0.05 exactly where the 95 %
confidence interval of the ratio lies beyond T or below 1 / T; with T = 1 it is the usual two-sided t test. Ratios that are equal
in all replicates have the p-value of `p_of_equal`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr

from numdev.report.statistics.estimates import NOTHING, Floats, Interval, Signs, p_of_equal, ratio

_NOISE = 1e-12
"""Relative change that a metric's own FP64 arithmetic makes on another machine. A sum of N d terms in another order is off by
less than 100 u = 1e-14. Golden is off by a few u of r, say 2^-51 r: 2^-40 = 9e-13 of a deviation of 2^-11 r, which is u of fp16.
Finer formats deviate less and take more of golden's error, but of either sign, which the interval over seeds allows for."""


@dataclass(frozen=True)
class Test:
    """What replicates say about B / A.

    Attributes:
        ratio: with its 95 % interval.
        p: two-sided, before any adjustment; NaN where nothing can be tested.
        is_larger: whether B is the larger one, where they differ.
        note: what the reader should know of the test.
    """

    __test__ = False  # pytest collects classes of this name

    ratio: Interval
    p: float
    is_larger: bool
    note: str = ""


def paired(a: Floats, b: Floats, tolerance: float) -> Test:
    """By Student's t on the logarithms of b / a, replicate by replicate; equal zeros are a ratio of 1.

    Where a pair has no finite ratio, such as a zero on one side alone, p is that of the sign test over all pairs.
    """
    with np.errstate(invalid="ignore"):
        b = np.where(np.abs(b - a) <= _NOISE * np.abs(a), a, b)
    found = ratio(b, a)
    if len(a) < 2:
        return Test(found, math.nan, found.estimate > 1, "one replicate alone has no interval; measure more seeds")
    if found.excluded:
        signs = Signs(int((b > tolerance * a).sum()), int((a > tolerance * b).sum()), 0)
        note = f"{found.excluded} of {len(a)} pairs have no finite ratio; p is of the sign test"
        return Test(found, signs.p, signs.larger > signs.smaller, note)
    (share,) = found.shares
    return Test(found, _p(share.mean, share.error, share.freedom, tolerance), found.estimate > 1)


def unpaired(a: Floats, b: Floats, tolerance: float) -> Test:
    """By Welch's t on the logarithms of b and of a."""
    from scipy.stats import sem, ttest_ind  # late: it takes longer to import than numdev, and most tables test nothing

    note = "not paired: problem, baseline or seeds differ"
    if min(len(a), len(b)) < 2:
        return Test(NOTHING, math.nan, False, f"{note}; one replicate alone has no interval")
    if not all(np.isfinite(values).all() and values.min() > 0 for values in (a, b)):
        return Test(NOTHING, math.nan, False, f"{note}; a value that is zero or not finite has no logarithm")
    before, after = np.log(a), np.log(b)
    estimate = float(after.mean() - before.mean())
    error = math.hypot(sem(before), sem(after)) if max(np.ptp(before), np.ptp(after)) > _NOISE else 0.0
    freedom, low, high = min(len(a), len(b)) - 1.0, estimate, estimate
    if error > 0:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)  # one side may be alike to the last bits
            found = ttest_ind(after, before, equal_var=False)
        freedom, (low, high) = float(found.df), found.confidence_interval(0.95)
    interval = Interval(math.exp(estimate), math.exp(low), math.exp(min(high, 700.0)), min(len(a), len(b)))
    return Test(interval, _p(estimate, error, freedom, tolerance), estimate > 0, note)


def _p(estimate: float, error: float, freedom: float, tolerance: float) -> float:
    """Two-sided p-value of |log ratio| <= log tolerance."""
    beyond = abs(estimate) - math.log(tolerance)
    if error == 0:
        return p_of_equal(beyond, round(freedom) + 1)
    return min(1.0, 2 * float(stdtr(freedom, -beyond / error)))


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
