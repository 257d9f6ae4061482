from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from numdev.report.statistics import Floats, Interval, mean, ratio, significant, signs, slope, typical, unpaired

CLOSE = 1e-12  # both sides work in FP64 on a dozen values of size 1; their logs and means differ by a few u


@pytest.fixture
def draws() -> np.random.Generator:
    return np.random.default_rng(7)


def test_mean_is_that_of_a_one_sample_t_test(draws: np.random.Generator) -> None:
    values = draws.normal(3.0, 1.0, 9)
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    found = mean(values.tolist())
    assert found.estimate == pytest.approx(values.mean(), rel=CLOSE)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=CLOSE)


def test_typical_is_the_t_interval_of_logarithms(draws: np.random.Generator) -> None:
    values = draws.lognormal(-9.0, 2.0, 10)
    expected = stats.ttest_1samp(np.log(values), 0.0).confidence_interval(0.95)
    found = typical(values.tolist())
    assert found.estimate == pytest.approx(stats.gmean(values), rel=CLOSE)
    assert (found.low, found.high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)), rel=CLOSE)


def test_typical_with_a_zero_is_the_mean() -> None:
    assert typical([0.0, 1.0, 2.0]) == mean([0.0, 1.0, 2.0])


def test_ratio_is_a_paired_t_test_on_logarithms(draws: np.random.Generator) -> None:
    b = draws.lognormal(0.0, 0.5, 10)
    a = b * draws.lognormal(0.7, 0.2, 10)
    expected = stats.ttest_rel(np.log(a), np.log(b)).confidence_interval(0.95)
    found = ratio(a, b)
    assert found.estimate == pytest.approx(stats.gmean(a / b), rel=CLOSE)
    assert (found.low, found.high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)), rel=CLOSE)
    assert (found.count, found.excluded) == (10, 0)


def test_pairs_of_one_seed_count_as_one_replicate(draws: np.random.Generator) -> None:
    a, b = draws.lognormal(size=(2, 4, 3))  # four seeds, three areas
    seeds = np.repeat(np.arange(4), 3)
    by_seed = np.log(a / b).mean(1)
    expected = stats.ttest_1samp(by_seed, 0.0).confidence_interval(0.95)
    found = ratio(a.ravel(), b.ravel(), seeds)
    assert found.count == 4
    assert (found.low, found.high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)), rel=CLOSE)


def test_pairs_of_a_single_seed_are_one_replicate() -> None:
    found = ratio([2.0, 8.0], [1.0, 1.0], [5, 5])
    assert found.estimate == pytest.approx(4.0)
    assert found.count == 1
    assert (found.low, found.high) == (0.0, math.inf)


def cluster_intervals(values: Floats) -> list[tuple[float, float]]:
    """scipy's interval of each row."""
    found = [stats.ttest_1samp(row, 0.0).confidence_interval(0.95) for row in values]
    return [(float(one.low), float(one.high)) for one in found]


def test_an_interval_over_clusters_holds_that_of_each(draws: np.random.Generator) -> None:
    """Heads of a layer are alike: two layers that differ are not 24 independent heads."""
    values = draws.normal(1.0, 0.1, (2, 12)) + np.array([[0.0], [1.0]])
    layers = np.repeat(["a", "b"], 12)
    found = mean(values.ravel().tolist(), None, layers.tolist())
    ends = cluster_intervals(values)
    assert found.estimate == pytest.approx(values.mean(), rel=CLOSE)
    assert (found.low, found.high) == pytest.approx((ends[0][0], ends[1][1]), rel=CLOSE)
    assert found.count == 24
    alone = mean(values.ravel().tolist())
    assert found.low < alone.low < alone.high < found.high


def test_clusters_weigh_alike_however_many_replicates_they_have(draws: np.random.Generator) -> None:
    values = [1.0, 1.1, 0.9, 1.05, 3.0, 3.1]
    found = mean(values, None, list("aaaabb"))
    assert found.estimate == pytest.approx((np.mean(values[:4]) + np.mean(values[4:])) / 2)


def test_ratios_and_slopes_know_clusters(draws: np.random.Generator) -> None:
    logs = draws.normal(0.5, 0.2, (2, 5)) + np.array([[0.0], [0.7]])
    seeds, layers = np.arange(10), np.repeat(["a", "b"], 5)
    found = ratio(np.exp(logs).ravel(), np.ones(10), seeds, layers)
    ends = cluster_intervals(logs)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((ends[0][0], ends[1][1]), rel=1e-9)
    x = np.array([1.0, 2.0, 4.0])
    y = np.array([x**b for b in logs.ravel()])
    line = slope(np.tile(x, 10), y.ravel(), np.repeat(seeds, 3), np.repeat(layers, 3))
    assert (line.low, line.high) == pytest.approx((ends[0][0], ends[1][1]), rel=1e-9)


def test_clusters_of_one_replicate_each_are_none() -> None:
    assert mean([1.0, 2.0, 4.0], None, ["a", "b", "c"]) == mean([1.0, 2.0, 4.0])


def test_a_cluster_of_one_replicate_among_larger_ones_has_no_interval() -> None:
    found = mean([1.0, 2.0, 4.0], None, ["a", "a", "b"])
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert found.text() == "2.8 (a cluster of one replicate)"


