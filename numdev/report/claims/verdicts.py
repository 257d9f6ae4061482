"""Claims, and every rule by which intervals become verdicts on them.

A claim says that a value lies in a region: that an exponent is above 0.1, that a ratio is within 10 % of 1. It *holds* if the
whole interval of the value lies inside the region, *fails* if the whole interval lies outside it, and is *undecided* else. So one
verdict at most can apply, a wide interval decides nothing, and that two things are the same has to be shown as their being
different has: by two one-sided tests (Schuirmann 1987, J. Pharmacokinet. Biopharm. 15, 657) against a margin that is stated.

The p-value of a value is the least alpha at which the interval of confidence 1 - alpha decides it; of replicates that are all
equal, which have no interval, see `Share.p`. A claim may ask for several values: that each of five kernels lies in the region.
It holds if each value is shown to lie inside, so its p is the largest of theirs, without an adjustment among them
(intersection-union: Berger 1982, Technometrics 24, 295). It fails if one of its m values is shown to lie outside, which is a
choice among m, so its p is m times the least (Bonferroni).

A table holds many verdicts. A claim in one scenario, by one metric, is one question of the table, and what decides it is its p
adjusted for the number of questions (Holm 1979): the probability of any wrong decision in the whole table is below 5 %.

Whether runs that were measured have equal bits is no question about others: it is seen, not inferred, and has no p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import product
from typing import Any

import pandas as pd

from numdev.errors import NumdevError
from numdev.report.reading.frames import Results, by_role, is_sources, of_scenario, with_overrides
from numdev.report.reading.wording import PLAIN, Words, generality
from numdev.report.statistics import Interval, holm, largest_share
from numdev.results.store import Role, Scenario

ALPHA = 0.05
TREND = 0.1
"""An exponent within this of 0 is no trend: y changes by less than 7 % when x doubles."""
MARGIN = 1.1
"""Ratios within this factor of 1 are alike, larger ones are an enlargement: FlexAttention's tests (PyTorch) accept a mean error
that is 1.1 times that of plain attention as no worse."""
_PARTIAL = ", partial"
OURS = "Our question"
"""How the source of a claim begins that no paper makes."""


class Verdict(Enum):
    """Whether measurements bear a claim out."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"
    NOT_MEASURED = "not measured"  # nothing that the claim speaks of: it is neither true nor false


class Undecidable(NumdevError):
    """The rows cannot answer the question; the message says what they lack."""


class NotMeasured(Undecidable):
    """Nothing was measured that the claim speaks of; the message says what is missing."""


@dataclass(frozen=True)
class Region:
    """The values at which a claim holds: those between two bounds, without the bounds themselves."""

    low: float = -math.inf
    high: float = math.inf

    def verdict(self, value: Interval) -> Verdict:
        """Of an interval: inside the region, outside it, or neither."""
        if self.low < value.low and value.high < self.high:
            return Verdict.HOLDS
        if value.high <= self.low or value.low >= self.high:
            return Verdict.FAILS
        return Verdict.UNDECIDED

    def p(self, value: Interval) -> tuple[float, float]:
        """The p-values of its lying inside and of its lying outside: the least alpha at which its interval decides that.

        A mean inside the region is tested against both bounds, one outside against the bound that it lies beyond; the p-value of
        the other is 1. Clusters have to agree, each by itself. NaN where there is no value.
        """
        low, high = value.scaled(self.low), value.scaled(self.high)
        if math.isnan(value.estimate) or not value.shares:
            return math.nan, math.nan
        sides = {-1 if share.mean <= low else 1 if share.mean >= high else 0 for share in value.shares}
        if len(sides) > 1:
            return 1.0, 1.0
        side = sides.pop()
        bounds = {-1: (low,), 1: (high,), 0: (low, high)}[side]
        p = max(share.p(abs(share.mean - bound)) for share in value.shares for bound in bounds)
        return (1.0, p) if side else (p, 1.0)


GROWS = Region(low=TREND)  # of an exponent
LARGER, ALIKE = Region(low=MARGIN), Region(1 / MARGIN, MARGIN)  # of a ratio
ABOVE = Region(low=1.0)  # of the ratio of two that are put in order: an order needs no margin


def about(value: float, factor: float) -> Region:
    """Within a factor of a value."""
    return Region(value / factor, value * factor)


