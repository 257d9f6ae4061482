"""Verdicts, and every rule by which an interval becomes one.

A claim says that a value lies in a region: that an exponent is above 0.1, that a ratio is within 10 % of 1. It *holds* if the
whole interval of the value lies inside the region, *fails* if the whole interval lies outside it, and is *undecided* else. So one
verdict at most can apply, a wide interval decides nothing, and that two things are the same has to be shown as their being
different has: by two one-sided tests (Schuirmann 1987, J. Pharmacokinet. Biopharm. 15, 657) against a margin that is stated.

The p-value of a value is the least alpha at which the interval of confidence 1 - alpha decides it; of replicates that are all
equal, which have no interval, see `p_of_equal`. A claim may ask for several values: that each of five kernels lies in the region.
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

import pandas as pd

from numdev.errors import NumdevError
from numdev.report.reading.frames import is_broken
from numdev.report.reading.scenarios import FORMATS, compared, formats
from numdev.report.statistics.estimates import Interval, largest_share
from numdev.report.statistics.significance import holm

ALPHA = 0.05
TREND = 0.1
"""An exponent within this of 0 is no trend: y changes by less than 7 % when x doubles."""
MARGIN = 1.1
"""Ratios within this factor of 1 are alike, larger ones are an enlargement: FlexAttention's tests (PyTorch) accept a mean error
that is 1.1 times that of plain attention as no worse."""


class Verdict(Enum):
    """What the measurements say of a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"
    NOT_MEASURED = "not measured"  # nothing that the claim speaks of: it is neither true nor false


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
        p = max(share.beyond(bound) for share in value.shares for bound in bounds)
        return (1.0, p) if side else (p, 1.0)


GROWS, SHRINKS, FLAT = Region(low=TREND), Region(high=-TREND), Region(-TREND, TREND)  # of an exponent
LARGER, SMALLER, ALIKE = Region(low=MARGIN), Region(high=1 / MARGIN), Region(1 / MARGIN, MARGIN)  # of a ratio
NO_LARGER, NO_SMALLER = Region(high=MARGIN), Region(low=1 / MARGIN)  # alike, or beyond that
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
    """Whether a value lies in a region.

    Attributes:
        value: what was measured.
        region: where the claim holds.
        is_condition: whether it only makes the others worth asking: if not met, the claim is undecided and has not failed.
    """

    value: Interval
    region: Region
    is_condition: bool = False

    @property
    def p(self) -> tuple[float, float]:
        """See `Region.p`."""
        return self.region.p(self.value)


@dataclass(frozen=True)
class Finding:
    """The verdict on a claim in one scenario.

    Attributes:
        verdict: see `Verdict`.
        figure: the measured figure that decides, such as `9.1 [8.7, 9.5]`.
        sentence: what was found, with the other figures that belong to it.
        p: of the verdict, adjusted for the number of questions in its table; NaN where there is nothing to test.
        over: what the verdict generalises over, such as `over seeds of U[0, 1) (10 here)`.
        beside: the same judged by another metric than the source's.
    """

    verdict: Verdict
    figure: str
    sentence: str
    p: float = math.nan
    over: str = ""
    beside: Finding | None = None

    @property
    def told(self) -> str:
        """The verdict with its p-value."""
        return self.verdict.value if math.isnan(self.p) else f"{self.verdict.value} ({_p(self.p)})"


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


@dataclass(frozen=True)
class Evidence:
    """What the rows of one scenario say of a claim, before it is known how many others are judged beside it.

    Attributes:
        figure, sentence: as in `Finding`.
        questions: the claim holds if all of them do, and fails if one fails; without any it is undecided.
        beside: the same by RMSE, which sees every element; `sentence` is not told of it.
        says: what a verdict means in words that stand before the sentence, by verdict.
        is_measured: whether anything was measured that the claim speaks of.
        seen: the verdict where the claim is about the measured runs alone, so that nothing is inferred; then it has no questions.
    """

    figure: str
    sentence: str
    questions: tuple[Question, ...] = ()
    beside: Evidence | None = None
    says: Mapping[Verdict, str] = field(default_factory=dict)
    is_measured: bool = True
    seen: Verdict | None = None

    def each(self) -> Iterator[Evidence]:
        """What has a p-value of its own: this, and what is judged beside it."""
        yield self
        if self.beside is not None:
            yield from self.beside.each()

    def p(self) -> tuple[float, float]:
        """The p-values of the claim's holding and of its failing, as the module derives them; NaN where nothing can be tested."""
        each = [(question.p, question.is_condition) for question in self.questions]
        known = [(p, is_condition) for p, is_condition in each if not math.isnan(p[0])]
        if not known:
            return math.nan, math.nan
        outside = [p[1] for p, is_condition in known if not is_condition]
        inside = max(p[0] for p, _ in known) if len(known) == len(each) else 1.0
        return inside, min(1.0, len(outside) * min(outside, default=1.0))

    def judged(self, adjusted: Iterator[float], over: str = "") -> Finding:
        """With the adjusted p-value of `each`."""
        p, (inside, outside) = next(adjusted), self.p()
        verdict = Verdict.UNDECIDED
        if p < ALPHA:
            verdict = Verdict.HOLDS if inside < outside else Verdict.FAILS
        verdict = self.seen or verdict if self.is_measured else Verdict.NOT_MEASURED
        beside = None if self.beside is None else self.beside.judged(adjusted)
        told = "" if beside is None else f" By RMSE: {beside.verdict.value}, {beside.figure}."
        first = f"{self.says[verdict]} " if verdict in self.says else ""
        over = "over no runs but these" if self.seen else over
        return Finding(verdict, self.figure, f"{first}{self.sentence}{self._equal()}{told}", p, over, beside)

    def _equal(self) -> str:
        """A sentence on replicates that are all equal, or nothing."""
        counts = [share.freedom + 1 for question in self.questions for share in question.value.shares if share.error == 0]
        if not counts:
            return ""
        return f" Where all {min(counts)} replicates are equal, at most {largest_share(min(counts)):.0%} of others differ (95 %)."