@pytest.mark.parametrize(
    ("a", "b", "estimate", "count", "excluded"),
    [
        ([0.0, 0.0], [0.0, 0.0], 1.0, 2, 0),  # bit-equal both times: the ratio is 1
        ([0.0, 4.0], [0.0, 1.0], 2.0, 2, 0),
        ([0.0, 4.0], [1.0, 1.0], 4.0, 1, 1),
        ([3.0, 4.0], [0.0, 1.0], 4.0, 1, 1),
        ([math.nan, 4.0, math.inf], [1.0, 1.0, 1.0], 4.0, 1, 2),
    ],
)
def test_zeros_in_a_ratio(a: list[float], b: list[float], estimate: float, count: int, excluded: int) -> None:
    found = ratio(a, b)
    assert found.estimate == pytest.approx(estimate)
    assert (found.count, found.excluded) == (count, excluded)


def test_a_ratio_of_nothing_is_unknown() -> None:
    found = ratio([1.0], [0.0])
    assert math.isnan(found.estimate)
    assert (found.count, found.excluded, found.text()) == (0, 1, "unknown")


def test_slope_is_the_mean_of_the_seeds_regressions(draws: np.random.Generator) -> None:
    x = np.array([64, 128, 256, 512], dtype=float)
    y = x**0.5 * draws.lognormal(0.0, 0.1, (5, 4))
    lines = [stats.linregress(np.log(x), np.log(row)).slope for row in y]
    expected = stats.ttest_1samp(lines, 0.0).confidence_interval(0.95)
    found = slope(np.tile(x, 5), y.ravel(), np.repeat(np.arange(5), 4))
    assert found.estimate == pytest.approx(np.mean(lines), rel=CLOSE)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-10)
    assert found.count == 5


def test_slope_of_one_seed_has_no_interval(draws: np.random.Generator) -> None:
    """Points about its line are of one replicate, and say nothing of others."""
    x = np.array([64, 128, 256, 512, 1024], dtype=float)
    y = x**-0.3 * draws.lognormal(0.0, 0.1, 5)
    found = slope(x, y, np.zeros(5))
    assert found.estimate == pytest.approx(stats.linregress(np.log(x), np.log(y)).slope, rel=1e-10)
    assert (found.low, found.high, found.count) == (-math.inf, math.inf, 1)


def test_slope_of_two_points_of_one_seed_is_infinitely_uncertain() -> None:
    found = slope([1.0, 2.0], [1.0, 4.0], [0, 0])
    assert found.estimate == pytest.approx(2.0)
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_slope_of_equal_values_is_exactly_zero() -> None:
    # max_difference of a coarse format takes few values; 1e-16 for a slope would pass for growth.
    found = slope([100.0, 300.0, 700.0] * 2, [0.00390625] * 6, [0, 0, 0, 1, 1, 1])
    assert (found.estimate, found.low, found.high) == (0.0, 0.0, 0.0)


def test_slope_leaves_out_zeros_and_seeds_with_one_place() -> None:
    found = slope([1, 2, 4, 1, 2], [1.0, 2.0, 0.0, 3.0, 0.0], [0, 0, 0, 1, 1])
    assert found.estimate == pytest.approx(1.0)
    assert (found.count, found.excluded) == (1, 3)
    assert slope([1, 2], [0.0, 0.0], [0, 0]).text() == "unknown"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20))
def test_signs_are_the_binomial_test(pairs: list[tuple[int, int]]) -> None:
    first, second = zip(*pairs, strict=True)
    found = signs(first, second)
    assert found.count == len(pairs)
    unequal = found.larger + found.smaller
    expected = stats.binomtest(found.larger, unequal).pvalue if unequal else 1.0
    assert found.p == pytest.approx(expected, rel=1e-9)


def test_the_unit_of_a_sign_test_is_a_replicate() -> None:
    """Ten seeds at six sizes are ten trials: p = 2 / 2^10, not 2 / 2^60."""
    seeds = np.repeat(np.arange(10), 6)
    found = signs(np.full(60, 2.0), np.ones(60), seeds)
    assert (found.larger, found.count, found.p) == (10, 10, 2 / 2**10)
    mixed = signs([4.0, 1.0, 1.0, 1.0], [1.0, 2.0, 2.0, 1.0], [0, 0, 1, 1])
    assert (mixed.larger, mixed.smaller, mixed.equal) == (1, 1, 0)


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(9.1234, 8.7, 9.5, 10), "9.1 [8.7, 9.5]"),
        (Interval(1.1666, 1.152, 1.181, 10), "1.167 [1.152, 1.181]"),
        (Interval(0.5623, 0.52, 0.60, 10), "0.56 [0.52, 0.60]"),
        (Interval(-0.036, -0.17, 0.099, 5), "-0.036 [-0.170, 0.099]"),
        (Interval(123.4, 100.0, 150.0, 5), "123 [100, 150]"),
        (Interval(5.2e-7, 4.6e-7, 5.9e-7, 5), "5.2e-7 [4.6e-7, 5.9e-7]"),
        (Interval(2.0, -math.inf, math.inf, 1), "2.0 (one replicate)"),
        (Interval(1.0, 1.0, 1.0, 5), "1.00 in every replicate"),
        (Interval(math.nan, math.nan, math.nan, 0), "unknown"),
    ],
)
def test_text_of_an_interval(interval: Interval, text: str) -> None:
    assert interval.text() == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0"), (9.14, "9.1"), (10.0, "10"), (123.0, "120"), (0.0531, "0.053"), (3.2e-5, "3.2e-5"), (math.inf, "inf")],
)
def test_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_replicates_that_differ_in_the_last_bit_alone_are_tested_without_a_warning() -> None:
    a = np.array([1.0, 1.0 + 2**-52, 1.0])
    with warnings.catch_warnings(action="error"):
        found = unpaired(2 * a, a, 1.0)
    assert found.ratio.estimate == pytest.approx(0.5, rel=1e-12)
    assert found.p == 0.5**3  # half of all may differ
