"""The tests behind the claims that FlashAttention-3 makes, and that set it against the paper."""

from __future__ import annotations

from itertools import combinations

import pandas as pd

from numdev.report.evidence import DEVIATION, over_baseline
from numdev.report.finding import (
    Finding,
    Undecidable,
    Verdict,
    between,
    by_format,
    combined,
    decided,
    exceeds,
    left_out,
    select,
)
from numdev.report.published import FA3_RMSE
from numdev.report.statistics import Interval, ratio

FACTOR = 1.5  # between a measured RMSE and the published one, whose N and d are not given


def fa3_table3(rows: pd.DataFrame) -> Finding:
    """Every RMSE within a factor 1.5 of the published one, and every two means in the published order.

    The published values have no intervals, and two of them are 2 % apart; so means are held against them, and the sentence
    says how many pairs the replicates can also tell apart.
    """
    seeds = {name: rmse(rows, name) for name in FA3_RMSE}
    ratios = {name: ratio(seeds[name], [FA3_RMSE[name]] * len(seeds[name])) for name in FA3_RMSE}
    close = {name: between(times, 1 / FACTOR, FACTOR) for name, times in ratios.items()}
    pairs = [
        ratio(seeds[first], seeds[second])
        for first, second in combinations(sorted(FA3_RMSE, key=lambda name: -FA3_RMSE[name]), 2)
        if FA3_RMSE[first] > FA3_RMSE[second]
    ]
    order = [decided(pair.estimate > 1, pair.estimate < 1) for pair in pairs]
    apart = sum(pair.low > 1 for pair in pairs)
    far = [name for name, verdict in close.items() if verdict is not Verdict.HOLDS]
    told = ", ".join(f"{name} {ratios[name].text()}" for name in FA3_RMSE)
    ordered = f"{_counted(order)} pairs are in the published order, {apart} of them by their intervals too."
    sentence = f"Measured over published: {told}. {ordered}"
    figure = f"{len(close) - len(far)} of {len(close)} within {FACTOR:g}, {_counted(order)} pairs in order"
    return Finding(combined([*close.values(), *order]), figure, sentence)


def rmse(rows: pd.DataFrame, method: str) -> pd.Series[float]:
    """A method's RMSE against golden by seed."""
    named = rows.assign(method=methods(rows))
    return select(named, reference="golden", method=method).groupby("seed")["rmse"].mean()


def methods(rows: pd.DataFrame) -> pd.Series[str]:
    """The method of each row: the label of that name, or else the setting."""
    return rows["label.method"].fillna(rows["setting"]) if "label.method" in rows else rows["setting"]


def _counted(order: list[Verdict]) -> str:
    return f"{order.count(Verdict.HOLDS)} of {len(order)}"


def sign(rows: pd.DataFrame) -> Finding:
    """Worse than the baseline with every step in the format, better with FP32 inside: ratios above and below 1."""

    def judge(rows: pd.DataFrame) -> Finding:
        uniform, kernel = (of_policy(rows, policy, DEVIATION) for policy in ("uniform", "kernel"))
        by_rmse = of_policy(rows, "kernel", "rmse")
        verdict = combined([exceeds(uniform), exceeds(inverse(kernel))])
        sentence = (
            f"deviation from golden over the baseline's is {uniform.text()} with every step in the format and "
            f"{kernel.text()} with FP32 inside ({by_rmse.text()} by RMSE).{left_out(uniform, kernel)}"
        )
        return Finding(verdict, f"uniform {uniform.text()}, kernel {kernel.text()}", sentence)

    return by_format(rows, judge)


def of_policy(rows: pd.DataFrame, policy: str, metric: str) -> Interval:
    """The variant's deviation over the baseline's under one precision policy."""
    found = rows[rows["policy"] == policy]
    if found.empty:
        raise Undecidable(f"nothing was measured under the policy {policy}")
    return over_baseline(found, metric)


def inverse(times: Interval) -> Interval:
    """The ratio the other way round."""
    low, high = 1 / times.high, 1 / times.low if times.low > 0 else float("inf")
    return Interval(1 / times.estimate, low, high, times.count, times.excluded)
