"""A verdict and the figure behind it, and how an interval becomes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import pandas as pd

from numdev.errors import NumdevError
from numdev.report.frames import is_broken
from numdev.report.settings import FORMATS, formats
from numdev.report.statistics import Interval

TREND = 0.1  # an exponent below this is no growth: y rises by less than 7 % when x doubles
MARGIN = 1.05  # a ratio below this is no enlargement
ALIKE = 2.0  # an interval of a ratio that is wider than this factor cannot say that two things are alike


class Verdict(Enum):
    """What the measurements say of a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Finding:
    """The verdict on a claim in one setting.

    Attributes:
        verdict: see `Verdict`.
        figure: the measured figure that decides, such as `9.1 [8.7, 9.5]`.
        sentence: what was found, with the other figures that belong to it.
    """

    verdict: Verdict
    figure: str
    sentence: str


class Undecidable(NumdevError):
    """The rows at hold cannot answer the question; the message says what they lack."""


def select(rows: pd.DataFrame, subject: str = "variant", reference: str = "baseline", **where: object) -> pd.DataFrame:
    """The replicates of `out` for one comparison; `where` are values of columns.

    Raises:
        Undecidable: if there are none, or if some hold NaN or Inf, which no mean may hide.
    """
    found = rows[(rows["subject"] == subject) & (rows["reference"] == reference) & (rows["output"] == "out")]
    for column, value in where.items():
        found = found[found[column] == value] if column in found else found.iloc[:0]
    if found.empty:
        what = ", ".join(f"{column} {value}" for column, value in where.items()) or subject
        raise Undecidable(f"nothing was measured for {what}")
    broken = int(is_broken(found).sum())
    if broken:
        raise Undecidable(f"{broken} of {len(found)} replicates hold NaN or infinite values")
    return found


def combined(verdicts: Iterable[Verdict]) -> Verdict:
    """Holds if all hold, fails if one fails."""
    found = set(verdicts)
    if Verdict.FAILS in found:
        return Verdict.FAILS
    return Verdict.HOLDS if found == {Verdict.HOLDS} else Verdict.UNDECIDED


def decided(holds: bool, fails: bool) -> Verdict:
    if holds:
        return Verdict.HOLDS
    return Verdict.FAILS if fails else Verdict.UNDECIDED


def grows(exponent: Interval) -> Verdict:
    """Whether an exponent is above 0: its whole interval is. It is not if the interval ends below `TREND`."""
    return decided(exponent.low > 0, exponent.high < TREND)


def shrinks(exponent: Interval) -> Verdict:
    return decided(exponent.high < 0, exponent.low > -TREND)


def exceeds(times: Interval) -> Verdict:
    """Whether a ratio is above 1: its whole interval is. It is not if the interval ends below `MARGIN`."""
    return decided(times.low > 1, times.high < MARGIN)


def between(value: Interval, low: float, high: float) -> Verdict:
    """Whether a value lies between two bounds: its whole interval does. An interval across a bound decides nothing."""
    return decided(value.within(low, high), value.outside(low, high))


def alike(times: Interval) -> Verdict:
    """Whether a ratio cannot be told from 1, by an interval narrow enough to have told a factor of `ALIKE`."""
    return decided(times.contains(1.0) and times.within(1 / ALIKE, ALIKE), times.outside(1.0, 1.0))


def rules() -> list[tuple[str, str, str]]:
    """How an interval becomes a verdict: a question, when the claim holds, and when it fails."""
    return [
        ("does it grow? (exponent)", "lies above 0", f"ends below {TREND:g}"),
        ("does it shrink? (exponent)", "lies below 0", f"begins above -{TREND:g}"),
        ("is the ratio above 1?", "lies above 1", f"ends below {MARGIN:g}"),
        ("is it about a value? (10 in Figure 4)", "lies within half and twice the value", "lies outside them"),
        ("can two things not be told apart?", f"contains 1 and lies within 1/{ALIKE:g} and {ALIKE:g}", "excludes 1"),
        ("does one lie above the other?", "lies above the other's", "lies below the other's"),
    ]


def left_out(*intervals: Interval) -> str:
    """A sentence about values without a logarithm, or nothing."""
    count = sum(interval.excluded for interval in intervals)
    return f" Left out because a deviation is zero: {count}." if count else ""


def by_format(rows: pd.DataFrame, judge: Callable[[pd.DataFrame], Finding], main: str = "bf16") -> Finding:
    """Judge at BF16, or at the narrowest format there is, and tell what the other formats say."""
    names = formats(rows)
    if not names:
        raise Undecidable("nothing was measured")
    main = main if main in names else names[0]
    finding = judge(rows[rows["format"] == main])
    others = []
    for name in names:
        if name != main:
            others.append(f"{name} {_brief(rows[rows['format'] == name], judge)}")
    rest = f" Other formats: {'; '.join(others)}." if others else ""
    return Finding(finding.verdict, finding.figure, f"At {main}: {finding.sentence}{rest}")


def _brief(rows: pd.DataFrame, judge: Callable[[pd.DataFrame], Finding]) -> str:
    try:
        finding = judge(rows)
    except Undecidable as reason:
        return f"undecided ({reason})"
    return f"{finding.verdict.value}, {finding.figure}"


def known_formats(rows: pd.DataFrame, wanted: Iterable[str] = ("bf16", "fp16", "fp32", "fp64")) -> list[str]:
    """The formats wanted, from the fewest mantissa bits to the most.

    Raises:
        Undecidable: naming those that were not measured.
    """
    lacking = [name for name in wanted if name not in formats(rows)]
    if lacking:
        raise Undecidable(f"nothing was measured at {', '.join(lacking)}")
    return sorted(wanted, key=FORMATS.index)
