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
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any, NamedTuple

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
)
from numdev.report.reading.frames import ENTRY_ROLE, LABEL, PRIMARY, WHOLE, compared, formats, is_broken
from numdev.report.reading.wording import PLAIN, Wording, Words
from numdev.report.statistics import Interval, mean, ratio, sign_test, significant, slope, typical
from numdev.results.claim import BASELINE, COLUMNS, ClaimKind, ClaimStatement, Labels
from numdev.results.record import Reference
from numdev.results.store import EntryRole

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
    """A metric of the variant and, as `<metric>_other`, of its baseline, by point and replicate; keeps columns of the variant."""
    columns = ["key", "seed", metric]
    variant = select(rows, "variant", reference)[[*columns, "cluster", *kept]].drop_duplicates()
    baseline = select(rows, "baseline", reference)[columns].drop_duplicates()
    return variant.merge(baseline, on=["key", "seed"], suffixes=("", "_other"))


def over_baseline(rows: pd.DataFrame, metric: str) -> Interval:
    """The variant's deviation from golden over the baseline's, paired by point and replicate."""
    pairs = beside_baseline(rows, metric)
    return ratio(pairs[metric], pairs[f"{metric}_other"], pairs["seed"], pairs["cluster"])


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


def by_format(rows: pd.DataFrame, judge: Callable[[pd.DataFrame], Evidence]) -> Evidence:
    """Judges at BF16, or at the narrowest format of the rows, and adds the figures of the other formats to the sentence."""
    names = formats(rows)
    if not names:
        raise Undecidable("nothing was measured")
    main = "bf16" if "bf16" in names else names[0]
    evidence, others = judge(rows[rows["format"] == main]), []
    for name in (name for name in names if name != main):
        try:
            others.append(f"{name} {judge(rows[rows['format'] == name]).figure}")
        except Undecidable as reason:
            others.append(f"{name} unknown ({reason})")
    rest = f" Other formats: {'; '.join(others)}." if others else ""
    return replace(evidence, sentence=f"At {main}: {evidence.sentence}{rest}")


def claim_of(
    name: str, statement: ClaimStatement, words: Words = PLAIN, figure: str = "", table: str = "", names: Wording | None = None
) -> Claim:
    """The claim that a study's file states; `table` is that of its metric, `names` has what a reader calls the axes.

    `figure` is that of the study, for a claim that names none.
    """
    says = {Verdict(verdict): text for verdict, text in statement.says.items()}
    region = _region(statement) if statement.is_bounded and not statement.parts else None

    def test(rows: pd.DataFrame) -> Evidence:
        if statement.judge:
            bounds = {"region": region} if region else {}
            evidence: Evidence = resolve_name(statement.judge)(rows, **bounds, **statement.options)
        else:
            evidence = Weighing(statement, names or Wording()).evidence(rows)
        return replace(evidence, says=says)

    source, table = statement.source or OURS, statement.table or table
    return Claim(name, statement.figure or figure, statement.claim, source, test, statement.across, words, table, region)


def _region(claim: ClaimStatement) -> Region:
    """Where a claim on one value holds."""
    if claim.kind is ClaimKind.ORDER:
        return ABOVE
    if claim.kind is ClaimKind.SAME:
        margin = claim.margin or MARGIN
        return Region(1 / margin, margin)
    low, high = claim.above, claim.below
    return Region(-np.inf if low is None else low, np.inf if high is None else high)


class _Value(NamedTuple):
    """A value of a claim, its region, and how many of its pairs are larger; in a template its interval, or so many digits."""

    name: str
    interval: Interval
    pairs: str
    of: ClaimStatement

    @property
    def region(self) -> Region:
        """Where the claim holds of it."""
        return _region(self.of)

    def is_one(self) -> bool:
        """Whether a ratio is 1 in every measured replicate: seen, not inferred."""
        shares = self.interval.shares
        equal = all(share.mean == 0 and share.error in (0, np.inf) for share in shares)
        return bool(shares) and not self.interval.excluded and equal

    def __format__(self, digits: str) -> str:
        return significant(self.interval.estimate, int(digits)) if digits else self.interval.text()


