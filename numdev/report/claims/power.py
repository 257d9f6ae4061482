"""Power: with which probability planned replicates decide a claim, by what a pilot has shown, and how many would.

Replicates of a figure are taken as normal, on the scale of its interval, with the mean of the pilot. Their spread is an upper
confidence limit of the pilot's (Browne 1995, Statistics in Medicine 14, 1933): that of 50 %, which is as likely too small as too
large, and that of 80 % to be cautious. Then n replicates put the figure on its side of a bound, at level alpha, with the
probability that a noncentral t of n - 1 degrees of freedom and noncentrality `distance sqrt(n) / spread` exceeds the quantile of
Student's t.

Where several tests have to succeed, the probability is at least 1 minus the sum of those with which each fails, whatever the
dependence between them. Of a claim these are the tests of its values, or to show that it fails that of one value at alpha / m.
Of Holm's procedure over K claims, it is enough that the one that is decided k-th best is so at alpha / (K - k + 1), and all
before it at their own levels. So every probability is a lower bound. Clusters are tested each by itself.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

from numdev.report.claims.verdicts import ALPHA, Claim, Evidence, Question, Verdict, weighed_rows
from numdev.report.reading.frames import Results
from numdev.report.statistics import Interval, Share
from numdev.results.claim import Pilot
from numdev.results.record import student_quantile

POWER = 0.9
"""The probability of a decision with which replicates are called enough."""
MOST = 1000
"""Beyond so many replicates no number is named."""
LIKELY, CAUTIOUS = 0.5, 0.8
"""Confidence in the spread."""


class Chance(NamedTuple):
    """How likely a decision is with the planned replicates, and how many make it as likely as `POWER`."""

    power: float = 0.0
    needed: int = MOST + 1  # which stands for more, and for what is not known


@dataclass(frozen=True)
class Prospect:
    """What is to be expected of one claim: the verdict that the pilot points at, and how likely it is that it is decided."""

    claim: str  # its sentence
    pilot: str  # the figure of the pilot; empty where there is none
    verdict: Verdict = Verdict.UNDECIDED
    likely: Chance = Chance()
    cautious: Chance = Chance()
    is_seen: bool = False  # whether nothing is inferred, so that one replicate is enough


def pilot_spread(share: Share, confidence: float) -> float:
    """The upper limit of the standard deviation of replicates; infinite from one alone, 0 where all are equal."""
    from scipy.special import chdtri  # late, as all of scipy

    if not 0 < share.error < math.inf:
        return share.error
    factor = math.sqrt(share.freedom / float(chdtri(share.freedom, confidence)))
    return share.error * math.sqrt(share.freedom + 1) * factor


def reach(distance: float, spread: float, count: int, alpha: float) -> float:
    """The probability that `count` replicates whose mean lies `distance` beyond a bound show it at level alpha."""
    from scipy.special import nctdtr, stdtrit

    if math.isinf(distance) or math.isinf(spread):
        return float(math.isinf(distance))
    if spread == 0:
        return float(Share(0.0, 0.0, count - 1).p(distance) < alpha)
    noncentrality, quantile = distance * math.sqrt(count) / spread, float(stdtrit(count - 1, 1 - alpha / 2))
    missed = float(nctdtr(count - 1, noncentrality, quantile))
    return float(noncentrality > quantile) if math.isnan(missed) else 1 - missed  # NaN at some of more than 30


def _all(each: Sequence[float]) -> float:
    return max(0.0, 1 - math.fsum(1 - one for one in each))


def _of_question(question: Question, count: int, alpha: float, confidence: float) -> float:
    """The probability that a value is shown to lie on the side of each bound on which the pilot has it."""
    value, region = question.value, question.region
    bounds = [value.scaled(bound) for bound in (region.low, region.high)]
    inside = _is_inside(question)
    tests = [
        reach(abs(share.mean - bound), pilot_spread(share, confidence), count, alpha)
        for share in value.shares
        for bound in (bounds if inside else [bounds[0] if share.mean <= bounds[0] else bounds[1]])
    ]
    return _all(tests)


def _is_inside(question: Question) -> bool:
    return question.region.low < question.value.estimate < question.region.high


def decided(evidence: Evidence, count: int, alpha: float, confidence: float) -> float:
    """A lower bound of the probability that `count` replicates decide a claim, the way its pilot points, at level alpha."""
    own = [question for question in evidence.questions if not question.is_condition]
    if outside := [question for question in own if not _is_inside(question)]:
        return max(_of_question(question, count, alpha / len(own), confidence) for question in outside)
    return _all([_of_question(question, count, alpha, confidence) for question in evidence.questions])


def prospects(
    claims: Iterable[Claim], study: str, seeds: int, results: Results | None = None, stated: Pilot | None = None
) -> list[Prospect]:
    """What `seeds` replicates of a study are to be expected to decide of its claims in each scenario.

    The pilot is what `results` hold of the study; of a claim on which they say nothing, what its file has stated.
    """
    pilots = [(claim, one) for claim in claims for one in _pilots(claim, study, results, stated)]
    known = {place for place, (_, one) in enumerate(pilots) if one.questions}
    questions = len(known) + sum(claim.region is not None for place, (claim, _) in enumerate(pilots) if place not in known)

    @cache
    def powers(count: int, confidence: float) -> dict[int, float]:
        """By place; the claim that is decided k-th best needs alpha / (questions - k + 1) if all before it are decided."""
        first = {place: decided(pilots[place][1], count, ALPHA / questions, confidence) for place in known}
        lost, power = 0.0, dict[int, float]()
        for rank, place in enumerate(sorted(known, key=lambda place: -first[place])):
            lost += 1 - decided(pilots[place][1], count, ALPHA / (questions - rank), confidence)
            power[place] = max(first[place], 1 - lost)
        return power

    def of(place: int, claim: Claim, pilot: Evidence) -> Prospect:
        if place not in known:
            return Prospect(claim.text, pilot.figure, pilot.seen or Verdict.UNDECIDED, is_seen=pilot.seen is not None)
        verdict = Verdict.HOLDS if all(map(_is_inside, pilot.questions)) else Verdict.FAILS

        def power(count: int, confidence: float) -> float:
            return powers(count, confidence)[place] if count > 1 else 0.0

        likely, cautious = (
            Chance(power(seeds, limit), bisect_left(range(MOST + 1), POWER, key=partial(power, confidence=limit)))
            for limit in (LIKELY, CAUTIOUS)
        )
        return Prospect(claim.text, pilot.figure, verdict, likely, cautious)

    return [of(place, claim, pilot) for place, (claim, pilot) in enumerate(pilots)]


def _pilots(claim: Claim, study: str, results: Results | None, stated: Pilot | None) -> list[Evidence]:
    """The evidence of a pilot in each scenario; without questions where nothing with a spread is known."""
    rows = {} if results is None or study not in results.manifests else weighed_rows(claim, results, study)
    own = [claim.weigh(each) for each in rows.values()]
    if any(one.seen or _has_spread(one) for one in own):
        return [one if one.seen or _has_spread(one) else Evidence("", "") for one in own]
    known = stated.intervals(claim.name) if stated else []
    if not known or stated is None or claim.region is None:
        return [Evidence("", "")]
    values = [_interval(own, stated.seeds, logarithmic=claim.name in stated.ratios) for own in known]
    questions = tuple(Question(value, claim.region) for value in values)
    return [Evidence(" and ".join(value.text() for value in values), "", questions)]


def _has_spread(evidence: Evidence) -> bool:
    shares = [share for question in evidence.questions for share in question.value.shares]
    return bool(shares) and all(share.freedom > 0 for share in shares)


def _interval(own: tuple[float, float, float], seeds: int, *, logarithmic: bool) -> Interval:
    """An interval of a report, with the standard error that it had."""
    estimate, low, high = own
    ends = (math.log(low), math.log(high)) if logarithmic else (low, high)
    share = Share(sum(ends) / 2, (ends[1] - ends[0]) / 2 / student_quantile(0.95, seeds - 1), seeds - 1)
    return Interval(estimate, low, high, seeds, shares=(share,), logarithmic=logarithmic)