def equal(value: Interval) -> Verdict:
    """Whether a ratio is 1 in every measured replicate: seen, not inferred."""
    is_one = all(share.mean == 0 and share.error in (0, math.inf) for share in value.shares)
    return Verdict.HOLDS if value.shares and is_one and not value.excluded else Verdict.FAILS


def judged(evidence: Sequence[Evidence], over: Sequence[str] = ()) -> list[Finding]:
    """The findings of one table, with all its questions adjusted together. What cannot be tested is no question."""
    raw = [min(part.p()) for one in evidence for part in one.each()]
    tested = iter(holm([p for p in raw if not math.isnan(p)]))
    adjusted = iter([math.nan if math.isnan(p) else next(tested) for p in raw])
    return [one.judged(adjusted, words) for one, words in zip(evidence, over or [""] * len(evidence), strict=True)]


def count(evidence: Iterable[Evidence]) -> int:
    """The number of questions of a table that can be tested."""
    return sum(not math.isnan(min(part.p())) for one in evidence for part in one.each())


class Undecidable(NumdevError):
    """The rows cannot answer the question; the message says what they lack."""


class NotMeasured(Undecidable):
    """Nothing was measured that the claim speaks of; the message says what is missing."""


def select(rows: pd.DataFrame, subject: str = "variant", reference: str = "baseline", **where: object) -> pd.DataFrame:
    """The replicates of the primary output for one comparison; `where` are values of columns.

    Raises:
        Undecidable: if there are none, or if some hold NaN or Inf, which no mean may hide.
    """
    found = compared(rows, subject, reference)
    for column, value in where.items():
        found = found[found[column] == value] if column in found else found.iloc[:0]
    if found.empty:
        what = ", ".join(f"{column} {value}" for column, value in where.items()) or subject
        raise Undecidable(f"nothing was measured for {what}")
    broken = int(is_broken(found).sum())
    if broken:
        raise Undecidable(f"{broken} of {len(found)} replicates hold NaN or infinite values")
    return found


def left_out(*intervals: Interval) -> str:
    """A sentence about values without a logarithm, or nothing."""
    count = sum(interval.excluded for interval in intervals)
    return f" Left out because a deviation is zero: {count}." if count else ""


def by_format(rows: pd.DataFrame, judge: Callable[[pd.DataFrame], Evidence], main: str = "bf16") -> Evidence:
    """Judges at BF16, or at the narrowest format of the rows, and adds the figures of the other formats to the sentence."""
    names = formats(rows)
    if not names:
        raise Undecidable("nothing was measured")
    main = main if main in names else names[0]
    found = judge(rows[rows["format"] == main])
    others = [f"{name} {_brief(rows[rows['format'] == name], judge)}" for name in names if name != main]
    rest = f" Other formats: {'; '.join(others)}." if others else ""
    return replace(found, sentence=f"At {main}: {found.sentence}{rest}")


def _brief(rows: pd.DataFrame, judge: Callable[[pd.DataFrame], Evidence]) -> str:
    try:
        return judge(rows).figure
    except Undecidable as reason:
        return f"unknown ({reason})"


def known_formats(rows: pd.DataFrame, wanted: Iterable[str] = ("bf16", "fp16", "fp32", "fp64")) -> list[str]:
    """The formats wanted, from the fewest mantissa bits to the most.

    Raises:
        Undecidable: naming those that were not measured.
    """
    lacking = [name for name in wanted if name not in formats(rows)]
    if lacking:
        raise Undecidable(f"nothing was measured at {', '.join(lacking)}")
    return sorted(wanted, key=FORMATS.index)