_REST = "{averaged}.{left_out}{resolution}"
_RATIO = ("ratio {value}", "the ratio of {metric}{of} to that {to} is {value}" + _REST)
_USUAL = {
    ClaimKind.SLOPE: ("exponent {value}", "the exponent of {axis} in {metric} is {value}" + _REST),
    ClaimKind.RATIO: _RATIO,
    ClaimKind.SAME: _RATIO,
    ClaimKind.ORDER: ("{list}", "by {axis}, the ratios of {metric} are {list}" + _REST),
    None: ("{list}", "{list}.{left_out}"),
}
"""Templates of the figure and of the sentence where a claim has none of its own."""
_FROM = {
    Reference.GOLDEN: "from golden",
    Reference.GOLDEN_SAME_INPUTS: "from golden of the same rounded inputs",
    Reference.BASELINE: "from the baseline",
}
_METRICS = {DEVIATION: "max difference", EVERY: "RMSE", "mean_absolute": "mean of |D|", "std": "standard deviation of D"}


@dataclass(frozen=True)
class Weighing:
    """Weighs a claim, or a part of one, on the rows of one scenario; `names` has what a reader calls the axes."""

    claim: ClaimStatement
    names: Wording = Wording()

    def evidence(self, rows: pd.DataFrame) -> Evidence:
        """The evidence, at each number format where that is what the claim says.

        Raises:
            NotMeasured: if there are no points of which the claim speaks.
            Undecidable: if their rows cannot answer it.
        """
        own, several = self.at(self.of_output(rows), self.claim.where), self.claim.by_format
        if several is None:
            several = "format" in own and any(len(formats(self.at(own, side))) > 1 for side in self.sides)
        if several:
            return by_format(own, self.judge)
        evidence = self.judge(own)
        sentence = evidence.sentence if self.claim.finding else f"{evidence.sentence[0].upper()}{evidence.sentence[1:]}"
        return replace(evidence, sentence=sentence)

    def judge(self, rows: pd.DataFrame) -> Evidence:
        """The evidence of rows of one format, in the words of the claim."""
        claim, values = self.claim, list(self.values(rows))
        judged, beside = [value for value in values if value.of.is_bounded], None
        has_every = claim.column == DEVIATION and EVERY in rows
        if has_every if claim.rmse is None else claim.rmse:
            beside = replace(replace(self, claim=replace(claim.by(EVERY), rmse=False)).judge(rows), sentence="")
        shown = [value for value in values if value.of.each] or judged
        ends = sorted(shown, key=lambda value: value.interval.estimate)
        item, (result, finding) = claim.item or "{name} {value}", _USUAL[claim.kind]
        result, finding = claim.result or result, claim.finding or finding
        text: dict[str, Any] = self.words(rows) | {value.name: value for value in values}
        text |= {"list": ", ".join(item.format(name=value.name, value=value) for value in shown)}
        text |= {"low": ends[0], "high": ends[-1], "first": shown[0], "last": shown[-1]}
        text |= {"also": "".join(f" {value.of.also.format(value=value)}" for value in values if value.of.also)}
        text |= {"left_out": left_out(*(value.interval for value in values if not value.of.also)), "resolution": ""}
        if "{resolution}" in finding and has_every and claim.reference is Reference.BASELINE:
            text["resolution"] = resolution(rows)
        if "{means}" in finding:
            text["means"], text["sizes"] = self.means(rows)
        seen = None
        if all(value.of.margin == 1 for value in judged):
            seen = Verdict.HOLDS if all(value.is_one() for value in judged) else Verdict.FAILS
        questions = () if seen else tuple(Question(value.interval, value.region, value.of.condition) for value in judged)
        return Evidence(result.format_map(text), finding.format_map(text), questions, beside, seen=seen)

    def words(self, rows: pd.DataFrame) -> dict[str, str]:
        """The words that the usual templates name beside values."""
        claim = self.claim
        if isinstance(claim.to, str):
            other = "of the reference" if f"{BASELINE}_{claim.column}" in rows else "of the baseline"
        else:
            other = f"with {self.entries(claim.to)}"
        known, usual = _METRICS.get(claim.column), Wording().metric(claim.column, "", "")
        of, against = (f" of {claim.output}" if claim.output else ""), f" {_FROM[claim.reference]}" if "reference" in rows else ""
        metric = f"the {known or claim.column}{of}{against}"
        if "tensor" in rows:
            metric = f"the {known or usual} of all weights after the last step"
        elif known is None and not claim.output:
            metric = f"the {usual}"
        axes = [self.names.name(name) for name in self.open(rows) if rows[name].nunique() > 1]
        return {
            "axis": self.names.name(claim.over),
            "metric": metric,
            "of": f" with {self.entries(claim.of)}" if claim.of else "",
            "to": other,
            "averaged": f", averaged over {' and '.join(axes)}" if axes else "",
        }

    def entries(self, labels: Labels) -> str:
        """Entries of axes in words."""
        return ", ".join(f"{self.names.name(axis)} = {entry}" for axis, entry in labels.items())

    def values(self, rows: pd.DataFrame) -> Iterator[_Value]:
        """The values of each part that was measured."""
        for name, claim in self.claim.values().items():
            part = replace(self, claim=claim)
            own = part.at(part.of_output(rows), claim.where)
            try:
                yield from part.values_of(name, own)
            except Undecidable:
                if not claim.also:
                    raise

    def values_of(self, name: str, rows: pd.DataFrame) -> Iterator[_Value]:
        """The values of one part: of a ratio for each entry of an axis, of an order for each pair of neighbours."""
        claim = self.claim
        if claim.kind is ClaimKind.SLOPE:
            yield _Value(name, self.exponent(rows), "", claim)
            return
        sides: dict[str, tuple[Labels, Labels | str]] = {name: (claim.of, claim.to)}
        if claim.kind is ClaimKind.ORDER:
            sides = {f"{a} to {b}": ({claim.over: a}, {claim.over: b}) for a, b in pairwise(claim.order)}
        elif claim.each:
            own = self.subjects(rows)
            sides = {str(entry).replace("_", " "): ({**claim.of, claim.each: entry}, claim.to) for entry in own}
        for words, (of, to) in sides.items():
            yield _Value(words, *self.ratio(rows, of, to), claim)

    def subjects(self, rows: pd.DataFrame) -> list[Any]:
        """The entries for each of which the claim has to hold: numbers ascending, others in the order of the study."""
        column, role = f"{LABEL}{self.claim.each}", f"{ENTRY_ROLE}{self.claim.each}"
        own = rows[rows[role].isna()] if role in rows else rows
        entries = list(own[column].dropna().unique()) if column in own else []
        if not entries:
            raise Undecidable(f"no {self.names.name(self.claim.each)} could be measured here")
        return sorted(entries) if pd.api.types.is_numeric_dtype(own[column]) else entries

    def of_output(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows of the output that the claim names, as if it were the primary one; all, where it names none."""
        claim = self.claim
        if not claim.metric:
            return rows
        own = rows[rows["output"] == claim.output] if claim.output else rows
        if own.empty or claim.column not in own:
            raise NotMeasured(f"nothing was measured of {claim.metric}")
        return own.assign(**{PRIMARY: True})

    def at(self, rows: pd.DataFrame, labels: Labels) -> pd.DataFrame:
        """The rows of some entries."""
        for axis, entry in labels.items():
            column = _column(rows, axis)
            own = the_entry(rows, axis, EntryRole(entry["role"])) if isinstance(entry, dict) else entry
            if column not in rows:
                rows = rows.iloc[:0]
            elif isinstance(own, (int, float)) and not isinstance(own, bool):  # in tables of several studies it may be text
                rows = rows[pd.to_numeric(rows[column], errors="coerce") == own]
            else:
                rows = rows[rows[column].astype(str) == str(own)]
            if rows.empty:
                raise NotMeasured(f"nothing was measured with {self.entries({axis: own})}")
        return rows

    @property
    def sides(self) -> list[Labels]:
        """The entries of each group of points that is compared."""
        claim = self.claim
        if claim.kind is ClaimKind.ORDER:
            return [{claim.over: entry} for entry in claim.order]
        if claim.kind is ClaimKind.SLOPE:
            return [{}]
        return [claim.of] if isinstance(claim.to, str) else [claim.of, claim.to]

    def open(self, rows: pd.DataFrame) -> list[str]:
        """The columns of the axes that the claim does not name, and whose entry the named ones leave open."""
        claim = self.claim
        axes = {axis for side in (claim.where, *self.sides) for axis in side} | ({claim.over, claim.each} - {""})
        named = {_column(rows, axis) for axis in axes}
        columns = [name for name in _labels(rows) if name not in named and rows[name].notna().any()]
        derived = [name for name in named if name in rows and not name.startswith(LABEL)]
        return [name for name in columns if not any((rows.groupby(name)[own].nunique() == 1).all() for own in derived)]

    def replicates(self, rows: pd.DataFrame) -> pd.DataFrame:
        """One row for each replicate of each point, with its cluster.

        Raises:
            Undecidable: if there are none, or if some hold NaN or Inf.
        """
        metric = self.claim.column
        own = select(rows, reference=self.claim.reference.value) if "reference" in rows else rows
        if "tensor" in rows:  # all weights after the last step that the task states, or that a replicate reached
            own, runs = rows[rows["tensor"] == WHOLE], len(rows[["key", "seed"]].drop_duplicates())
            last = own["problem.steps"] if "problem.steps" in own else own.groupby("key")["step"].transform("max")
            own = own[own["step"] == last]
            if len(own) < runs:
                raise Undecidable(f"{runs - len(own)} of {runs} runs stopped before the last step")
        _refuse_broken(int((~np.isfinite(own[metric].astype(float))).sum()), len(own))
        by = [*_labels(own), *(name for name in ("key", "seed") if name in own)]
        if own.duplicated(by).any():  # of a kind of the user's own, whose columns tell further rows apart
            own = own.assign(**{metric: own.groupby(by, dropna=False)[metric].transform("mean")}).drop_duplicates(by)
        return _clustered(own)

    def exponent(self, rows: pd.DataFrame) -> Interval:
        """The exponent of an axis within the lines of the axes that the claim leaves open, or of a column of all points.

        Both coordinates of a point are divided by their geometric means over its replicate's line, so that lines of another
        height, or of which a point is lacking, do not tilt the common one. That of `u` is among the formats of the narrowest
        one's policy.
        """
        claim, metric = self.claim, self.claim.column
        column, words = _column(rows, claim.over), self.names.name(claim.over)
        if column not in (*rows, "u"):
            raise NotMeasured(f"nothing was measured over {words}")
        if claim.to == BASELINE:
            own = beside_baseline(rows, metric, claim.reference.value, *_labels(rows))
            own[metric] = (own[metric] / own[f"{metric}_other"]).where(own[f"{metric}_other"] > 0)
        else:
            own = self.replicates(rows)
        if column == "u":
            own = own[own["policy"].isin(own["policy"][own["format"] == formats(own)[0]])]
            units = own["format"].map({name: Format.parse(name).u for name in formats(own)}).astype(float)
            own = own.assign(u=units)[units >= _LEAST_U]
        own = own.assign(x=pd.to_numeric(own[column], errors="coerce")).dropna(subset="x")
        if own["x"].nunique() < 2:
            raise Undecidable(f"only one {words} was measured")
        usable = (own[metric] > 0) & np.isfinite(own[metric])
        logs = np.log(own.loc[usable, ["x", metric]].astype(float))
        apart = self.open(rows) if column.startswith(LABEL) else []
        line = [own.loc[usable, name] for name in (*apart, "seed")]
        centred = np.exp(logs - logs.groupby(line, dropna=False).transform("mean"))
        x, y = (own[name].astype(float).where(~usable, centred[name]) for name in ("x", metric))
        return slope(x, y, own["seed"], own["cluster"])

    def ratio(self, rows: pd.DataFrame, of: Labels, to: Labels | str) -> tuple[Interval, str]:
        """The metric at some entries over that at others, paired by replicate and by the entries of the axes left open.

        In place of others it may be that of the baseline, paired by point. With it, where the claim has words for pairs of one
        point, how many replicates are larger.
        """
        metric, rest = self.claim.column, ""
        above = self.at(rows, of)
        if isinstance(to, str) and f"{BASELINE}_{metric}" in rows:  # a figure of each run beside that of its reference
            pairs = self.replicates(above).rename(columns={f"{BASELINE}_{metric}": f"{metric}_other"})
        elif isinstance(to, str):
            pairs = beside_baseline(above, metric, self.claim.reference.value)
        else:
            first, second, on = self.replicates(above), self.replicates(self.at(rows, to)), [*self.open(rows), "seed"]
            pairs = first[[*on, "key", metric, "cluster"]].merge(second[[*on, "key", metric]], on=on, suffixes=("", "_other"))
            if pairs.empty:
                raise Undecidable(f"no replicate was measured with {self.entries(of)} and with {self.entries(to)}")
            if self.claim.same_point:
                same = pairs["key"] == pairs["key_other"]
                trivial = len(pairs[same].drop_duplicates(on[:-1]))
                pairs, rest = pairs[~same], f"; {self.claim.same_point.format(trivial)}" if trivial else ""
                if pairs.empty:
                    raise Undecidable(f"every point with {self.entries(of)} is one with {self.entries(to)}")
        times = ratio(pairs[metric], pairs[f"{metric}_other"], pairs["seed"], pairs["cluster"])
        return times, f"{_counted(pairs, metric)}{rest}.{left_out(times)}" if self.claim.same_point else ""

    def means(self, rows: pd.DataFrame) -> tuple[str, str]:
        """The metric at each entry of an order or of a slope, with its interval and in short."""
        claim = self.claim
        if claim.kind is ClaimKind.ORDER:
            own = {one: per_replicate(self.replicates(self.at(rows, {claim.over: one})), claim.column) for one in claim.order}
            each = {entry: typical(one["value"].tolist(), one["cluster"].tolist()) for entry, one in own.items()}
            sizes = ", ".join(significant(one.estimate) for one in each.values())
            return ", ".join(f"{entry} {one.text()}" for entry, one in each.items()), sizes
        at = self.replicates(rows).groupby(_column(rows, claim.over), sort=True)[claim.column].mean()
        places = [str(int(place)) if isinstance(place, float) and place.is_integer() else str(place) for place in at.index]
        steps = ", ".join(f"{significant(float(value))} at {place}" for place, value in zip(places, at, strict=True))
        return steps, steps


def _labels(rows: pd.DataFrame) -> list[str]:
    return [str(name) for name in rows if str(name).startswith(LABEL)]


def _column(rows: pd.DataFrame, axis: str) -> str:
    return axis if axis in COLUMNS and f"{LABEL}{axis}" not in rows else f"{LABEL}{axis}"


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


def _counted(pairs: pd.DataFrame, metric: str) -> str:
    """How many replicates are larger; pairs of one replicate are one trial of the sign test, by their mean."""
    if (pairs[metric] == pairs[f"{metric}_other"]).all():
        return f"exactly equal in all {len(pairs)} pairs"
    with np.errstate(divide="ignore"):
        logs = (pairs[metric] / pairs[f"{metric}_other"]).fillna(1.0).transform(np.log)  # two zeros are a ratio of 1
    ways = np.sign(logs.groupby(pairs["seed"]).mean())
    larger, smaller = int((ways > 0).sum()), int((ways < 0).sum())
    test = "" if pairs["cluster"].nunique() > 1 else f" (sign test p = {sign_test(larger, smaller):.2g})"  # heads are no trials
    return f"larger in {larger}, equal in {int((ways == 0).sum())} of {len(ways)} replicates{test}"