def rules() -> list[tuple[str, str, str]]:
    """How an interval becomes a verdict: a question, when the claim holds, and when it fails."""
    least, most = f"{1 / MARGIN:.3f}", f"{MARGIN:g}"
    return [
        ("does it grow? (exponent)", f"lies above {TREND:g}", f"lies below {TREND:g}"),
        ("does it shrink? (exponent)", f"lies below -{TREND:g}", f"lies above -{TREND:g}"),
        ("does it stay? (exponent)", f"lies between -{TREND:g} and {TREND:g}", "lies outside them"),
        ("is it larger? (ratio)", f"lies above {most}", f"lies below {most}"),
        ("is it smaller? (ratio)", f"lies below {least}", f"lies above {least}"),
        ("are they alike? (ratio)", f"lies between {least} and {most}", "lies outside them"),
        ("is it about a value? (10 in Figure 4)", "lies between half and twice the value", "lies outside them"),
        ("are they in this order? (ratio)", "lies above 1", "lies below 1"),
    ]


@dataclass(frozen=True)
class Question:
    """Whether a value lies in the region where the claim holds; a condition that is not met leaves the claim undecided."""

    value: Interval
    region: Region
    is_condition: bool = False

    @property
    def p(self) -> tuple[float, float]:
        """See `Region.p`."""
        return self.region.p(self.value)


@dataclass(frozen=True)
class Finding:
    """The verdict on a claim in one scenario, with the figure that decides, such as `9.1 [8.7, 9.5]`, and a sentence."""

    verdict: Verdict
    figure: str
    sentence: str
    p: float = math.nan  # of the verdict, adjusted for the number of questions in its table; NaN where there is nothing to test
    over: str = ""  # what the verdict generalises over, such as `over seeds of U[0, 1) (10 here)`
    beside: Finding | None = None  # the verdict by another metric than the source's
    is_partial: bool = False  # whether points of its scenario are missing: their rows may turn it

    @property
    def word(self) -> str:
        """The verdict, marked where it is partial."""
        return self.verdict.value + _PARTIAL * self.is_partial

    @property
    def verdict_text(self) -> str:
        """The verdict with its p-value."""
        if math.isnan(self.p):
            return self.word
        return f"{self.word} ({'p < 0.001' if self.p < 0.001 else f'p = {self.p:.2g}'})"

    def without(self, missing: str) -> Finding:
        """The finding where points of its scenario are `missing`, which this says; itself where none is."""
        return replace(self, sentence=f"Partial: {missing}. {self.sentence}", is_partial=True) if missing else self


@dataclass(frozen=True)
class Evidence:
    """The evidence of one scenario's rows for a claim, before it is known how many others are judged beside it."""

    figure: str  # as in `Finding`, and so is the sentence
    sentence: str
    questions: tuple[Question, ...] = ()  # the claim holds if all of them do, and fails if one fails; without any it is undecided
    beside: Evidence | None = None  # the evidence by RMSE, which sees every element; it has no sentence
    says: Mapping[Verdict, str] = field(default_factory=dict)  # words that stand before the sentence, by verdict
    seen: Verdict | None = (
        None  # where the claim is about the measured runs alone, so that nothing is inferred; no questions then
    )

    def each(self) -> Iterator[Evidence]:
        """All that has a p-value of its own: this, and what is judged beside it."""
        yield self
        if self.beside is not None:
            yield from self.beside.each()

    def p(self) -> tuple[float, float]:
        """The p-values of the claim's holding and of its failing, as the module derives them; NaN where nothing can be tested."""
        known = [question for question in self.questions if not math.isnan(question.p[0])]
        if not known:
            return math.nan, math.nan
        outside = [question.p[1] for question in known if not question.is_condition]
        inside = max(question.p[0] for question in known) if len(known) == len(self.questions) else 1.0
        return inside, min(1.0, len(outside) * min(outside, default=1.0))

    def judged(self, adjusted: Iterator[float], over: str = "") -> Finding:
        """The finding, with the adjusted p-value of `each`."""
        p, (inside, outside) = next(adjusted), self.p()
        decided = Verdict.HOLDS if inside < outside else Verdict.FAILS
        verdict = self.seen or (decided if p < ALPHA else Verdict.UNDECIDED)
        beside = None if self.beside is None else self.beside.judged(adjusted)
        sentence = f"{self.says[verdict]} {self.sentence}" if verdict in self.says else self.sentence
        if equal := [share.freedom + 1 for question in self.questions for share in question.value.shares if share.error == 0]:
            share = f"at most {largest_share(min(equal)):.0%} of others differ (95 %)."
            sentence += f" Where all {min(equal)} replicates are equal, {share}"
        if beside is not None:
            sentence += f" By RMSE: {beside.verdict.value}, {beside.figure}."
        is_of_these = self.seen in (Verdict.HOLDS, Verdict.FAILS)
        return Finding(verdict, self.figure, sentence, p, "over no runs but these" if is_of_these else over, beside)


