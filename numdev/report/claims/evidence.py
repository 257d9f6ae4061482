"""The evidence for the claims that studies' files state, and the comparisons that other claims share with them.

The deviation is the maximum over elements (Golden et al. 2024, section V) unless a claim says otherwise. It is one element and
moves in steps of an ulp of the output; RMSE sees every element, so a claim on the maximum is judged by RMSE too.

What a claim leaves open is averaged: several points of one replicate count once, and they are paired by the entries of the axes
that the claim does not name. Where what is compared has several number formats, the verdict is that at BF16, or at the narrowest.

Templates of a claim's texts may name, beside values: `{list}`, all values with their names; of those for `each` entry, or else of
all, `{low}`, `{high}`, `{first}` and `{last}`; `{means}` and `{sizes}`, what is measured at each entry; `{NAME.pairs}`, how many
pairs of a ratio are larger; `{also}`, `{left_out}`, `{resolution}`, `{averaged}`, sentences and their ends that may be empty;
`{axis}`, `{metric}`, `{of}`, `{to}`, words of the usual templates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pandas as pd

from numdev.arithmetic.formats import FP64, Format
from numdev.report.claims.verdicts import (
    ABOVE,
    MARGIN,
    OURS,
    Claim,
    Evidence,
    NotMeasured,
    Question,
    Region,
    Undecidable,
    Verdict,
    equal,
)
from numdev.report.reading.frames import at_the_end, is_broken
from numdev.report.reading.scenarios import ENTRY_ROLE, LABEL, PRIMARY, compared, formats
from numdev.report.reading.wording import PLAIN, Wording, Words
from numdev.report.statistics import Interval, mean, ratio, significant, signs, slope, typical
from numdev.results.claim import BASELINE, COLUMNS, ClaimKind, ClaimStatement, Labels, Reference
from numdev.results.manifest import EntryRole

DEVIATION, EVERY = "max_difference", "rmse"
_LEAST_U = 2**10 * FP64.u  # golden's own error is a thousandth of what is measured


def select(rows: pd.DataFrame, subject: str = "variant", reference: str = "baseline", **where: object) -> pd.DataFrame:
    """The replicates of the primary output for one comparison, with their `cluster`; `where` are values of columns.

    Raises:
        Undecidable: if there are none, or if some hold NaN or Inf, which no mean may hide.
    """
    chosen = compared(rows, subject, reference)
    for column, value in where.items():
        chosen = chosen[chosen[column] == value] if column in chosen else chosen.iloc[:0]
    if chosen.empty:
        what = ", ".join(f"{column} {value}" for column, value in where.items()) or subject
        raise Undecidable(f"nothing was measured for {what}")
    _refuse_broken(int(is_broken(chosen).sum()), len(chosen))
    return _clustered(chosen)


def _refuse_broken(broken: int, count: int) -> None:
    if broken:
        raise Undecidable(f"{broken} of {count} replicates hold NaN or infinite values")


def _clustered(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with a column `cluster`; where they name none, all are of one cluster."""
    return rows.assign(cluster=rows["cluster"].fillna("") if "cluster" in rows else "")


