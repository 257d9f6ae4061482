"""The tests behind the claims on Figures 3 to 6: rows of one setting in, a finding out.

Each reads `out` only; the deviation is the paper's max_difference (section V) unless it says otherwise.
"""

from __future__ import annotations

from itertools import pairwise

import pandas as pd

from numdev.report.finding import (
    Finding,
    Undecidable,
    alike,
    between,
    by_format,
    combined,
    decided,
    exceeds,
    grows,
    known_formats,
    left_out,
    select,
    shrinks,
)
from numdev.report.published import FIG4_RATIO
from numdev.report.statistics import Interval, apart, ratio, significant, signs, slope, typical

DEVIATION = "max_difference"


def fig3(rows: pd.DataFrame) -> Finding:
    """Geometric means over seeds fall from BF16 over FP16 and FP32 to FP64, intervals apart."""
    names = known_formats(rows)
    means = [typical(_per_seed(select(rows, format=name), DEVIATION)) for name in names]
    steps = list(pairwise(means))
    falls = all(apart(left, right) for left, right in steps)
    stands = any(apart(right, left) or left.high == left.low == right.high == right.low for left, right in steps)
    figure = " > ".join(significant(m.estimate) for m in means) if falls else _listed(means)
    told = ", ".join(f"{name} {m.text()}" for name, m in zip(names, means, strict=True))
    return Finding(decided(falls, stands), figure, f"Max difference from the baseline: {told}.")


def _listed(means: list[Interval]) -> str:
    return ", ".join(significant(m.estimate) for m in means)


def _per_seed(rows: pd.DataFrame, metric: str) -> list[float]:
    return [float(value) for value in rows.groupby("seed")[metric].mean()]


def fig4(rows: pd.DataFrame) -> Finding:
    """At BF16 the variant's deviation from golden is 5 to 20 times the baseline's: a factor 2 around the paper's."""
    bf16 = rows[rows["format"] == "bf16"]
    total = over_baseline(bf16, DEVIATION)
    arithmetic = over_baseline(bf16, DEVIATION, "golden_same_inputs")
    sentence = (
        f"At bf16 the variant deviates {total.text()} times as much from golden as the baseline does, "
        f"{arithmetic.text()} times if golden sees the same rounded inputs.{left_out(total)}"
    )
    return Finding(between(total, FIG4_RATIO / 2, FIG4_RATIO * 2), total.text(), sentence)


def over_baseline(rows: pd.DataFrame, metric: str, reference: str = "golden") -> Interval:
    """The variant's deviation from golden over the baseline's, paired by point and seed."""
    columns = ["key", "seed", metric]
    variant = select(rows, "variant", reference)[columns].drop_duplicates()
    baseline = select(rows, "baseline", reference)[columns].drop_duplicates()
    pairs = variant.merge(baseline, on=["key", "seed"], suffixes=("", "_baseline"))
    return ratio(pairs[metric], pairs[f"{metric}_baseline"], pairs["seed"])


def fig5a(rows: pd.DataFrame) -> Finding:
    """The max difference grows with N: the exponent of N is above 0."""

    def judge(rows: pd.DataFrame) -> Finding:
        exponent = over_length(rows, DEVIATION)
        sentence = f"the max difference goes as N to the {exponent.text()}.{left_out(exponent)}"
        return Finding(grows(exponent), f"N^{exponent.text()}", sentence)

    return by_format(rows, judge)


def fig5b(rows: pd.DataFrame) -> Finding:
    """Mean and standard deviation of the difference grow with N."""

    def judge(rows: pd.DataFrame) -> Finding:
        centre, spread = over_length(rows, "mean_absolute"), over_length(rows, "std")
        sentence = f"the mean of |D| goes as N to the {centre.text()}, the standard deviation to the {spread.text()}."
        figure = f"mean N^{centre.text()}, std N^{spread.text()}"
        return Finding(combined([grows(centre), grows(spread)]), figure, sentence + left_out(centre, spread))

    return by_format(rows, judge)


def long(rows: pd.DataFrame) -> Finding:
    """The max difference from golden grows with N."""

    def judge(rows: pd.DataFrame) -> Finding:
        exponent = over_length(rows, DEVIATION, "golden")
        means = select(rows, reference="golden").groupby("problem.shape.keys", sort=True)[DEVIATION].mean()
        steps = ", ".join(f"{significant(float(mean))} at {n}" for n, mean in means.items())
        sentence = f"the max difference from golden goes as N to the {exponent.text()} over all; {steps}.{left_out(exponent)}"
        return Finding(grows(exponent), f"N^{exponent.text()}", sentence)

    return by_format(rows, judge)


