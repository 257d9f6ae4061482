"""A claim as a study's file states it, and its manifest keeps it: a sentence, what is compared, and when it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from string import Formatter
from typing import Any

from numdev.errors import BadInput
from numdev.results.record import Reference, plain
from numdev.settings import make

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


_OWN: dict[ClaimKind, tuple[str, ...]] = {
    ClaimKind.SLOPE: ("over", "above", "below"),
    ClaimKind.RATIO: ("of", "to", "above", "below"),
    ClaimKind.ORDER: ("over", "order"),
    ClaimKind.SAME: ("of", "to", "margin"),
}
"""The fields of one kind alone; a slope may be that of a ratio to the baseline."""


@dataclass(frozen=True)
class ClaimStatement:
    """A claim in a study's file; a claim on several values has parts, and holds if it holds of each.

    The texts `result` and `finding` are templates of `str.format`. `{value}`, or the name of a part, is a value with its
    interval, `{value:2}` its estimate with two digits; `numdev.report.claims.evidence` has what else they may name.

    Raises:
        BadInput: naming the field that is missing, or that a claim of this kind cannot have.
    """

    claim: str  # the sentence
    kind: ClaimKind | None = None  # None of a claim whose `judge` weighs it
    metric: str = ""  # what is compared, as `output.metric`
    reference: Reference = Reference.GOLDEN
    name: str = ""  # by which other studies list it; its place in the study unless given
    source: str = ""  # where the claim is made; empty where the study makes it
    figure: str = ""  # the name of the figure that shows it; that of the study unless given
    where: Labels = field(default_factory=dict)  # entries of the points of which it speaks; every entry of an axis not named
    over: str = ""  # the axis of a slope or of an order
    order: tuple[Any, ...] = ()  # entries of that axis, the one with the largest metric first
    of: Labels = field(default_factory=dict)  # the entries that are compared; it may be empty where `to` is `BASELINE`
    to: Labels | str = ""  # with which they are compared: other entries of the same axes, or `BASELINE`
    above: float | None = None  # the exponent or ratio above which the claim holds
    below: float | None = None  # the one below which it holds; with `above`, between the two
    # The factor within which a ratio is the same as 1; None for that of `numdev.report.claims.verdicts.MARGIN`; 1 where the
    # numbers of the measured replicates have to be equal, which says nothing of others.
    margin: float | None = None
    each: str = ""  # an axis, for each of whose entries the claim has to hold; of entries with roles, the subjects
    # Fields in which each part differs, by its name; a part without bounds is told and decides nothing.
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    condition: bool = False  # whether a part only makes the others worth judging: unless it is met, the claim is undecided
    also: str = ""  # a sentence on a part that need not be measured; empty for one without which nothing can be said
    by_format: bool | None = None  # whether BF16 is judged and other formats are told; where there are several, unless given
    rmse: bool | None = None  # whether RMSE is judged too; where the metric is the largest difference, unless given
    same_point: str = ""  # words for `{}` pairs of one point under two labels, which are left out where this is given
    result: str = ""  # the measured figure; a usual one unless given
    finding: str = ""  # the sentence on it
    item: str = ""  # one of several values in it
    says: Mapping[str, str] = field(default_factory=dict)  # what a verdict means, in words before the sentence, by verdict
    judge: str = ""  # the function, as `module:name`, that weighs the rows of a scenario, for what no kind can say
    options: Mapping[str, Any] = field(default_factory=dict)  # its further arguments
    across: bool = False  # whether it compares the scenarios, so that the claim is judged once, on all of them
    table: str = ""  # of the records whose rows it weighs; the primary one unless given

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

    def values(self, where: str = "claim") -> dict[str, ClaimStatement]:
        """A claim on one value for each part; the claim itself where it has none. Errors name the part, behind `where`."""
        whole = plain(self) | {"parts": {}, "result": "", "finding": "", "judge": ""}
        parts = {name: {**whole, **own} for name, own in self.parts.items()}
        return {name: ClaimStatement.read(own, f"{where}.parts.{name}") for name, own in parts.items()} or {"value": self}

    def by(self, column: str) -> ClaimStatement:
        """The claim on another metric of the same outputs."""

        def other(own: Mapping[str, Any]) -> dict[str, str]:
            return {"metric": ".".join(filter(None, (own["metric"].rpartition(".")[0], column)))} if "metric" in own else {}

        parts = {name: {**own, **other(own)} for name, own in self.parts.items()}
        return replace(self, metric=other({"metric": self.metric})["metric"], parts=parts)

    @staticmethod
    def read(kept: Mapping[str, Any], where: str = "claim") -> ClaimStatement:
        """The claim that a file or manifest has, see `numdev.results.record.plain`."""
        known = ClaimStatement.__dataclass_fields__  # a manifest of another version may have others
        return make(ClaimStatement, {name: value for name, value in kept.items() if name in known and value is not None}, where)


@dataclass(frozen=True)
class Pilot:
    """What is known before a study is measured, by claim: estimate and 95 % interval of each value, as a report prints them.

    Raises:
        BadInput: naming the claim, for what is no interval.
    """

    source: str  # where it was measured, for the reader
    seeds: int  # replicates behind each interval
    ratios: Mapping[str, Any] = field(default_factory=dict)  # intervals that are symmetric in logarithms, as of a ratio
    values: Mapping[str, Any] = field(default_factory=dict)  # of an exponent, or of a difference

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise BadInput("pilot.seeds", self.seeds, "give at least 2; one replicate has no interval")
        for name, own in [*self.ratios.items(), *self.values.items()]:
            for one in own if isinstance(own, list) and own else [own]:
                is_interval = isinstance(one, list) and len(one) == 3 and one[1] < one[0] < one[2]
                if not is_interval or (name in self.ratios and one[1] <= 0):
                    raise BadInput(f"pilot.{name}", one, "give estimate, low and high of each value, as in [[0.06, 0.01, 0.35]]")

    def intervals(self, claim: str) -> list[tuple[float, float, float]]:
        """Those of the values of a claim; none where nothing is known of it."""
        return [(one[0], one[1], one[2]) for one in self.ratios.get(claim) or self.values.get(claim) or ()]


def named(study: str, claims: tuple[str | ClaimStatement, ...]) -> dict[str, ClaimStatement | None]:
    """The claims of a study by name; one without a name is called after its place, and one that another study states has None."""
    return {
        one if isinstance(one, str) else one.name or f"{study}_{place}": None if isinstance(one, str) else one
        for place, one in enumerate(claims, 1)
    }
