"""The tests behind the claims on Figures 3 to 6: rows of one scenario in, the evidence out.

Each reads `out` only; the deviation is the paper's max_difference (section V) unless it says otherwise. Beside the maximum, which
is one element and moves in steps of an ulp of the output, most are judged by RMSE too, which sees every element.
"""

from __future__ import annotations

from itertools import pairwise

import pandas as pd

from numdev.report.claims.finding import (
    ABOVE,
    ALIKE,
    FLAT,
    GROWS,
    LARGER,
    SHRINKS,
    Evidence,
    Question,
    Undecidable,
    about,
    by_format,
    known_formats,
    left_out,
    select,
)
from numdev.report.claims.published import FIG4_RATIO
from numdev.report.statistics.estimates import Interval, ratio, significant, signs, slope, typical

DEVIATION, EVERY = "max_difference", "rmse"
LENGTH, AREA = "problem.shape.keys", "tiling.area"
AROUND = 2.0  # "about ten times" is within this factor of ten


def fig3(rows: pd.DataFrame) -> Evidence:
    """The difference falls from BF16 over FP16 and FP32 to FP64: at each step, paired by replicate."""
    names = known_formats(rows)
    found = [per_replicate(select(rows, format=name), DEVIATION) for name in names]
    steps = [over(above, below) for above, below in pairwise(found)]
    means = [typical(one["value"].tolist(), one["cluster"].tolist()) for one in found]
    told = ", ".join(f"{name} {m.text()}" for name, m in zip(names, means, strict=True))
    figure = f"{', '.join(significant(m.estimate) for m in means)} from {names[0]} to {names[-1]}"
    sentence = f"Max difference from the baseline: {told}.{left_out(*steps)}"
    return Evidence(figure, sentence, tuple(Question(step, ABOVE) for step in steps))