def over_length(rows: pd.DataFrame, metric: str, reference: str = "baseline") -> Interval:
    """The exponent of N, the number of keys."""
    return _exponent(rows, "problem.shape.keys", metric, "N", reference)


def _exponent(rows: pd.DataFrame, x: str, metric: str, name: str, reference: str = "baseline") -> Interval:
    found = select(rows, reference=reference)
    if found[x].nunique() < 2:
        raise Undecidable(f"only one {name} was measured")
    return slope(found[x].astype(float), found[metric], found["seed"])


def fig6a(rows: pd.DataFrame) -> Finding:
    """With Br and Bc exchanged the difference is larger: the ratio is above 1."""

    def judge(rows: pd.DataFrame) -> Finding:
        times, told = against_as_is(rows, "swapped")
        return Finding(exceeds(times), times.text(), f"swapping makes the difference {times.text()} times as large, {told}")

    return by_format(rows, judge)


def fig6b(rows: pd.DataFrame) -> Finding:
    """With square tiles of the same area the difference is the same: the ratio cannot be told from 1.

    Squares that keep Bc, and with it the number of rescales, are told beside it where the study has them.
    """

    def judge(rows: pd.DataFrame) -> Finding:
        times, told = against_as_is(rows, "square")
        sentence = f"square tiles of the same area make the difference {times.text()} times as large, {told}"
        if (rows["label.tiling.shape"] == "square_bc").any():
            kept, told = against_as_is(rows, "square_bc")
            sentence += f" Squares that keep Bc make it {kept.text()} times as large, {told}"
        return Finding(alike(times), times.text(), sentence)

    return by_format(rows, judge)


def against_as_is(rows: pd.DataFrame, shape: str) -> tuple[Interval, str]:
    """The difference with another shape of the tile over that with the paper's, and a sentence on the pairs.

    Pairs are of one SRAM size and one seed.
    Sizes at which both shapes are the same tile say nothing and are left out.

    Raises:
        Undecidable: if no size has two different tiles.
    """
    if "label.tiling.sram" not in rows:
        raise Undecidable("the points have no label tiling.sram")
    on, tile = ["label.tiling.sram", "seed"], ["variant.tiling.br", "variant.tiling.bc"]
    name = "label.tiling.shape"
    columns = [*on, *tile, DEVIATION]
    as_is, other = (select(rows, **{name: value})[columns] for value in ("as_is", shape))
    pairs = as_is.merge(other, on=on, suffixes=("", "_other"))
    same = (pairs[tile[0]] == pairs[f"{tile[0]}_other"]) & (pairs[tile[1]] == pairs[f"{tile[1]}_other"])
    trivial = pairs.loc[same, on[0]].nunique()
    pairs = pairs[~same]
    if pairs.empty:
        raise Undecidable(f"at every size the {shape} tile is the paper's own")
    times = ratio(pairs[f"{DEVIATION}_other"], pairs[DEVIATION], pairs["seed"])
    counted = signs(pairs[f"{DEVIATION}_other"], pairs[DEVIATION])
    told = f"larger in {counted.larger}, equal in {counted.equal} of {counted.count} pairs (sign test p = {counted.p:.2g})"
    if counted.equal == counted.count:
        told = f"exactly equal in all {counted.count} pairs"
    rest = f"; at {trivial} more sizes both are one tile" if trivial else ""
    return times, f"{told}{rest}.{left_out(times)}"


def fig6c(rows: pd.DataFrame) -> Finding:
    """Larger tiles make the difference smaller: the exponent of Br Bc is below 0."""

    def judge(rows: pd.DataFrame) -> Finding:
        exponent = over_area(rows, DEVIATION)
        sentence = f"the max difference goes as the block area to the {exponent.text()}.{left_out(exponent)}"
        return Finding(shrinks(exponent), f"area^{exponent.text()}", sentence)

    return by_format(rows, judge)


def over_area(rows: pd.DataFrame, metric: str) -> Interval:
    """The exponent of the block area Br Bc."""
    return _exponent(rows, "tiling.area", metric, "block area")