def judged(evidence: Sequence[Evidence], over: Sequence[str] = ()) -> list[Finding]:
    """The findings of one table, with all its questions adjusted together. What cannot be tested is no question."""
    raw = [min(part.p()) for one in evidence for part in one.each()]
    tested = iter(holm([p for p in raw if not math.isnan(p)]))
    adjusted = iter([math.nan if math.isnan(p) else next(tested) for p in raw])
    return [one.judged(adjusted, words) for one, words in zip(evidence, over or [""] * len(evidence), strict=True)]


def count(evidence: Iterable[Evidence]) -> int:
    """The number of questions of a table that can be tested."""
    return sum(not math.isnan(min(part.p())) for one in evidence for part in one.each())


@dataclass(frozen=True)
class Claim:
    """One sentence that measurements can bear out or not; see `numdev.results.claim.ClaimStatement`."""

    name: str
    figure: str
    text: str
    source: str
    test: Callable[[pd.DataFrame], Evidence]  # weighs it on the rows of one scenario, or of all where `across`
    across: bool = False
    words: Words = PLAIN  # for the operation of which it speaks
    table: str = ""
    region: Region | None = None  # where its values lie if it holds, as it states; None of one with parts

    @property
    def is_ours(self) -> bool:
        """Whether no paper makes it, so that there is nothing to reproduce."""
        return self.source.startswith(OURS)

    def weigh(self, rows: pd.DataFrame) -> Evidence:
        """Weighs the rows of one scenario. If they cannot answer, the evidence has no question and gives the reason."""
        try:
            return self.test(rows)
        except Undecidable as reason:
            sentence = f"{str(reason)[:1].upper()}{str(reason)[1:]}."
            if isinstance(reason, NotMeasured):
                return Evidence("not measured", sentence, seen=Verdict.NOT_MEASURED)
            return Evidence("unknown", sentence)

    def find(self, rows: pd.DataFrame) -> Finding:
        """The finding on the rows of one scenario alone."""
        return judged([self.weigh(rows)], [generality(rows, self.words)])[0]


@dataclass(frozen=True)
class ClaimResult:
    """A claim judged in every scenario of one study, the source's own first."""

    claim: Claim
    study: str
    source: str  # of the claim, and what the command line changed of the study
    findings: dict[Scenario, Finding]
    questions: int = 0  # those of its table

    @property
    def main(self) -> Scenario:
        """The scenario that comes first: the source's, where the study has it."""
        return next(iter(self.findings))

    @property
    def chief(self) -> list[Scenario]:
        """The scenarios that stand for the source: as it states them, or as we assume; every one, where none does."""
        return [scenario for scenario in self.findings if is_sources(scenario)] or list(self.findings)

    @property
    def word(self) -> str:
        """The word on the claim by the chief scenarios: reproduced, partly or not reproduced, undecided or not measured.

        Where it is ours, or no scenario stands for the source, there is nothing to reproduce: it is borne out or not. Scenarios
        in which nothing was measured do not count.
        """
        verdicts = {self.findings[scenario].verdict for scenario in self.chief} - {Verdict.NOT_MEASURED}
        partial = _PARTIAL * any(self.findings[scenario].is_partial for scenario in self.chief)
        if verdicts <= {Verdict.UNDECIDED}:
            return (Verdict.UNDECIDED if verdicts else Verdict.NOT_MEASURED).value + partial
        word = "borne out" if self.claim.is_ours or not is_sources(self.main) else "reproduced"
        if Verdict.HOLDS in verdicts:
            return (word if len(verdicts) == 1 else f"partly {word}") + partial
        return f"not {word}{partial}"

    @property
    def everywhere(self) -> bool:
        """Whether every scenario says the same."""
        return len({finding.verdict for finding in self.findings.values()}) == 1

    @property
    def overall(self) -> str:
        """The word, and where scenarios differ, the verdict and figure of each."""
        own = {verdict: (f"{one.title} ({self.findings[one].figure})" for one in each) for verdict, each in self._rest().items()}
        rest = [f"{verdict.value.capitalize()} with {'; '.join(each)}" for verdict, each in own.items()]
        return ". ".join([self._qualified, *rest])

    @property
    def brief(self) -> str:
        """The word, and where scenarios differ, the number of the others with each verdict; of all, where chief ones differ."""
        counts = {f"{verdict.value} in {len(scenarios)}": len(scenarios) for verdict, scenarios in self._rest().items()}
        of = "all" if sum(counts.values()) == len(self.findings) else "other"
        return self._qualified + (f"; {of} scenarios: {', '.join(counts)}" if counts else "")

    @property
    def _qualified(self) -> str:
        """The word, with the circumstances that it is about, if the source does not state them."""
        roles = {one.role for one in self.chief if self.findings[one].verdict is not Verdict.NOT_MEASURED}
        return self.word + (" under our assumption about the source's circumstances" if Role.ASSUMED in roles else "")

    def _rest(self) -> dict[Verdict, list[Scenario]]:
        """The scenarios that `word` does not cover, by verdict; none where all agree."""
        agree = len({self.findings[own].verdict for own in self.chief}) == 1
        others = [] if self.everywhere else [one for one in self.findings if not agree or one not in self.chief]
        by_verdict = {verdict: [one for one in others if self.findings[one].verdict is verdict] for verdict in Verdict}
        return {verdict: scenarios for verdict, scenarios in by_verdict.items() if scenarios}


