"""The probability of a decision, against simulation: of one test, and of the claims of a whole table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import t as student

from numdev.report.claims.power import CAUTIOUS, LIKELY, MOST, POWER, Chance, Prospect, pilot_spread, prospects, reach
from numdev.report.claims.verdicts import ALPHA, Claim, Evidence, Question, Region, Verdict, judged
from numdev.report.statistics import Share, mean
from numdev.results.claim import Pilot

DRAWS = 20_000
BELOW = Region(high=1.1)
BETWEEN = Region(2.0, 5.0)


@pytest.mark.parametrize(
    ("distance", "spread", "count", "alpha"), [(0.3, 0.5, 10, 0.05), (1.0, 1.0, 4, 0.01), (0.1, 0.4, 30, 0.05)]
)
def test_power_of_one_test_is_that_of_simulation(distance: float, spread: float, count: int, alpha: float) -> None:
    draws = np.random.default_rng(7).normal(distance, spread, (DRAWS, count))
    t = draws.mean(axis=1) / (draws.std(axis=1, ddof=1) / math.sqrt(count))
    share = float(np.mean((t > 0) & (2 * student.sf(np.abs(t), count - 1) < alpha)))
    # Five standard deviations of a share of so many draws
    assert reach(distance, spread, count, alpha) == pytest.approx(share, abs=5 * math.sqrt(0.25 / DRAWS))


@pytest.mark.parametrize("ratio", [0.1, 1.0, 4.0, 12.0, 20.0, 200.0])
def test_more_replicates_never_have_less_power(ratio: float) -> None:
    """Also far out, where the noncentral t of scipy is NaN at some counts."""
    powers = [reach(ratio, 1.0, count, 0.05 / 14) for count in range(2, 1001)]
    assert all(after >= before - 1e-9 for before, after in pairwise(powers))
    assert 0 <= powers[0] <= powers[-1] == pytest.approx(1.0 if ratio >= 1 else powers[-1])


def test_replicates_that_are_all_equal_decide_when_enough_show_it() -> None:
    shares = {count: Share(0.0, 0.0, count - 1).p(2.0) for count in (2, 3)}
    assert reach(2.0, 0.0, 2, 0.5 * (shares[2] + shares[3])) == 0.0
    assert reach(2.0, 0.0, 3, 0.5 * (shares[2] + shares[3])) == 1.0


@pytest.mark.parametrize("count", [3, 10])
@pytest.mark.parametrize("confidence", [LIKELY, CAUTIOUS])
def test_the_spread_of_a_pilot_is_too_small_as_often_as_stated(count: int, confidence: float) -> None:
    draws = np.random.default_rng(3).normal(0.0, 2.0, (4000, count))
    limits = np.array([pilot_spread(Share.of(own.tolist()), confidence) for own in draws])
    assert np.mean(limits < 2.0) == pytest.approx(1 - confidence, abs=5 * math.sqrt(0.25 / 4000))


def claim(name: str, region: Region | None) -> Claim:
    return Claim(name, "", name, "", lambda rows: Evidence("", ""), region=region)


def interval(centre: float, spread: float, count: int = 400) -> list[float]:
    """The interval of a ratio whose replicates have just this centre and standard deviation, so many that both are known."""
    half = spread * float(student.ppf(0.975, count - 1)) / math.sqrt(count)
    return [centre, centre * math.exp(-half), centre * math.exp(half)]


TABLE: list[tuple[Region, list[tuple[float, float]]]] = [
    (BELOW, [(0.1, 0.5), (0.12, 0.4)]),  # holds of both kernels
    (BELOW, [(0.8, 0.2), (0.7, 0.3)]),
    (BETWEEN, [(1.2, 0.3), (3.0, 0.3)]),  # fails by the first
    (BETWEEN, [(3.0, 0.2), (3.3, 0.25)]),
    (BELOW, [(1.0, 0.3)]),
]


def planned(table: Sequence[tuple[Region, list[tuple[float, float]]]], seeds: int) -> list[Prospect]:
    claims = [claim(str(place), region) for place, (region, _) in enumerate(table)]
    pilot = Pilot("a test", 400, {str(place): [interval(*one) for one in own] for place, (_, own) in enumerate(table)})
    return prospects(claims, "study", seeds, None, pilot)


@pytest.mark.parametrize("seeds", [4, 6, 10, 20])
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_decisions_of_a_table_are_at_least_as_frequent_as_stated(seeds: int, correlation: float) -> None:
    """By the rules themselves, intersection-union within claims and Holm's method over them, whatever kernels have in common."""
    count, draw = 300, np.random.default_rng(11)
    decided = np.zeros(len(TABLE))
    right = [Verdict.HOLDS, Verdict.HOLDS, Verdict.FAILS, Verdict.HOLDS, Verdict.HOLDS]
    for _ in range(count):
        evidence = []
        for region, kernels in TABLE:
            common = draw.standard_normal(seeds)
            values = [
                math.log(centre)
                + spread * (math.sqrt(correlation) * common + math.sqrt(1 - correlation) * draw.standard_normal(seeds))
                for centre, spread in kernels
            ]
            evidence.append(Evidence("", "", tuple(Question(mean(own.tolist(), logarithmic=True), region) for own in values)))
        decided += [found.verdict is verdict for found, verdict in zip(judged(evidence), right, strict=True)]
    stated = np.array([one.likely.power for one in planned(TABLE, seeds)])
    assert [one.verdict for one in planned(TABLE, seeds)] == right
    # The pilot's own limit of its spread, of 400 replicates, is within 3 % of it; four standard deviations of a share
    assert np.all(stated <= decided / count + 4 * math.sqrt(0.25 / count) + 0.03)
    clear = stated > 0.99
    assert np.all(decided[clear] / count > 0.97)
    if seeds == 20:
        assert clear.sum() == 4, "a bound that is near is not called out of reach, but for the last"