def per_replicate(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Columns `value`, the mean of a metric over the points of each replicate, and `cluster`; by `seed`."""
    grouped = clustered(rows).groupby("seed")
    return pd.DataFrame({"value": grouped[metric].mean(), "cluster": grouped["cluster"].first()})


def over(above: pd.DataFrame, below: pd.DataFrame) -> Interval:
    """The ratio of two results of `per_replicate`, paired by seed."""
    pairs = above.join(below["value"].rename("below"), how="inner")
    return ratio(pairs["value"], pairs["below"], pairs.index, pairs["cluster"])


def clustered(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows that name a cluster, the same for all where they name none."""
    return rows.assign(cluster=rows["cluster"].fillna("") if "cluster" in rows else "")


def fig4(rows: pd.DataFrame) -> Evidence:
    """At BF16 the variant's deviation from golden is 5 to 20 times the baseline's: a factor 2 around the paper's."""
    bf16 = rows[rows["format"] == "bf16"]
    total = over_baseline(bf16, DEVIATION)
    arithmetic = over_baseline(bf16, DEVIATION, "golden_same_inputs")
    sentence = (
        f"At bf16 the variant deviates {total.text()} times as much from golden as the baseline does, "
        f"{arithmetic.text()} times if golden sees the same rounded inputs.{left_out(total)}"
    )
    return Evidence(total.text(), sentence, (Question(total, about(FIG4_RATIO, AROUND)),))


def fig4_assumptions(rows: pd.DataFrame) -> Evidence:
    """The ratio of Figure 4 is about ten at every N, and has no trend in N."""
    bf16 = rows[rows["format"] == "bf16"]
    lengths = sorted(bf16[LENGTH].unique())
    if len(lengths) < 2:
        raise Undecidable("only one N was measured")
    each = {n: over_baseline(bf16[bf16[LENGTH] == n], DEVIATION) for n in lengths}
    pairs = _beside_baseline(bf16, DEVIATION, "golden")
    times = (pairs[DEVIATION] / pairs[f"{DEVIATION}_baseline"]).where(pairs[f"{DEVIATION}_baseline"] > 0)
    exponent = slope(pairs[LENGTH].astype(float), times, pairs["seed"], pairs["cluster"])
    told = ", ".join(f"{one.text()} at {n}" for n, one in each.items())
    figure = (
        f"{' to '.join(significant(each[n].estimate) for n in (lengths[0], lengths[-1]))} at N = {lengths[0]} to {lengths[-1]}"
    )
    sentence = f"The variant over the baseline, max difference from golden: {told}; it goes as N to the {exponent.text()}."
    questions = [Question(exponent, FLAT), *(Question(one, about(FIG4_RATIO, AROUND)) for one in each.values())]
    return Evidence(figure, sentence + left_out(exponent), tuple(questions))


def over_baseline(rows: pd.DataFrame, metric: str, reference: str = "golden") -> Interval:
    """The variant's deviation from golden over the baseline's, paired by point and replicate."""
    pairs = _beside_baseline(rows, metric, reference)
    return ratio(pairs[metric], pairs[f"{metric}_baseline"], pairs["seed"], pairs["cluster"])


def _beside_baseline(rows: pd.DataFrame, metric: str, reference: str) -> pd.DataFrame:
    columns = ["key", "seed", metric]
    more = [name for name in ("cluster", LENGTH) if name in clustered(rows)]
    variant = clustered(select(rows, "variant", reference))[[*columns, *more]].drop_duplicates()
    baseline = select(rows, "baseline", reference)[columns].drop_duplicates()
    return variant.merge(baseline, on=["key", "seed"], suffixes=("", "_baseline"))


def fig5a(rows: pd.DataFrame) -> Evidence:
    """The max difference grows with N."""

    def judge(rows: pd.DataFrame) -> Evidence:
        exponent, every = over_length(rows, DEVIATION), over_length(rows, EVERY)
        sentence = f"the max difference goes as N to the {exponent.text()}.{left_out(exponent)}{resolution(rows)}"
        beside = Evidence(f"N^{every.text()}", "", (Question(every, GROWS),))
        return Evidence(f"N^{exponent.text()}", sentence, (Question(exponent, GROWS),), beside)

    return by_format(rows, judge)


def fig5b(rows: pd.DataFrame) -> Evidence:
    """Mean and standard deviation of the difference grow with N. Both see every element."""

    def judge(rows: pd.DataFrame) -> Evidence:
        centre, spread = over_length(rows, "mean_absolute"), over_length(rows, "std")
        sentence = f"the mean of |D| goes as N to the {centre.text()}, the standard deviation to the {spread.text()}."
        figure = f"mean N^{centre.text()}, std N^{spread.text()}"
        return Evidence(figure, sentence + left_out(centre, spread), (Question(centre, GROWS), Question(spread, GROWS)))

    return by_format(rows, judge)


def long(rows: pd.DataFrame) -> Evidence:
    """The max difference from golden grows with N."""

    def judge(rows: pd.DataFrame) -> Evidence:
        exponent, every = (over_length(rows, metric, "golden") for metric in (DEVIATION, EVERY))
        means = select(rows, reference="golden").groupby(LENGTH, sort=True)[DEVIATION].mean()
        steps = ", ".join(f"{significant(float(mean))} at {n}" for n, mean in means.items())
        sentence = f"the max difference from golden goes as N to the {exponent.text()} over all; {steps}.{left_out(exponent)}"
        beside = Evidence(f"N^{every.text()}", "", (Question(every, GROWS),))
        return Evidence(f"N^{exponent.text()}", sentence, (Question(exponent, GROWS),), beside)

    return by_format(rows, judge)


def over_length(rows: pd.DataFrame, metric: str, reference: str = "baseline") -> Interval:
    """The exponent of N, the number of keys."""
    return _exponent(rows, LENGTH, metric, "N", reference)


def _exponent(rows: pd.DataFrame, x: str, metric: str, name: str, reference: str = "baseline") -> Interval:
    found = clustered(select(rows, reference=reference))
    if found[x].nunique() < 2:
        raise Undecidable(f"only one {name} was measured")
    return slope(found[x].astype(float), found[metric], found["seed"], found["cluster"])


def resolution(rows: pd.DataFrame) -> str:
    """A sentence on what the maximum cannot see: it is a multiple of an ulp of the output.

    Two numbers of one format that differ by at most `2 u max |r|` are neighbours where the outputs are largest, since an ulp of
    `r` is above `u |r|`. Such a maximum can halve or vanish, and take no value between.
    """
    found = select(rows)
    if "max_u" not in found:
        return ""
    share = float(((found["max_u"] > 0) & (found["max_u"] <= 2)).mean())
    return f" In {share:.0%} of the replicates the maximum is one ulp of the output and sees no less." if share else ""


def fig6a(rows: pd.DataFrame) -> Evidence:
    """With Br and Bc exchanged the difference is larger."""

    def judge(rows: pd.DataFrame) -> Evidence:
        times, told = against_as_is(rows, "swapped")
        every, _ = against_as_is(rows, "swapped", EVERY)
        sentence = f"swapping makes the difference {times.text()} times as large, {told}{resolution(rows)}"
        beside = Evidence(every.text(), "", (Question(every, LARGER),))
        return Evidence(times.text(), sentence, (Question(times, LARGER),), beside)

    return by_format(rows, judge)


def fig6b(rows: pd.DataFrame) -> Evidence:
    """With square tiles of the same area the difference is alike.

    Squares that keep Bc, and with it the number of rescales, are told beside it where the study has them.
    """

    def judge(rows: pd.DataFrame) -> Evidence:
        times, told = against_as_is(rows, "square")
        every, _ = against_as_is(rows, "square", EVERY)
        sentence = f"square tiles of the same area make the difference {times.text()} times as large, {told}"
        if (rows["label.tiling.shape"] == "square_bc").any():
            kept, told = against_as_is(rows, "square_bc")
            sentence += f" Squares that keep Bc make it {kept.text()} times as large, {told}"
        beside = Evidence(every.text(), "", (Question(every, ALIKE),))
        return Evidence(times.text(), sentence + resolution(rows), (Question(times, ALIKE),), beside)

    return by_format(rows, judge)


def against_as_is(rows: pd.DataFrame, shape: str, metric: str = DEVIATION) -> tuple[Interval, str]:
    """The difference with another shape of the tile over that with the paper's, and a sentence on the pairs.

    Pairs are of one SRAM size and one replicate; those of one replicate are one trial of the sign test, by their mean.
    Sizes at which both shapes are the same tile say nothing and are left out.

    Raises:
        Undecidable: if no size has two different tiles.
    """
    if "label.tiling.sram" not in rows:
        raise Undecidable("the points have no label tiling.sram")
    on, tile = ["label.tiling.sram", "seed"], ["variant.tiling.br", "variant.tiling.bc"]
    name = "label.tiling.shape"
    columns = [*on, *tile, metric]
    as_is, other = (clustered(select(rows, **{name: value})) for value in ("as_is", shape))
    pairs = as_is[[*columns, "cluster"]].merge(other[columns], on=on, suffixes=("", "_other"))
    same = (pairs[tile[0]] == pairs[f"{tile[0]}_other"]) & (pairs[tile[1]] == pairs[f"{tile[1]}_other"])
    trivial = pairs.loc[same, on[0]].nunique()
    pairs = pairs[~same]
    if pairs.empty:
        raise Undecidable(f"at every size the {shape} tile is the paper's own")
    times = ratio(pairs[f"{metric}_other"], pairs[metric], pairs["seed"], pairs["cluster"])
    counted = signs(pairs[f"{metric}_other"], pairs[metric], pairs["seed"])
    test = "" if pairs["cluster"].nunique() > 1 else f" (sign test p = {counted.p:.2g})"  # heads of a layer are no trials
    told = f"larger in {counted.larger}, equal in {counted.equal} of {counted.count} replicates{test}"
    if (pairs[f"{metric}_other"] == pairs[metric]).all():
        told = f"exactly equal in all {len(pairs)} pairs"
    rest = f"; at {trivial} more sizes both are one tile" if trivial else ""
    return times, f"{told}{rest}.{left_out(times)}"


def fig6c(rows: pd.DataFrame) -> Evidence:
    """Larger tiles make the difference smaller."""

    def judge(rows: pd.DataFrame) -> Evidence:
        exponent, every = over_area(rows, DEVIATION), over_area(rows, EVERY)
        sentence = f"the max difference goes as the block area to the {exponent.text()}.{left_out(exponent)}{resolution(rows)}"
        beside = Evidence(f"area^{every.text()}", "", (Question(every, SHRINKS),))
        return Evidence(f"area^{exponent.text()}", sentence, (Question(exponent, SHRINKS),), beside)

    return by_format(rows, judge)


def over_area(rows: pd.DataFrame, metric: str) -> Interval:
    """The exponent of the block area Br Bc."""
    return _exponent(rows, AREA, metric, "block area")
