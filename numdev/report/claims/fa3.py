"""The tests behind the claims that FlashAttention-3 makes, and that set it against the paper."""

from __future__ import annotations

from itertools import combinations

import pandas as pd

from numdev.report.claims.evidence import DEVIATION, EVERY, over, over_baseline, per_replicate
from numdev.report.claims.finding import (
    ABOVE,
    LARGER,
    SMALLER,
    Evidence,
    Question,
    Undecidable,
    Verdict,
    about,
    by_format,
    left_out,
    select,
)
from numdev.report.claims.published import FA3_RMSE
from numdev.report.reading.scenarios import STANDS_FOR
from numdev.report.statistics.estimates import Interval, ratio

FACTOR = 1.5  # between a measured RMSE and the published one, whose N and d are not given


def fa3_table3(rows: pd.DataFrame) -> Evidence:
    """Every RMSE within a factor 1.5 of the published one, and every two rows in the published order, by their intervals.

    The published values have no intervals, and two of them are 2 % apart: an order that the replicates cannot tell is undecided.
    """
    found = {name: rmse(rows, name) for name in FA3_RMSE}
    ratios = {name: _over_published(found[name], FA3_RMSE[name]) for name in FA3_RMSE}
    pairs = [
        over(found[first], found[second])
        for first, second in combinations(sorted(FA3_RMSE, key=lambda name: -FA3_RMSE[name]), 2)
        if FA3_RMSE[first] > FA3_RMSE[second]
    ]
    region = about(1.0, FACTOR)
    close = sum(region.verdict(times) is Verdict.HOLDS for times in ratios.values())
    ways = [ABOVE.verdict(pair) for pair in pairs]
    counts = [ways.count(way) for way in (Verdict.HOLDS, Verdict.FAILS, Verdict.UNDECIDED)]
    told = ", ".join(f"{name} {ratios[name].text()}" for name in FA3_RMSE)
    ordered = f"Of {len(pairs)} pairs the interval of {counts[0]} is in the published order, of {counts[1]} in the other, "
    ordered += f"and of {counts[2]} in neither."
    figure = f"{close} of {len(ratios)} within {FACTOR:g}, {counts[0]} of {len(pairs)} pairs in order"
    questions = [*(Question(times, region) for times in ratios.values()), *(Question(pair, ABOVE) for pair in pairs)]
    return Evidence(figure, f"Measured over published: {told}. {ordered}", tuple(questions))


def _over_published(found: pd.DataFrame, published: float) -> Interval:
    return ratio(found["value"], [published] * len(found), found.index, found["cluster"])


def rmse(rows: pd.DataFrame, method: str) -> pd.DataFrame:
    """A method's RMSE against golden by replicate; see `per_replicate`."""
    """The RMSE from golden of each replicate of the scenario that stands for one row of the published table."""
    return per_replicate(select(rows, reference="golden", **{STANDS_FOR: method}), EVERY)


def sign(rows: pd.DataFrame) -> Evidence:
    """Worse than the baseline with every step in the format, better with FP32 inside."""

    def judge(rows: pd.DataFrame) -> Evidence:
        own, every = _of_both(rows, DEVIATION), _of_both(rows, EVERY)
        sentence = (
            f"deviation from golden over the baseline's is {own[0].text()} with every step in the format and "
            f"{own[1].text()} with FP32 inside.{left_out(*own)}"
        )
        return Evidence(_figure(own), sentence, _worse_and_better(own), Evidence(_figure(every), "", _worse_and_better(every)))

    return by_format(rows, judge)


def _of_both(rows: pd.DataFrame, metric: str) -> tuple[Interval, Interval]:
    return of_policy(rows, "uniform", metric), of_policy(rows, "kernel", metric)


def _figure(both: tuple[Interval, Interval]) -> str:
    return f"every step {both[0].text()}, FP32 inside {both[1].text()}"


def _worse_and_better(both: tuple[Interval, Interval]) -> tuple[Question, ...]:
    return Question(both[0], LARGER), Question(both[1], SMALLER)


def of_policy(rows: pd.DataFrame, policy: str, metric: str) -> Interval:
    """The variant's deviation over the baseline's under one precision policy."""
    found = rows[rows["policy"] == policy]
    if found.empty:
        raise Undecidable(f"nothing was measured under the policy {policy}")
    return over_baseline(found, metric)