def test_the_number_of_seeds_is_the_least_that_decides() -> None:
    for place, one in enumerate(planned(TABLE, 10)):
        for name, needed in (("likely", one.likely.needed), ("cautious", one.cautious.needed)):
            assert getattr(planned(TABLE, needed)[place], name).power >= POWER
            assert needed == 2 or getattr(planned(TABLE, needed - 1)[place], name).power < POWER
        assert one.likely.needed <= one.cautious.needed
        assert one.likely.power >= one.cautious.power
    (never,) = planned([(BELOW, [(1.1 * math.exp(-1e-4), 1.0)])], 10)
    assert never.likely.needed == MOST + 1


def test_what_is_not_known_counts_as_a_question() -> None:
    """Three claims without a pilot make the others' alpha a quarter; one without bounds asks nothing."""
    pilot = Pilot("a test", 5, {"a": [interval(0.8, 0.3, 5)]})
    alone, *_ = prospects([claim("a", BELOW), claim("seen", None)], "study", 10, None, pilot)
    among, *rest = prospects([claim(name, BELOW) for name in "abcd"], "study", 10, None, pilot)
    share = Share(math.log(0.8), 0.3 / math.sqrt(5), 4)
    for one, questions in ((alone, 1), (among, 4)):
        for power, confidence in ((one.likely.power, LIKELY), (one.cautious.power, CAUTIOUS)):
            assert power == pytest.approx(reach(math.log(1.1 / 0.8), pilot_spread(share, confidence), 10, ALPHA / questions))
    assert [(one.pilot, one.likely) for one in rest] == [("", Chance())] * 3


def test_one_of_several_values_that_lies_outside_is_a_choice_among_them() -> None:
    share = Share(math.log(1.8), 0.3 / math.sqrt(5), 4)
    outside, inside = interval(1.8, 0.3, 5), interval(3.0, 0.3, 5)
    (one,) = prospects([claim("a", BETWEEN)], "study", 10, None, Pilot("a test", 5, {"a": [outside, inside, inside]}))
    assert one.verdict is Verdict.FAILS
    assert one.cautious.power == pytest.approx(reach(math.log(2 / 1.8), pilot_spread(share, CAUTIOUS), 10, ALPHA / 3))
