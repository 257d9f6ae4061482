"""A claim as a study's file states it, and its manifest keeps it: a sentence, what is compared, and when it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from string import Formatter
from typing import Any

from numdev.errors import BadInput

BASELINE = "baseline"
"""The value of `to` where the points are compared with their own baselines."""
COLUMNS = ("format", "policy", "u", "tiling.area")
"""Names beside the axes of a study that a claim may use: columns of every point, and the unit roundoff of its format."""

WORDS = (
    *("list", "low", "high", "first", "last", "means", "sizes", "also", "left_out", "resolution"),
    *("averaged", "axis", "metric", "of", "to"),
)
"""Names in the templates of a claim beside its values; `numdev.report.claims.evidence` says what they are."""

Labels = Mapping[str, Any]  # entries by axis; `{role: NAME}` is the one entry that the study declares to have a role


class ClaimKind(Enum):
    """The kind of comparison."""

    SLOPE = "slope"  # the exponent b of metric ~ axis^b
    RATIO = "ratio"  # the metric of some points over that of others
    ORDER = "order"  # entries of an axis, from the largest metric to the smallest
    SAME = "same"  # the ratio is 1 within a margin


class Reference(Enum):
    """The reference of a deviation."""

    GOLDEN = "golden"
    SAME_INPUTS = "golden_same_inputs"
    BASELINE = "baseline"


_OWN: dict[ClaimKind, tuple[str, ...]] = {
    ClaimKind.SLOPE: ("over", "above", "below"),
    ClaimKind.RATIO: ("of", "to", "above", "below"),
    ClaimKind.ORDER: ("over", "order"),
    ClaimKind.SAME: ("of", "to", "margin"),
}
"""The fields of one kind alone; a slope may be that of a ratio to the baseline."""


@dataclass(frozen=True)
class ClaimStatement:
    """A claim in a study's file.

    The texts `result` and `finding` are templates of `str.format`. `{value}`, or the name of a part, is a value with its
    interval, `{value:2}` its estimate with two digits; `numdev.report.claims.evidence` has what else they may name.

    Attributes:
        claim: the sentence.
        kind: see `ClaimKind`; a claim has none whose `judge` weighs it.
        metric: what is compared, as `output.metric`.
        name: by which other studies list it; its place in the study unless given.
        source: where the claim is made; empty where the study makes it.
        figure: the name of the figure that shows it; that of the study unless given.
        reference: see `Reference`.
        where: the entries of the points of which the claim speaks; every entry of an axis that is not named.
        over: the axis of a slope or of an order.
        order: entries of that axis, the one with the largest metric first.
        of: the entries that are compared; it may be empty where `to` is `BASELINE`.
        to: with which they are compared: other entries of the same axes, or `BASELINE`.
        above: the exponent or ratio above which the claim holds.
        below: the one below which it holds; with `above`, between the two.
        margin: the factor within which a ratio is the same as 1; None for that of `numdev.report.claims.verdicts.MARGIN`; 1 where
            the numbers of the measured replicates have to be equal, which says nothing of others.
        each: an axis, for each of whose entries the claim has to hold; of entries with roles, the subjects.
        parts: of a claim on several values, the fields in which each differs, by name. It holds if it holds of each; a part
            without bounds is told and decides nothing.
        condition: whether a part only makes the others worth judging: where it is not met, the claim is undecided.
        also: a sentence on a part that need not be measured; empty for one without which nothing can be said.
        by_format: whether the claim is judged at BF16 and told at other formats; where there are several, unless given.
        rmse: whether it is judged by RMSE too; where the metric is the largest difference, unless given.
        same_point: words for `{}` pairs of one and the same point under two labels, which are left out where this is given.
        result, finding, item: the measured figure, the sentence on it, and one of several values in it; usual ones unless given.
        says: what a verdict means, in words that stand before the sentence, by verdict.
        judge: the function, as `module:name`, that weighs the rows of a scenario, for what no kind can say.
        options: its further arguments.
        across: whether the scenarios are what the function compares, so that the claim is judged once, on all of them.
        table: of the records whose rows the function weighs; the primary one unless given.

    Raises:
        BadInput: naming the field that is missing, or that a claim of this kind cannot have.
    """

    claim: str
    kind: ClaimKind | None = None
    metric: str = ""
    reference: Reference = Reference.GOLDEN
    name: str = ""
    source: str = ""
    figure: str = ""
    where: Labels = field(default_factory=dict)
    over: str = ""
    order: tuple[Any, ...] = ()
    of: Labels = field(default_factory=dict)
    to: Labels | str = ""
    above: float | None = None
    below: float | None = None
    margin: float | None = None
    each: str = ""
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    condition: bool = False
    also: str = ""
    by_format: bool | None = None
    rmse: bool | None = None
    same_point: str = ""
    result: str = ""
    finding: str = ""
    item: str = ""
    says: Mapping[str, str] = field(default_factory=dict)
    judge: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    across: bool = False
    table: str = ""

    def __post_init__(self) -> None:
        if not self.claim.strip():
            raise BadInput("claim", self.claim, "give the claim as a sentence")
        if not self.judge:
            self._check_texts()
        if self.judge or self.parts:
            return
        if self.kind is None:
            raise BadInput("kind", None, f"use one of {', '.join(kind.value for kind in ClaimKind)}")
        for name, hint in (*self._faults(self.kind), *self._bad_bounds(self.kind)):
            value = getattr(self, name)
            plain = value.value if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value
            raise BadInput(name, plain, hint)

    def _check_texts(self) -> None:
        """Refuse a template that names what there is not."""
        of_value, of_claim = ("name", "value"), (*(self.parts or ("value",)), *WORDS)
        known = {"result": of_claim, "finding": of_claim, "item": of_value, "also": of_value, "same_point": ("",)}
        for name, words in known.items():
            text = getattr(self, name)
            try:
                keys = [key.partition(".")[0] for _, key, _, _ in Formatter().parse(text) if key is not None]
            except ValueError:
                raise BadInput(name, text, "give every brace a partner, as in {value}") from None
            if unknown := [key for key in keys if key not in words]:
                raise BadInput(name, text, f"it may name {', '.join(words)}, and not {unknown[0]}")

    def _faults(self, kind: ClaimKind) -> Iterator[tuple[str, str]]:
        """Each field that a claim of this kind cannot have so, and what to do."""
        own, to = _OWN[kind], self.to
        foreign = dict.fromkeys(name for names in _OWN.values() for name in names if name not in own)
        for name in foreign if (kind, to) != (ClaimKind.SLOPE, BASELINE) else foreign.keys() - {"to"}:
            if getattr(self, name) not in (None, "", (), {}):
                yield name, f"a claim of the kind {kind.value} has {', '.join(own)}; leave it out"
        if "over" in own and not self.over:
            yield "over", "give an axis of the study"
        if self.over in self.where:
            yield "where", f"it leaves one entry of {self.over}, which the claim compares; leave that out"
        if kind is ClaimKind.ORDER and len(set(map(str, self.order))) < max(2, len(self.order)):
            yield "order", f"give two or more different entries of {self.over}, the largest metric first"
        if "of" not in own:
            return
        if to in ("", {}) or (isinstance(to, str) and to != BASELINE):
            yield "to", f"give entries of axes, {{axis: entry}}, or {BASELINE}"
        if isinstance(to, str) and self.reference is Reference.BASELINE:
            yield "reference", "a baseline does not deviate from itself; give golden or golden_same_inputs"
        others = {} if isinstance(to, str) else to
        for side, entries in (("of", self.of), ("to", others)):
            if both := [axis for axis in entries if axis in self.where]:
                yield "where", f"{side} states {', '.join(both)} too; leave it out of one of them"
        if others and set(self.of) | ({self.each} - {""}) != set(others):
            yield "of", f"name the same axes as in to, which are {', '.join(others)}"
        if others and dict(self.of) == dict(others):
            yield "to", "it is the same as of; give other entries"

    def _bad_bounds(self, kind: ClaimKind) -> Iterator[tuple[str, str]]:
        for name in ("above", "below", "margin"):
            bound = getattr(self, name)
            if bound is not None and not math.isfinite(bound):
                yield name, "give a finite number"
            if kind is ClaimKind.RATIO and bound is not None and bound <= 0:
                yield name, "a ratio of deviations is positive; give a positive number"
        if self.above is not None and self.below is not None and self.above >= self.below:
            yield "below", f"nothing lies between above and below; give a number above {self.above:g}"
        if self.margin is not None and self.margin < 1:
            yield "margin", "give the factor within which two are the same, above 1, or 1 for equal numbers"

    @property
    def is_bounded(self) -> bool:
        """Whether it says when it holds; a part of a claim need not."""
        return self.kind in (ClaimKind.ORDER, ClaimKind.SAME) or self.above is not None or self.below is not None

    @property
    def output(self) -> str:
        """The output whose metric it is."""
        return self.metric.rpartition(".")[0]

    @property
    def column(self) -> str:
        """The metric without the output."""
        return self.metric.rpartition(".")[2]

    def values(self) -> dict[str, ClaimStatement]:
        """A claim on one value for each part; the claim itself where it has none."""
        whole = replace(self, parts={}, result="", finding="", judge="-")  # which checks nothing
        return {name: replace(whole, judge="", **_typed(own)) for name, own in self.parts.items()} or {"value": self}

    def by(self, column: str) -> ClaimStatement:
        """The claim on another metric of the same outputs."""

        def other(metric: str) -> str:
            return ".".join(filter(None, (metric.rpartition(".")[0], column)))

        parts = {
            name: {**own, **({"metric": other(own["metric"])} if "metric" in own else {})} for name, own in self.parts.items()
        }
        return replace(self, metric=other(self.metric), parts=parts)

    @staticmethod
    def read(kept: Mapping[str, Any]) -> ClaimStatement:
        """The claim that a manifest keeps, see `numdev.results.manifest.plain`."""
        return ClaimStatement(**_typed({one.name: kept[one.name] for one in fields(ClaimStatement) if one.name in kept}))


def _typed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as the class has them."""
    makes: dict[str, Any] = {"kind": ClaimKind, "reference": Reference, "order": tuple}
    return {name: makes[name](value) if name in makes and value is not None else value for name, value in plain.items()}


def named(study: str, claims: tuple[str | ClaimStatement, ...]) -> dict[str, ClaimStatement | None]:
    """The claims of a study by name; one without a name is called after its place, and one that another study states has None."""
    return {
        one if isinstance(one, str) else one.name or f"{study}_{place}": None if isinstance(one, str) else one
        for place, one in enumerate(claims, 1)
    }
