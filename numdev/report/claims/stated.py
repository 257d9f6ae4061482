"""The evidence for a claim that a study's file states, by the rules of all claims.

What the claim leaves open is averaged as everywhere: several points of one replicate count once, and they are paired by the
entries of the axes that the claim does not name. Where what is compared has several number formats, the verdict is that at BF16,
or at the narrowest. A claim on the largest difference is judged by RMSE too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from numdev.report.claims.claim import OURS, Claim
from numdev.report.claims.comparisons import DEVIATION, EVERY, clustered, over_baseline, resolution
from numdev.report.claims.finding import (
    ABOVE,
    MARGIN,
    Evidence,
    NotMeasured,
    Question,
    Region,
    Undecidable,
    Verdict,
    by_format,
    equal,
    left_out,
    select,
)
from numdev.report.reading.frames import at_the_end
from numdev.report.reading.scenarios import LABEL, PRIMARY, formats
from numdev.report.reading.wording import PLAIN, Wording, Words
from numdev.report.statistics.estimates import Interval, ratio, slope
from numdev.results.manifest import BASELINE, ClaimKind, Labels, Reference, StatedClaim

_FROM = {
    Reference.GOLDEN: "from golden",
    Reference.SAME_INPUTS: "from golden of the same rounded inputs",
    Reference.BASELINE: "from the baseline",
}
_PLAIN_NAMES = Wording()
_WORDS = {DEVIATION: "max difference", EVERY: "RMSE", "mean_absolute": "mean of |D|", "std": "standard deviation of D"}


def claim_of(name: str, stated: StatedClaim, words: Words = PLAIN, table: str = "", names: Wording = _PLAIN_NAMES) -> Claim:
    """The claim that a study's file states, on a table of its records; where it names no source, the study makes it.

    `names` has what a reader calls the axes, as they stand in figures.
    """
    source = stated.source or OURS
    return Claim(
        name, "", stated.claim, source, partial(weigh, stated, names=names), is_ours=not stated.source, words=words, table=table
    )


def weigh(stated: StatedClaim, rows: pd.DataFrame, names: Wording = _PLAIN_NAMES) -> Evidence:
    """The evidence on the rows of one scenario.

    Raises:
        NotMeasured: if there are no points of which the claim speaks.
        Undecidable: if their rows cannot answer it.
    """
    own = _at(_of_output(rows, stated), stated.where, names)
    judge = partial(_judge, stated, names)
    several = "format" in own and any(len(formats(_at(own, side, names))) > 1 for side in _sides(stated))
    return by_format(own, judge) if several else _sentence_first(judge(own))


def _sentence_first(found: Evidence) -> Evidence:
    sentence = f"{found.sentence[0].upper()}{found.sentence[1:]}"
    return replace(found, sentence=sentence)


def _of_output(rows: pd.DataFrame, stated: StatedClaim) -> pd.DataFrame:
    """The rows of the output that the claim names, as if it were the primary one; all, where it names none."""
    found = rows[rows["output"] == stated.output] if stated.output else rows
    if found.empty or stated.column not in found:
        raise NotMeasured(f"nothing was measured of {stated.metric}")
    return found.assign(**{PRIMARY: True})


def _replicates(rows: pd.DataFrame, stated: StatedClaim) -> pd.DataFrame:
    """One row for each replicate of each point, with its cluster.

    Raises:
        Undecidable: if there are none, or if some hold NaN or Inf.
    """
    metric = stated.column
    found = select(rows, reference=stated.reference.value) if "reference" in rows else rows
    if "tensor" in rows:
        found, runs = at_the_end(rows), len(rows[["key", "seed"]].drop_duplicates())
        if len(found) < runs:
            raise Undecidable(f"{runs - len(found)} of {runs} runs stopped before the last step")
    if broken := int((~np.isfinite(found[metric].astype(float))).sum()):
        raise Undecidable(f"{broken} of {len(found)} replicates hold NaN or infinite values")
    by = [str(name) for name in found if str(name).startswith(LABEL) or name in ("key", "seed")]
    if found.duplicated(by).any():  # of a kind of the user's own, whose columns tell further rows apart
        found = found.assign(**{metric: found.groupby(by, dropna=False)[metric].transform("mean")}).drop_duplicates(by)
    return clustered(found)


def _at(rows: pd.DataFrame, labels: Labels, names: Wording) -> pd.DataFrame:
    """The rows of some entries."""
    for axis, entry in labels.items():
        column = f"{LABEL}{axis}"
        rows = rows[_is_entry(rows[column], entry)] if column in rows else rows.iloc[:0]
        if rows.empty:
            raise NotMeasured(f"nothing was measured with {_told({axis: entry}, names)}")
    return rows


def _is_entry(values: pd.Series[Any], entry: Any) -> pd.Series[bool]:
    """Where a column of labels has an entry; in the tables of several studies numbers may have become text."""
    if isinstance(entry, (int, float)) and not isinstance(entry, bool):
        return pd.to_numeric(values, errors="coerce") == entry
    return values.astype(str) == str(entry)


def _told(labels: Labels, names: Wording) -> str:
    return ", ".join(f"{names.name(axis)} = {entry}" for axis, entry in labels.items())


def _sides(stated: StatedClaim) -> list[Labels]:
    """The entries of each group of points that is compared."""
    if stated.kind is ClaimKind.ORDER:
        return [{stated.over: entry} for entry in stated.order]
    if stated.kind is ClaimKind.SLOPE:
        return [{}]
    return [stated.of] if isinstance(stated.to, str) else [stated.of, stated.to]


def _named(stated: StatedClaim) -> set[str]:
    """The axes that the claim names."""
    return {axis for side in (stated.where, *_sides(stated)) for axis in side} | ({stated.over} - {""})


@dataclass(frozen=True)
class _Answer:
    """What was measured: the figure, the sentence with `{metric}` in it, and the intervals with the region of each.

    `seen` is the verdict of a claim about the measured replicates alone; see `Evidence`.
    """

    figure: str
    sentence: str
    questions: tuple[Question, ...]
    seen: Verdict | None = None

    def evidence(self, sentence: str = "", beside: Evidence | None = None) -> Evidence:
        return Evidence(self.figure, sentence, () if self.seen else self.questions, beside, seen=self.seen)

    @property
    def intervals(self) -> list[Interval]:
        return [question.value for question in self.questions]


def _judge(stated: StatedClaim, names: Wording, rows: pd.DataFrame) -> Evidence:
    answer = _ANSWERS[stated.kind](stated, rows, names)
    rest = left_out(*answer.intervals)
    beside = None
    if stated.column == DEVIATION and EVERY in rows:
        every = _ANSWERS[stated.kind](stated.by(EVERY), rows, names)
        beside = every.evidence()
        rest += resolution(rows) if stated.reference is Reference.BASELINE else ""
    sentence = answer.sentence.replace("{metric}", _metric(stated, rows))
    return answer.evidence(f"{sentence}{_averaged(rows, stated, names)}.{rest}", beside)


def _metric(stated: StatedClaim, rows: pd.DataFrame) -> str:
    """What is compared, in words."""
    known = _WORDS.get(stated.column)
    if "tensor" in rows:
        return f"the {known or Wording().metric(stated.column, '', '')} of all weights after the last step"
    if known is None and not stated.output:
        return f"the {Wording().metric(stated.column, '', '')}"
    of = f" of {stated.output}" if stated.output else ""
    against = f" {_FROM[stated.reference]}" if "reference" in rows else ""
    return f"the {known or stated.column}{of}{against}"


def _averaged(rows: pd.DataFrame, stated: StatedClaim, names: Wording) -> str:
    """Over which axes the claim averages."""
    axes = [names.name(name) for name in _open(rows, stated) if rows[name].nunique() > 1]
    return f", averaged over {' and '.join(axes)}" if axes else ""


def _open(rows: pd.DataFrame, stated: StatedClaim) -> list[str]:
    """The columns of the axes that the claim does not name."""
    named = {f"{LABEL}{axis}" for axis in _named(stated)}
    return [str(name) for name in rows if str(name).startswith(LABEL) and name not in named and rows[name].notna().any()]


def _slope(stated: StatedClaim, rows: pd.DataFrame, names: Wording) -> _Answer:
    exponent = _exponent(stated, rows, names)
    sentence = f"the exponent of {names.name(stated.over)} in {{metric}} is {exponent.text()}"
    return _Answer(f"exponent {exponent.text()}", sentence, (Question(exponent, _between(stated)),))


def _exponent(stated: StatedClaim, rows: pd.DataFrame, names: Wording) -> Interval:
    """The exponent of an axis within the lines of the axes that the claim leaves open.

    Both coordinates of a point are divided by their geometric means over its replicate's line, so that lines of another height,
    or of which a point is lacking, do not tilt the common one.
    """
    column, metric = f"{LABEL}{stated.over}", stated.column
    if column not in rows:
        raise NotMeasured(f"nothing was measured over {names.name(stated.over)}")
    found = _replicates(rows, stated)
    found = found.assign(x=pd.to_numeric(found[column], errors="coerce")).dropna(subset="x")
    if found["x"].nunique() < 2:
        raise Undecidable(f"only one {names.name(stated.over)} was measured")
    usable = (found[metric] > 0) & np.isfinite(found[metric])
    logs = np.log(found.loc[usable, ["x", metric]].astype(float))
    line = [found.loc[usable, name] for name in (*_open(rows, stated), "seed")]
    centred = np.exp(logs - logs.groupby(line, dropna=False).transform("mean"))
    x, y = (found[name].astype(float).where(~usable, centred[name]) for name in ("x", metric))
    return slope(x, y, found["seed"], found["cluster"])


def _ratio(stated: StatedClaim, rows: pd.DataFrame, names: Wording) -> _Answer:
    return _of_ratio(stated, rows, _between(stated), names)


def _same(stated: StatedClaim, rows: pd.DataFrame, names: Wording) -> _Answer:
    margin = stated.margin or MARGIN
    answer = _of_ratio(stated, rows, Region(1 / margin, margin), names)
    return replace(answer, seen=equal(answer.questions[0].value)) if margin == 1 else answer


def _of_ratio(stated: StatedClaim, rows: pd.DataFrame, region: Region, names: Wording) -> _Answer:
    if isinstance(stated.to, str) and f"{BASELINE}_{stated.column}" in rows:
        times = _over_reference(_replicates(_at(rows, stated.of, names), stated), stated.column)
        other = "of the reference"
    elif isinstance(stated.to, str):
        times = over_baseline(_at(rows, stated.of, names), stated.column, stated.reference.value)
        other = f"of the {BASELINE}"
    else:
        times = _times(stated, rows, (stated.of, stated.to), names)
        other = f"with {_told(stated.to, names)}"
    first = f" with {_told(stated.of, names)}" if stated.of else ""
    sentence = f"the ratio of {{metric}}{first} to that {other} is {times.text()}"
    return _Answer(f"ratio {times.text()}", sentence, (Question(times, region),))


def _over_reference(rows: pd.DataFrame, metric: str) -> Interval:
    """A figure of each run over that of its reference, which stands in the same row."""
    return ratio(rows[metric], rows[f"{BASELINE}_{metric}"], rows["seed"], rows["cluster"])


def _order(stated: StatedClaim, rows: pd.DataFrame, names: Wording) -> _Answer:
    told, questions = [], []
    for larger, smaller in pairwise(stated.order):
        times = _times(stated, rows, ({stated.over: larger}, {stated.over: smaller}), names)
        told.append(f"{larger} to {smaller} {times.text()}")
        questions.append(Question(times, ABOVE))
    return _Answer(
        ", ".join(told), f"by {names.name(stated.over)}, the ratios of {{metric}} are {', '.join(told)}", tuple(questions)
    )


def _times(stated: StatedClaim, rows: pd.DataFrame, sides: tuple[Labels, Labels], names: Wording) -> Interval:
    """The metric at some entries over that at others, paired by replicate and by the entries of the axes left open."""
    above, below = (_replicates(_at(rows, side, names), stated) for side in sides)
    paired, metric = [*_open(rows, stated), "seed"], stated.column
    pairs = above[[*paired, metric, "cluster"]].merge(below[[*paired, metric]], on=paired, suffixes=("", "_other"))
    if pairs.empty:
        raise Undecidable(f"no replicate was measured with {' and with '.join(_told(side, names) for side in sides)}")
    return ratio(pairs[metric], pairs[f"{metric}_other"], pairs["seed"], pairs["cluster"])


def _between(stated: StatedClaim) -> Region:
    bounds: Mapping[str, float | None] = {"low": stated.above, "high": stated.below}
    return Region(**{name: bound for name, bound in bounds.items() if bound is not None})


_ANSWERS = {ClaimKind.SLOPE: _slope, ClaimKind.RATIO: _ratio, ClaimKind.ORDER: _order, ClaimKind.SAME: _same}