def judge(claims: Mapping[str, Claim], results: Results) -> list[ClaimResult]:
    """Every claim that a study serves, in the order of the table, once per scenario of the study's manifest.

    All of them are one table: p-values are adjusted for the number of questions in it.
    """
    places: dict[tuple[str, str], list[Scenario]] = {}
    weighed, over = list[Evidence](), list[str]()
    for claim, name in product(claims.values(), results.manifests):
        if own := weighed_rows(claim, results, name):
            places[claim.name, name] = list(own)
            weighed += map(claim.weigh, own.values())
            over += [generality(each, claim.words) for each in own.values()]
    findings, questions = iter(judged(weighed, over)), count(weighed)
    return [
        ClaimResult(
            claims[name],
            study,
            with_overrides(claims[name].source, results.manifests[study]),
            {own: next(findings).without(_missing(results, study, own, claims[name].across)) for own in scenarios},
            questions,
        )
        for (name, study), scenarios in places.items()
    ]


def weighed_rows(claim: Claim, results: Results, study: str) -> dict[Scenario, pd.DataFrame]:
    """The rows on which a claim is weighed in each scenario of a study; none where the study does not list it."""
    manifest = results.manifests[study]
    if claim.name not in manifest["claims"]:
        return {}
    rows, scenarios = results.study(study, claim.table), by_role(results.scenarios(study).values())
    if claim.across:  # all scenarios as one, with the most cautious of their roles
        role = max((one.role for one in scenarios), key=list(Role).index, default=Role.BEYOND)
        return {Scenario(study, manifest["title"], role): rows}
    return {scenario: of_scenario(rows, scenario) for scenario in scenarios}


def _missing(results: Results, study: str, scenario: Scenario, across: bool) -> str:
    """What one scenario of a study lacks, or any where all are judged as one; nothing where it is complete."""
    return "; ".join(text for (of, name), text in results.missing.items() if of == study and (across or name == scenario.name))


def note(claims: Sequence[ClaimResult]) -> str:
    """How to read the intervals and verdicts of some claims."""
    questions = list(dict.fromkeys(result.questions for result in claims)) or [0]
    counts = " and ".join(map(str, questions))
    several = f"all questions of their kind of measurement, {counts}"
    return (
        "Intervals are 95 % confidence intervals of one figure each. Verdicts are decided by p-values, below 0.05, that are "
        f"adjusted for {f'all {counts} questions of this table' if len(questions) == 1 else several} (Holm), so an interval "
        "alone may look more certain than its verdict. A claim in one scenario by one metric is one question. "
        "What the source of a claim leaves open is our assumption, and is marked as that."
    )


def unknown(claims: Mapping[str, Claim], manifests: Mapping[str, dict[str, Any]]) -> list[str]:
    """Notes on claims that studies list and that are not among these."""
    return [
        f"{study}: there is no claim {name}; there are {', '.join(claims)}"
        for study, manifest in manifests.items()
        for name in manifest["claims"]
        if name not in claims
    ]
