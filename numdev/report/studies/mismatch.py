"""Claims on log-probabilities of a trainer and a sampler: means of a figure, and its growth over the length of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from numdev.report.claims.evidence import mean_of, per_replicate
from numdev.report.claims.verdicts import Evidence, NotMeasured, Question, Region
from numdev.report.statistics import slope


def _of(rows: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
    """The rows with these values of columns."""
    for name, value in where.items():
        rows = rows[rows[name] == value] if name in rows else rows.iloc[:0]
    if rows.empty:
        raise NotMeasured(f"nothing was measured with {', '.join(map(str, where.values()))}")
    return rows


def weigh_mean(rows: pd.DataFrame, region: Region, metric: str, where: Mapping[str, Any]) -> Evidence:
    """The mean of a figure over replicates lies in the region."""
    value = mean_of(per_replicate(_of(rows, where), metric))
    return Evidence(value.text(), f"It is {value.text()}.", (Question(value, region),))


def weigh_growth(rows: pd.DataFrame, region: Region, metric: str, where: Mapping[str, Any]) -> Evidence:
    """The exponent of a figure over the place in a sequence lies in the region."""
    own = _of(rows, where)
    value = slope(own["position"], own[metric], own["seed"])
    return Evidence(f"length^{value.text()}", f"It grows as length^{value.text()}.", (Question(value, region),))