def per_replicate(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Columns `value`, the mean of a metric over the points of each replicate, and `cluster`; by `seed`."""
    grouped = _clustered(rows).groupby("seed")
    return pd.DataFrame({"value": grouped[metric].mean(), "cluster": grouped["cluster"].first()})


def over(above: pd.DataFrame, below: pd.DataFrame) -> Interval:
    """The ratio of two results of `per_replicate`, paired by seed."""
    pairs = above.join(below["value"].rename("below"), how="inner")
    return ratio(pairs["value"], pairs["below"], pairs.index, pairs["cluster"])


def mean_of(values: pd.DataFrame) -> Interval:
    """The mean of a result of `per_replicate`."""
    return mean(values["value"].tolist(), values.index.tolist(), values["cluster"].tolist())


def beside_baseline(rows: pd.DataFrame, metric: str, reference: str = "golden", *kept: str) -> pd.DataFrame:
    """A metric of the variant beside that of its baseline, by point and replicate; keeps some columns of the variant."""
    columns = ["key", "seed", metric]
    variant = select(rows, "variant", reference)[[*columns, "cluster", *kept]].drop_duplicates()
    baseline = select(rows, "baseline", reference)[columns].drop_duplicates()
    return variant.merge(baseline, on=["key", "seed"], suffixes=("", "_baseline"))


def over_baseline(rows: pd.DataFrame, metric: str, reference: str = "golden") -> Interval:
    """The variant's deviation over the baseline's, paired by point and replicate."""
    pairs = beside_baseline(rows, metric, reference)
    return ratio(pairs[metric], pairs[f"{metric}_baseline"], pairs["seed"], pairs["cluster"])


def over_column(rows: pd.DataFrame, x: str, metric: str, name: str, reference: str = "baseline") -> Interval:
    """The exponent of a column `x`, which a reader knows as `name`; of `u` among the formats of the narrowest one's policy."""
    own = select(rows, reference=reference)
    if x == "u":
        own = own[own["policy"].isin(own["policy"][own["format"] == formats(own)[0]])]
        own = own.assign(u=own["format"].map({name: Format.parse(name).u for name in formats(own)}).astype(float))
        own = own[own["u"] >= _LEAST_U]
    if own[x].nunique() < 2:
        raise Undecidable(f"only one {name} was measured")
    return slope(own[x].astype(float), own[metric], own["seed"], own["cluster"])


def ratio_of(rows: pd.DataFrame, metric: str, reference: str, **fields: Any) -> Interval:
    """The ratio of which a claim with such fields speaks, in the rows of one scenario."""
    claim = ClaimStatement("-", ClaimKind.RATIO, metric, Reference(reference), judge="-", **fields)
    return _ratio(claim, _of_output(rows, claim), claim.of, Wording())[0]


def resolution(rows: pd.DataFrame) -> str:
    """A sentence on the resolution of the maximum, which is a multiple of an ulp of the output.

    Two numbers of one format that differ by at most `2 u max |r|` are neighbours where the outputs are largest, since an ulp of
    `r` is above `u |r|`. Such a maximum can halve or vanish, and take no value between.
    """
    own = select(rows)
    share = float(((own["max_u"] > 0) & (own["max_u"] <= 2)).mean()) if "max_u" in own else 0.0
    return f" In {share:.0%} of the replicates the maximum is one ulp of the output and sees no less." if share else ""


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
    evidence, others = judge(rows[rows["format"] == main]), []
    for name in (name for name in names if name != main):
        try:
            others.append(f"{name} {judge(rows[rows['format'] == name]).figure}")
        except Undecidable as reason:
            others.append(f"{name} unknown ({reason})")
    rest = f" Other formats: {'; '.join(others)}." if others else ""
    return replace(evidence, sentence=f"At {main}: {evidence.sentence}{rest}")


def claim_of(name: str, statement: ClaimStatement, words: Words = PLAIN, table: str = "", names: Wording | None = None) -> Claim:
    """The claim that a study's file states; `table` is that of its metric, `names` has what a reader calls the axes."""
    says = {Verdict(verdict): text for verdict, text in statement.says.items()}

    def test(rows: pd.DataFrame) -> Evidence:
        if statement.judge:
            evidence: Evidence = resolve_name(statement.judge)(rows, **statement.options)
        else:
            evidence = weigh(statement, rows, names or Wording())
        return replace(evidence, says=says)

    source = statement.source or OURS
    return Claim(name, statement.figure, statement.claim, source, test, statement.across, words, statement.table or table)


def weigh(claim: ClaimStatement, rows: pd.DataFrame, names: Wording) -> Evidence:
    """The evidence on the rows of one scenario.

    Raises:
        NotMeasured: if there are no points of which the claim speaks.
        Undecidable: if their rows cannot answer it.
    """
    own = _at(_of_output(rows, claim), claim.where, names)
    judge, several = partial(_judge, claim, names), claim.by_format
    if several is None:
        several = "format" in own and any(len(formats(_at(own, side, names))) > 1 for side in _sides(claim))
    if several:
        return by_format(own, judge)
    evidence = judge(own)
    return evidence if claim.finding else replace(evidence, sentence=f"{evidence.sentence[0].upper()}{evidence.sentence[1:]}")


@dataclass(frozen=True)
class _Value:
    """A value of a claim, its region, and how many of its pairs are larger; in a template its interval, or so many digits."""

    name: str
    interval: Interval
    of: ClaimStatement
    pairs: str = ""

    def __format__(self, digits: str) -> str:
        return significant(self.interval.estimate, int(digits)) if digits else self.interval.text()

    @property
    def question(self) -> Question:
        if self.of.kind is ClaimKind.ORDER:
            region = ABOVE
        elif self.of.kind is ClaimKind.SAME:
            margin = self.of.margin or MARGIN
            region = Region(1 / margin, margin)
        else:
            bounds = {"low": self.of.above, "high": self.of.below}
            region = Region(**{name: bound for name, bound in bounds.items() if bound is not None})
        return Question(self.interval, region, self.of.condition)


def _judge(claim: ClaimStatement, names: Wording, rows: pd.DataFrame) -> Evidence:
    values = list(_values(claim, rows, names))
    judged = [value for value in values if value.of.is_bounded]
    seen = equal(value.interval for value in judged) if all(value.of.margin == 1 for value in judged) else None
    beside = None
    if claim.column == DEVIATION and EVERY in rows if claim.rmse is None else claim.rmse:
        every = _judge(replace(claim.by(EVERY), rmse=False), names, rows)
        beside = replace(every, sentence="")
    usual = _USUAL[claim.kind] if claim.kind else ("{list}", "{list}.{left_out}")
    result, finding = claim.result or usual[0], claim.finding or usual[1]
    shown = [value for value in values if value.of.each] or judged
    listed = ", ".join((claim.item or "{name} {value}").format(name=value.name, value=value) for value in shown)
    ends = sorted(shown, key=lambda value: value.interval.estimate)
    text: dict[str, Any] = {value.name: value for value in values}
    text |= {"list": listed, "low": ends[0], "high": ends[-1], "first": shown[0], "last": shown[-1]}
    text |= {"also": "".join(f" {value.of.also.format(value=value)}" for value in values if value.of.also)}
    text |= {"left_out": left_out(*(value.interval for value in values if not value.of.also))}
    text = _words(claim, rows, names) | text
    if "{resolution}" in finding:
        is_of_maximum = claim.column == DEVIATION and EVERY in rows and claim.reference is Reference.BASELINE
        text["resolution"] = resolution(rows) if is_of_maximum else ""
    if "{means}" in finding:
        text["means"], text["sizes"] = _means(claim, rows, names)
    questions = () if seen else tuple(value.question for value in judged)
    return Evidence(result.format_map(text), finding.format_map(text), questions, beside, seen=seen)


_REST = "{averaged}.{left_out}{resolution}"
_RATIO = ("ratio {value}", "the ratio of {metric}{of} to that {to} is {value}" + _REST)
_USUAL = {
    ClaimKind.SLOPE: ("exponent {value}", "the exponent of {axis} in {metric} is {value}" + _REST),
    ClaimKind.RATIO: _RATIO,
    ClaimKind.SAME: _RATIO,
    ClaimKind.ORDER: ("{list}", "by {axis}, the ratios of {metric} are {list}" + _REST),
}
"""Templates of the figure and of the sentence where a claim has none of its own."""
_FROM = {
    Reference.GOLDEN: "from golden",
    Reference.SAME_INPUTS: "from golden of the same rounded inputs",
    Reference.BASELINE: "from the baseline",
}
_METRICS = {DEVIATION: "max difference", EVERY: "RMSE", "mean_absolute": "mean of |D|", "std": "standard deviation of D"}


def _words(claim: ClaimStatement, rows: pd.DataFrame, names: Wording) -> dict[str, str]:
    """The words that the usual templates name beside values."""
    is_own = isinstance(claim.to, str) and f"{BASELINE}_{claim.column}" in rows
    other = (
        "of the reference" if is_own else "of the baseline" if isinstance(claim.to, str) else f"with {_entries(claim.to, names)}"
    )
    axes = [names.name(name) for name in _open(rows, claim) if rows[name].nunique() > 1]
    return {
        "axis": names.name(claim.over),
        "metric": _metric(claim, rows),
        "of": f" with {_entries(claim.of, names)}" if claim.of else "",
        "to": other,
        "averaged": f", averaged over {' and '.join(axes)}" if axes else "",
    }


def _metric(claim: ClaimStatement, rows: pd.DataFrame) -> str:
    """The metric in words."""
    known, usual = _METRICS.get(claim.column), Wording().metric(claim.column, "", "")
    if "tensor" in rows:
        return f"the {known or usual} of all weights after the last step"
    if known is None and not claim.output:
        return f"the {usual}"
    of, against = (f" of {claim.output}" if claim.output else ""), (f" {_FROM[claim.reference]}" if "reference" in rows else "")
    return f"the {known or claim.column}{of}{against}"


def _values(claim: ClaimStatement, rows: pd.DataFrame, names: Wording) -> Iterator[_Value]:
    for name, part in claim.values().items():
        own = _at(_of_output(rows, part), part.where, names)
        try:
            yield from _of_part(name, part, own, names)
        except Undecidable:
            if not part.also:
                raise


def _of_part(name: str, claim: ClaimStatement, rows: pd.DataFrame, names: Wording) -> Iterator[_Value]:
    """The values of one part: of a ratio for each entry of an axis, of an order for each pair of neighbours."""
    if claim.kind is ClaimKind.ORDER:
        for larger, smaller in pairwise(claim.order):
            times, _ = _times(claim, rows, ({claim.over: larger}, {claim.over: smaller}), names)
            yield _Value(f"{larger} to {smaller}", times, claim)
    elif claim.kind is ClaimKind.SLOPE:
        yield _Value(name, _exponent(claim, rows, names), claim)
    elif claim.each:
        for entry in _subjects(rows, claim.each, names):
            yield _Value(str(entry).replace("_", " "), *_ratio(claim, rows, {**claim.of, claim.each: entry}, names))
    else:
        yield _Value(name, *_ratio(claim, rows, claim.of, names))


def _subjects(rows: pd.DataFrame, axis: str, names: Wording) -> list[Any]:
    """The entries of an axis of which a claim speaks: numbers ascending, others in the order of the study."""
    column, role = f"{LABEL}{axis}", f"{ENTRY_ROLE}{axis}"
    own = rows[rows[role].isna()] if role in rows else rows
    entries = list(own[column].dropna().unique()) if column in own else []
    if not entries:
        raise Undecidable(f"no {names.name(axis)} could be measured here")
    return sorted(entries) if pd.api.types.is_numeric_dtype(own[column]) else entries


def _of_output(rows: pd.DataFrame, claim: ClaimStatement) -> pd.DataFrame:
    """The rows of the output that the claim names, as if it were the primary one; all, where it names none."""
    if not claim.metric:
        return rows
    own = rows[rows["output"] == claim.output] if claim.output else rows
    if own.empty or claim.column not in own:
        raise NotMeasured(f"nothing was measured of {claim.metric}")
    return own.assign(**{PRIMARY: True})


def _column(rows: pd.DataFrame, axis: str) -> str:
    return axis if axis in COLUMNS and f"{LABEL}{axis}" not in rows else f"{LABEL}{axis}"


def _at(rows: pd.DataFrame, labels: Labels, names: Wording) -> pd.DataFrame:
    """The rows of some entries."""
    for axis, entry in labels.items():
        column = _column(rows, axis)
        own = the_entry(rows, axis, EntryRole(entry["role"])) if isinstance(entry, dict) else entry
        if column not in rows:
            rows = rows.iloc[:0]
        elif isinstance(own, (int, float)) and not isinstance(own, bool):  # in tables of several studies it may have become text
            rows = rows[pd.to_numeric(rows[column], errors="coerce") == own]
        else:
            rows = rows[rows[column].astype(str) == str(own)]
        if rows.empty:
            raise NotMeasured(f"nothing was measured with {_entries({axis: own}, names)}")
    return rows


def the_entry(rows: pd.DataFrame, axis: str, role: EntryRole) -> str:
    """The one entry of an axis that the study declares to have a role.

    Raises:
        Undecidable: if none was measured, or several.
    """
    column, roles = f"{LABEL}{axis}", f"{ENTRY_ROLE}{axis}"
    own = rows[column][rows[roles] == role.value] if {column, roles} <= set(rows) else pd.Series(dtype=str)
    entries = [str(name) for name in own.dropna().unique()]
    if len(entries) != 1:
        there = ", ".join(entries) or "none"
        raise Undecidable(f"the claim needs one {axis} with the role {role.value} in the study, and there is {there}")
    return entries[0]


def _entries(labels: Labels, names: Wording) -> str:
    return ", ".join(f"{names.name(axis)} = {entry}" for axis, entry in labels.items())


def _sides(claim: ClaimStatement) -> list[Labels]:
    """The entries of each group of points that is compared."""
    if claim.kind is ClaimKind.ORDER:
        return [{claim.over: entry} for entry in claim.order]
    if claim.kind is ClaimKind.SLOPE:
        return [{}]
    return [claim.of] if isinstance(claim.to, str) else [claim.of, claim.to]


def _open(rows: pd.DataFrame, claim: ClaimStatement) -> list[str]:
    """The columns of the axes that the claim does not name, and whose entry the named ones leave open."""
    axes = {axis for side in (claim.where, *_sides(claim)) for axis in side} | ({claim.over, claim.each} - {""})
    named = {_column(rows, axis) for axis in axes}
    columns = [str(name) for name in rows if str(name).startswith(LABEL) and str(name) not in named and rows[name].notna().any()]
    derived = [name for name in named if name in rows and not name.startswith(LABEL)]
    return [name for name in columns if not any((rows.groupby(name)[own].nunique() == 1).all() for own in derived)]


def _replicates(rows: pd.DataFrame, claim: ClaimStatement) -> pd.DataFrame:
    """One row for each replicate of each point, with its cluster.

    Raises:
        Undecidable: if there are none, or if some hold NaN or Inf.
    """
    metric = claim.column
    own = select(rows, reference=claim.reference.value) if "reference" in rows else rows
    if "tensor" in rows:
        own, runs = at_the_end(rows), len(rows[["key", "seed"]].drop_duplicates())
        if len(own) < runs:
            raise Undecidable(f"{runs - len(own)} of {runs} runs stopped before the last step")
    _refuse_broken(int((~np.isfinite(own[metric].astype(float))).sum()), len(own))
    by = [str(name) for name in own if str(name).startswith(LABEL) or name in ("key", "seed")]
    if own.duplicated(by).any():  # of a kind of the user's own, whose columns tell further rows apart
        own = own.assign(**{metric: own.groupby(by, dropna=False)[metric].transform("mean")}).drop_duplicates(by)
    return _clustered(own)


def _exponent(claim: ClaimStatement, rows: pd.DataFrame, names: Wording) -> Interval:
    """The exponent of an axis within the lines of the axes that the claim leaves open.

    Both coordinates of a point are divided by their geometric means over its replicate's line, so that lines of another height,
    or of which a point is lacking, do not tilt the common one.
    """
    column, metric = _column(rows, claim.over), claim.column
    if claim.over in COLUMNS and column == claim.over:
        return over_column(rows, column, metric, names.name(claim.over), claim.reference.value)
    if column not in rows:
        raise NotMeasured(f"nothing was measured over {names.name(claim.over)}")
    if claim.to == BASELINE:
        own = beside_baseline(rows, metric, claim.reference.value, *(str(name) for name in rows if str(name).startswith(LABEL)))
        own[metric] = (own[metric] / own[f"{metric}_baseline"]).where(own[f"{metric}_baseline"] > 0)
    else:
        own = _replicates(rows, claim)
    own = own.assign(x=pd.to_numeric(own[column], errors="coerce")).dropna(subset="x")
    if own["x"].nunique() < 2:
        raise Undecidable(f"only one {names.name(claim.over)} was measured")
    usable = (own[metric] > 0) & np.isfinite(own[metric])
    logs = np.log(own.loc[usable, ["x", metric]].astype(float))
    line = [own.loc[usable, name] for name in (*_open(rows, claim), "seed")]
    centred = np.exp(logs - logs.groupby(line, dropna=False).transform("mean"))
    x, y = (own[name].astype(float).where(~usable, centred[name]) for name in ("x", metric))
    return slope(x, y, own["seed"], own["cluster"])


def _ratio(claim: ClaimStatement, rows: pd.DataFrame, of: Labels, names: Wording) -> tuple[Interval, ClaimStatement, str]:
    if not isinstance(claim.to, str):
        times, pairs = _times(claim, rows, (of, claim.to), names)
        return times, claim, pairs
    own, metric = _at(rows, of, names), claim.column
    if f"{BASELINE}_{metric}" not in rows:
        return over_baseline(own, metric, claim.reference.value), claim, ""
    runs = _replicates(own, claim)  # a figure of each run beside that of its reference in the same row
    return ratio(runs[metric], runs[f"{BASELINE}_{metric}"], runs["seed"], runs["cluster"]), claim, ""


def _times(claim: ClaimStatement, rows: pd.DataFrame, sides: tuple[Labels, Labels], names: Wording) -> tuple[Interval, str]:
    """The metric at some entries over that at others, paired by replicate and by the entries of the axes left open."""
    above, below = (_replicates(_at(rows, side, names), claim) for side in sides)
    paired, metric = [*_open(rows, claim), "seed"], claim.column
    pairs = above[[*paired, "key", metric, "cluster"]].merge(below[[*paired, "key", metric]], on=paired, suffixes=("", "_other"))
    if pairs.empty:
        raise Undecidable(f"no replicate was measured with {' and with '.join(_entries(side, names) for side in sides)}")
    rest = ""
    if claim.same_point:
        same = pairs["key"] == pairs["key_other"]
        trivial = len(pairs[same].drop_duplicates(_open(rows, claim)))
        pairs, rest = pairs[~same], f"; {claim.same_point.format(trivial)}" if trivial else ""
        if pairs.empty:
            raise Undecidable(f"every point with {_entries(sides[0], names)} is one with {_entries(sides[1], names)}")
    times = ratio(pairs[metric], pairs[f"{metric}_other"], pairs["seed"], pairs["cluster"])
    return times, f"{_counted(pairs, metric)}{rest}.{left_out(times)}" if claim.same_point else ""


def _counted(pairs: pd.DataFrame, metric: str) -> str:
    """How many replicates are larger; pairs of one replicate are one trial of the sign test, by their mean."""
    if (pairs[metric] == pairs[f"{metric}_other"]).all():
        return f"exactly equal in all {len(pairs)} pairs"
    counted = signs(pairs[metric], pairs[f"{metric}_other"], pairs["seed"])
    test = "" if pairs["cluster"].nunique() > 1 else f" (sign test p = {counted.p:.2g})"  # heads of a layer are no trials
    return f"larger in {counted.larger}, equal in {counted.equal} of {counted.count} replicates{test}"


def _means(claim: ClaimStatement, rows: pd.DataFrame, names: Wording) -> tuple[str, str]:
    """The metric at each entry of an order or of a slope, with its interval and in short."""
    if claim.kind is ClaimKind.ORDER:
        runs = {entry: _replicates(_at(rows, {claim.over: entry}, names), claim) for entry in claim.order}
        own = {entry: per_replicate(one, claim.column) for entry, one in runs.items()}
        each = {entry: typical(one["value"].tolist(), one["cluster"].tolist()) for entry, one in own.items()}
        listed = ", ".join(f"{entry} {one.text()}" for entry, one in each.items())
        return listed, ", ".join(significant(one.estimate) for one in each.values())
    at = _replicates(rows, claim).groupby(_column(rows, claim.over), sort=True)[claim.column].mean()
    places = [str(int(place)) if isinstance(place, float) and place.is_integer() else str(place) for place in at.index]
    steps = ", ".join(f"{significant(float(value))} at {place}" for place, value in zip(places, at, strict=True))
    return steps, steps
