"""Every rule of a verdict: exactly one applies, a wide interval is undecided, and p-values decide what intervals do."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from numdev.report.claims.verdicts import (
    ABOVE,
    ALIKE,
    GROWS,
    LARGER,
    MARGIN,
    TREND,
    Evidence,
    Question,
    Region,
    Verdict,
    about,
    count,
    judged,
)
from numdev.report.statistics import STEP, Floats, Interval, largest_share, mean, ratio

SHRINKS, FLAT, SMALLER = Region(high=-TREND), Region(-TREND, TREND), Region(high=1 / MARGIN)
HOLDS, FAILS, UNDECIDED = Verdict.HOLDS, Verdict.FAILS, Verdict.UNDECIDED
REGIONS = {
    "grows": GROWS,
    "shrinks": SHRINKS,
    "flat": FLAT,
    "larger": LARGER,
    "smaller": SMALLER,
    "alike": ALIKE,
    "order": ABOVE,
    "about 10": about(10.0, 2.0),
    "below a half": Region(high=0.5),
}
# Every bound, one float to either side of it, what lies between, and both infinities.
BOUNDS = sorted({b for region in REGIONS.values() for b in (region.low, region.high) if math.isfinite(b)})
ENDS = sorted(
    {e for b in BOUNDS for e in (np.nextafter(b, -9.0), b, np.nextafter(b, 99.0), b + 0.01)} | {-math.inf, math.inf, 0.0}
)


def interval(low: float, high: float) -> Interval:
    middle = (low + high) / 2 if math.isfinite(low + high) else 0.0
    return Interval(middle, low, high, 10)


@pytest.mark.parametrize("name", REGIONS)
def test_exactly_one_verdict_applies_to_every_interval(name: str) -> None:
    """By the definition of each, over all intervals with ends at, beside and between the bounds: 3 verdicts, never 0 or 2."""
    region = REGIONS[name]
    for low in ENDS:
        for high in (end for end in ENDS if end >= low):
            inside = region.low < low and high < region.high
            outside = high <= region.low or low >= region.high
            assert not (inside and outside)
            expected = HOLDS if inside else FAILS if outside else UNDECIDED
            assert region.verdict(interval(low, high)) is expected


def samples(seed: int, clusters: int) -> tuple[Floats, list[str]]:
    draws = np.random.default_rng(seed)
    centres = draws.normal(draws.uniform(-0.4, 0.6), draws.choice([0.0, 0.1]), clusters)
    values = np.array([draws.normal(centre, draws.uniform(0.01, 0.3), 6) for centre in centres])
    return values.ravel(), [f"c{i}" for i in range(clusters) for _ in range(6)]


@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from(sorted(REGIONS)), st.booleans())
def test_p_decides_exactly_where_the_interval_does(seed: int, clusters: int, name: str, is_ratio: bool) -> None:
    values, layers = samples(seed, clusters)
    value = ratio(np.exp(values), np.ones(len(values)), None, layers) if is_ratio else mean(values.tolist(), None, layers)
    region = REGIONS[name]
    p = min(region.p(value))
    assert 0 <= p <= 1
    assert (p < 0.05) == (region.verdict(value) is not UNDECIDED)


def test_sameness_is_two_one_sided_tests() -> None:
    """Each at half the level: the 95 % interval lies within the margin, not the 90 % one that equivalence is often given."""
    values = np.random.default_rng(3).normal(0.02, 0.03, 8)
    found, _ = ALIKE.p(ratio(np.exp(values), np.ones(8)))
    low = stats.ttest_1samp(values, -math.log(MARGIN), alternative="greater").pvalue
    high = stats.ttest_1samp(values, math.log(MARGIN), alternative="less").pvalue
    assert found == pytest.approx(2 * max(low, high), rel=1e-9)


@given(st.integers(2, 60), st.floats(0.3, 3.0), st.sampled_from([LARGER, SMALLER, ALIKE, ABOVE]))
def test_equal_replicates_bound_a_share(count: int, value: float, region: Region) -> None:
    """By the binomial test that none of `count` differs, of the share that takes the mean to the bound from twice beyond it."""
    p = min(region.p(ratio([value] * count, [1.0] * count)))
    bounds = [bound for bound in (region.low, region.high) if 0 < bound < math.inf]
    distances = [abs(math.log(bound / value)) for bound in bounds]
    shares = [distance / (distance + math.log(2)) for distance in distances]
    expected = [float(stats.binomtest(0, count, share, alternative="less").pvalue) for share in shares]
    assert p == pytest.approx(max(expected), rel=1e-6, abs=1e-9)  # the nearest bound decides
    assert p > 0


def test_a_replicate_that_doubles_turns_a_line_by_less_than_is_assumed() -> None:
    """Of all ways in which some of eight values double, over a factor of 4.5 in x."""
    x = np.linspace(0.0, math.log(4.5), 8)
    slopes = [np.polyfit(x, math.log(2) * np.array(doubled), 1)[0] for doubled in product((0, 1), repeat=8)]
    assert max(map(abs, slopes)) <= STEP


@pytest.mark.parametrize(("count", "share"), [(3, 0.632), (10, 0.259), (59, 0.0495)])
def test_the_sentence_states_the_share_that_equal_replicates_bound(count: int, share: float) -> None:
    assert largest_share(count) == pytest.approx(stats.binomtest(0, count).proportion_ci(0.9).high, rel=1e-9)  # one-sided
    assert largest_share(count) == pytest.approx(share, abs=1e-3)
    (found,) = judged([evidence(Question(ratio([1.0] * count, [1.0] * count), ALIKE))])
    assert found.sentence == f"Sentence. Where all {count} replicates are equal, at most {share:.0%} of others differ (95 %)."


def question(estimate: float, noise: float = 0.05, region: Region = ABOVE, count: int = 8) -> Question:
    return Question(ratio(np.exp(math.log(estimate) + noise * np.linspace(-1, 1, count)), np.ones(count)), region)


def evidence(*questions: Question) -> Evidence:
    return Evidence("figure", "Sentence.", questions)


def test_what_decides_alone_may_not_in_a_table_of_many() -> None:
    near = question(1.05, noise=0.08)
    assert 0.01 < min(near.p) < 0.05
    (alone,) = judged([evidence(near)])
    assert (alone.verdict, alone.p) == (HOLDS, min(near.p))
    others = [evidence(question(1.0, region=LARGER, noise=0.5)) for _ in range(9)]
    among = judged([evidence(near), *others])[0]
    assert among.verdict is UNDECIDED
    assert among.p == pytest.approx(min(1.0, 10 * min(near.p)))
    assert among.verdict_text == f"undecided (p = {among.p:.2g})"


@given(st.lists(st.tuples(st.floats(0.7, 1.5), st.floats(0.01, 0.5)), min_size=1, max_size=12))
def test_a_table_is_adjusted_as_statsmodels_defines_holm(drawn: list[tuple[float, float]]) -> None:
    """The verdict of each is that of a step-down procedure written out: the i-th least p against 0.05 / (m - i)."""
    questions = [question(estimate, noise) for estimate, noise in drawn]
    order = sorted(range(len(questions)), key=lambda i: min(questions[i].p))
    rejected = set()
    for rank, i in enumerate(order):
        if min(questions[i].p) * (len(order) - rank) >= 0.05:
            break
        rejected.add(i)
    found = judged([evidence(one) for one in questions])
    assert {i for i, one in enumerate(found) if one.verdict is not UNDECIDED} == rejected


@pytest.mark.parametrize("parts", [1, 5, 20])
def test_what_all_parts_must_meet_is_not_adjusted_among_them(parts: int) -> None:
    """Its p is the largest of theirs; one kernel more makes no claim on the others harder to show."""
    several = [question(1.1 + 0.02 * i, noise=0.1) for i in range(parts)]
    (found,) = judged([evidence(*several)])
    assert found.p == max(one.p[0] for one in several) < 0.05
    assert (found.verdict, count([evidence(*several)])) == (HOLDS, 1)


@pytest.mark.parametrize("parts", [1, 5, 20])
def test_that_one_of_several_parts_fails_is_a_choice_among_them(parts: int) -> None:
    several = [question(2.0), *(question(1.0, noise=0.5) for _ in range(parts - 1)), question(0.92, noise=0.1)]
    (found,) = judged([evidence(*several)])
    assert found.p == pytest.approx(min(1.0, (parts + 1) * several[-1].p[1]))


def test_what_is_seen_needs_no_test_and_says_so() -> None:
    """Bits of the measured runs are equal or not: it is no question of the table, and generalises over nothing."""
    seen = Evidence("0", "Equal.", seen=HOLDS)
    near = question(1.05, noise=0.08)
    found, other = judged([seen, evidence(near)], ["over seeds", "over seeds"])
    assert (found.verdict, found.verdict_text, found.over) == (HOLDS, "holds", "over no runs but these")
    assert (count([seen, evidence(near)]), other.p) == (1, min(near.p))


def test_a_condition_that_is_not_met_decides_nothing() -> None:
    unmet = Question(question(0.5).value, ABOVE, is_condition=True)
    assert judged([evidence(question(2.0), unmet)])[0].verdict is UNDECIDED
    assert judged([evidence(question(0.5), unmet)])[0].verdict is FAILS


def test_what_is_judged_beside_it_is_told_and_counted() -> None:
    both = Evidence("2.0", "Twice.", (question(2.0),), Evidence("0.5", "", (question(0.5),)))
    (found,) = judged([both], ["over seeds"])
    assert (found.verdict, found.sentence, found.over) == (HOLDS, "Twice. By RMSE: fails, 0.5.", "over seeds")
    assert found.beside is not None
    assert found.beside.verdict is FAILS
    assert count([both]) == 2
