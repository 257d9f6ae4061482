"""What claims and figures compare alike: ratios, exponents and means of the rows of one scenario.

The deviation is the maximum over elements (Golden et al. 2024, section V) unless a function says otherwise. It is one element
and moves in steps of an ulp of the output; RMSE sees every element.
"""

from __future__ import annotations

import pandas as pd

from numdev.report.claims.finding import Undecidable, select
from numdev.report.statistics.estimates import Interval, ratio, slope

DEVIATION, EVERY = "max_difference", "rmse"
AROUND = 2.0  # "about ten times" is within this factor of ten


def per_replicate(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Columns `value`, the mean of a metric over the points of each replicate, and `cluster`; by `seed`."""
    grouped = clustered(rows).groupby("seed")
    return pd.DataFrame({"value": grouped[metric].mean(), "cluster": grouped["cluster"].first()})


def over(above: pd.DataFrame, below: pd.DataFrame) -> Interval:
    """The ratio of two results of `per_replicate`, paired by seed."""
    pairs = above.join(below["value"].rename("below"), how="inner")
    return ratio(pairs["value"], pairs["below"], pairs.index, pairs["cluster"])


def clustered(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with a column `cluster`; where they name none, all are of one cluster."""
    return rows.assign(cluster=rows["cluster"].fillna("") if "cluster" in rows else "")


def over_baseline(rows: pd.DataFrame, metric: str, reference: str = "golden") -> Interval:
    """The variant's deviation from golden over the baseline's, paired by point and replicate."""
    pairs = beside_baseline(rows, metric, reference)
    return ratio(pairs[metric], pairs[f"{metric}_baseline"], pairs["seed"], pairs["cluster"])


def beside_baseline(rows: pd.DataFrame, metric: str, reference: str, *kept: str) -> pd.DataFrame:
    """A metric of the variant beside that of its baseline, by point and replicate; keeps some columns of the variant."""
    columns = ["key", "seed", metric]
    variant = clustered(select(rows, "variant", reference))[[*columns, "cluster", *kept]].drop_duplicates()
    baseline = select(rows, "baseline", reference)[columns].drop_duplicates()
    return variant.merge(baseline, on=["key", "seed"], suffixes=("", "_baseline"))


def exponent_of(rows: pd.DataFrame, x: str, metric: str, name: str, reference: str = "baseline") -> Interval:
    """The exponent of a column `x`, which a reader knows as `name`."""
    found = clustered(select(rows, reference=reference))
    if found[x].nunique() < 2:
        raise Undecidable(f"only one {name} was measured")
    return slope(found[x].astype(float), found[metric], found["seed"], found["cluster"])


def resolution(rows: pd.DataFrame) -> str:
    """A sentence on the resolution of the maximum, which is a multiple of an ulp of the output.

    Two numbers of one format that differ by at most `2 u max |r|` are neighbours where the outputs are largest, since an ulp of
    `r` is above `u |r|`. Such a maximum can halve or vanish, and take no value between.
    """
    found = select(rows)
    if "max_u" not in found:
        return ""
    share = float(((found["max_u"] > 0) & (found["max_u"] <= 2)).mean())
    return f" In {share:.0%} of the replicates the maximum is one ulp of the output and sees no less." if share else ""
