from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from numdev.report.statistics import Floats, Interval, mean, ratio, slope, typical

CLOSE = 1e-10  # both sides work in FP64 on a dozen values of size 1 and their logarithms; regressions differ by some hundred u


@pytest.fixture
def draws() -> np.random.Generator:
    return np.random.default_rng(7)


def ends(values: Floats) -> tuple[float, float]:
    """The 95 % interval of scipy's t test."""
    interval = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    return float(interval.low), float(interval.high)


def close(interval: Interval, estimate: float, low: float, high: float) -> bool:
    return (interval.estimate, interval.low, interval.high) == pytest.approx((estimate, low, high), rel=CLOSE)


def test_intervals_are_those_of_scipys_t_test(draws: np.random.Generator) -> None:
    """Of values, of logarithms, and of log ratios of pairs; pairs of one seed, at three places, count as one replicate."""
    values, a, b = draws.normal(3.0, 1.0, 9), *draws.lognormal(0.3, 0.5, (2, 9))
    assert close(mean(values.tolist()), values.mean(), *ends(values))
    assert close(typical(a.tolist()), stats.gmean(a), *np.exp(ends(np.log(a))))
    assert close(ratio(a, b), stats.gmean(a / b), *np.exp(ends(np.log(a / b))))
    seeds, of_seed = np.repeat([0, 1, 2], 3), np.log(a / b).reshape(3, 3).mean(1)
    by_seed = ratio(a, b, seeds)
    assert close(by_seed, np.exp(of_seed.mean()), *np.exp(ends(of_seed)))
    assert (by_seed.count, by_seed.excluded) == (3, 0)
    alone = ratio([2.0, 8.0], [1.0, 1.0], [5, 5])
    assert close(alone, 4.0, 0.0, math.inf)
    assert alone.count == 1
    assert typical([0.0, 1.0, 2.0]) == mean([0.0, 1.0, 2.0]), "a zero has no logarithm"


def test_an_interval_over_clusters_holds_that_of_each(draws: np.random.Generator) -> None:
    """Heads of a layer are alike: two layers that differ are not 24 independent heads."""
    values = draws.normal(1.0, 0.1, (2, 12)) + np.array([[0.0], [1.0]])
    seeds, layers = np.arange(24), np.repeat(["a", "b"], 12)
    low, high = ends(values[0])[0], ends(values[1])[1]
    of_layers, alone = mean(values.ravel().tolist(), None, layers.tolist()), mean(values.ravel().tolist())
    assert close(of_layers, values.mean(), low, high)
    assert of_layers.count == 24
    assert of_layers.low < alone.low < alone.high < of_layers.high
    assert close(ratio(np.exp(values).ravel(), np.ones(24), seeds, layers), *np.exp((values.mean(), low, high)))
    x = np.array([1.0, 2.0, 4.0])
    y = np.array([x**exponent for exponent in values.ravel()])
    assert close(slope(np.tile(x, 24), y.ravel(), np.repeat(seeds, 3), np.repeat(layers, 3)), values.mean(), low, high)


def test_clusters_weigh_alike_and_need_several_replicates() -> None:
    values = [1.0, 1.1, 0.9, 1.05, 3.0, 3.1]
    assert mean(values, None, list("aaaabb")).estimate == pytest.approx((np.mean(values[:4]) + np.mean(values[4:])) / 2)
    assert mean(values, None, list("abcdef")) == mean(values), "clusters of one replicate each are none"
    one_alone = mean([1.0, 2.0, 4.0], None, ["a", "a", "b"])
    assert (one_alone.low, one_alone.high) == (-math.inf, math.inf)
    assert one_alone.text() == "2.8 (a cluster of one replicate)"


@pytest.mark.parametrize(
    ("a", "b", "estimate", "count", "excluded"),
    [
        ([0.0, 0.0], [0.0, 0.0], 1.0, 2, 0),  # bit-equal both times: the ratio is 1
        ([0.0, 4.0], [0.0, 1.0], 2.0, 2, 0),
        ([0.0, 4.0], [1.0, 1.0], 4.0, 1, 1),
        ([3.0, 4.0], [0.0, 1.0], 4.0, 1, 1),
        ([math.nan, 4.0, math.inf], [1.0, 1.0, 1.0], 4.0, 1, 2),
        ([1.0], [0.0], math.nan, 0, 1),
    ],
)
def test_zeros_in_a_ratio(a: list[float], b: list[float], estimate: float, count: int, excluded: int) -> None:
    times = ratio(a, b)
    assert times.estimate == pytest.approx(estimate, nan_ok=True)
    assert (times.count, times.excluded) == (count, excluded)


def test_slope_is_the_mean_of_the_seeds_regressions(draws: np.random.Generator) -> None:
    x = np.array([64, 128, 256, 512], dtype=float)
    y = x**0.5 * draws.lognormal(0.0, 0.1, (5, 4))
    lines = np.array([stats.linregress(np.log(x), np.log(row)).slope for row in y])
    every = slope(np.tile(x, 5), y.ravel(), np.repeat(np.arange(5), 4))
    assert close(every, lines.mean(), *ends(lines))
    assert every.count == 5
    one = slope(x, y[0], np.zeros(4))  # points about its line are of one replicate, and say nothing of others
    assert close(one, lines[0], -math.inf, math.inf)
    assert one.count == 1
    # max_difference of a coarse format takes few values; 1e-16 for a slope would pass for growth.
    level = slope([100.0, 300.0, 700.0] * 2, [0.00390625] * 6, [0, 0, 0, 1, 1, 1])
    assert (level.estimate, level.low, level.high) == (0.0, 0.0, 0.0)
    few = slope([1, 2, 4, 1, 2], [1.0, 2.0, 0.0, 3.0, 0.0], [0, 0, 0, 1, 1])  # zeros, and a seed with one place, are left out
    assert few.estimate == pytest.approx(1.0)
    assert (few.count, few.excluded) == (1, 3)
    assert slope([1, 2], [0.0, 0.0], [0, 0]).text() == "unknown"


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(9.1234, 8.7, 9.5, 10), "9.1 [8.7, 9.5]"),
        (Interval(1.1666, 1.152, 1.181, 10), "1.167 [1.152, 1.181]"),
        (Interval(-0.036, -0.17, 0.099, 5), "-0.036 [-0.170, 0.099]"),
        (Interval(123.4, 100.0, 150.0, 5), "123 [100, 150]"),
        (Interval(5.2e-7, 4.6e-7, 5.9e-7, 5), "5.2e-7 [4.6e-7, 5.9e-7]"),
        (Interval(2.0, -math.inf, math.inf, 1), "2.0 (one replicate)"),
        (Interval(1.0, 1.0, 1.0, 5), "1.00 in every replicate"),
    ],
)
def test_text_of_an_interval(interval: Interval, text: str) -> None:
    assert interval.text() == text
