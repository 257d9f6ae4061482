"""The manifest of a study, of a sweep or of single points, which says what belongs to it: points, scenarios, claims.

All three have one form, plain data for JSON, so that a report reads them alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from numdev.errors import BadInput
from numdev.results.record import describe

BASELINE = "baseline"
"""The value of `to` where the points are compared with their own baselines."""

Labels = Mapping[str, Any]  # entries by axis


class EntryRole(Enum):
    """What an entry of an axis is to the claims that compare the entries."""

    SUBJECT = "subject"  # what the claims speak of
    EXPECTED = "expected"  # what the claims say the subjects are like
    CONTROL = "control"  # what the subjects have to differ from for the comparison to mean anything
    ASIDE = "aside"  # measured beside the others and not judged


class Role(Enum):
    """What a scenario is to the source of a study's claims."""

    PAPER = "paper"  # the source states these circumstances
    ASSUMED = "assumed"  # the source leaves them open, and they are our assumption about it
    BEYOND = "beyond"  # where else we look
    CONTROL = "control"  # what the others are held against


@dataclass(frozen=True)
class Scenario:
    """Circumstances under which a study repeats its question.

    Attributes:
        name: in the study's file.
        title: what they are, for a reader: "uniform inputs, every step in F, FlashAttention-1".
        role: see `Role`.
        stands_for: the row of the source's table that this scenario repeats, where the claim is on a table.
    """

    name: str
    title: str
    role: Role = Role.BEYOND
    stands_for: str = ""


def scenarios_of(manifest: Mapping[str, Any]) -> dict[str, Scenario]:
    """The scenarios of a stored study, by name.

    A study whose points the command line changed is not what its source describes: all its scenarios lie beyond that, and
    their titles say what was changed.
    """
    scenarios = {}
    for own in manifest["scenarios"]:
        title, role = own["title"], Role(own["role"])
        if manifest["overrides"]:
            title, role = f"{title}, with overrides: {' '.join(manifest['overrides'])}", Role.BEYOND
        scenarios[own["name"]] = Scenario(own["name"], title, role, own.get("stands_for", ""))
    return scenarios


class ClaimKind(Enum):
    """What a claim compares."""

    SLOPE = "slope"  # the exponent b of metric ~ axis^b
    RATIO = "ratio"  # the metric of some points over that of others
    ORDER = "order"  # entries of an axis, from the largest metric to the smallest
    SAME = "same"  # the ratio is 1 within a margin


class Reference(Enum):
    """What the metric is a deviation from."""

    GOLDEN = "golden"
    SAME_INPUTS = "golden_same_inputs"
    BASELINE = "baseline"


_OWN: dict[ClaimKind, tuple[str, ...]] = {
    ClaimKind.SLOPE: ("over", "above", "below"),
    ClaimKind.RATIO: ("of", "to", "above", "below"),
    ClaimKind.ORDER: ("over", "order"),
    ClaimKind.SAME: ("of", "to", "margin"),
}
"""The fields of one kind alone."""


@dataclass(frozen=True)
class StatedClaim:
    """A claim that a study's file states.

    Attributes:
        claim: the sentence.
        kind: see `ClaimKind`.
        metric: what is compared, as `output.metric`.
        reference: see `Reference`.
        source: where the claim is made; empty where the study makes it.
        where: the entries of the points of which the claim speaks; every entry of an axis that is not named.
        over: the axis of a slope or of an order.
        order: entries of that axis, the one with the largest metric first.
        of: the entries that are compared; it may be empty where `to` is `BASELINE`.
        to: with which they are compared: other entries of the same axes, or `BASELINE`.
        above: the exponent or ratio above which the claim holds.
        below: the one below which it holds; with `above`, between the two.
        margin: the factor within which a ratio is the same as 1; None for that of `numdev.report.claims.finding.MARGIN`; 1 where
            the numbers of the measured replicates have to be equal, which says nothing of others.

    Raises:
        BadInput: naming the field that is missing, or that a claim of this kind cannot have.
    """

    claim: str
    kind: ClaimKind
    metric: str
    reference: Reference = Reference.GOLDEN
    source: str = ""
    where: Labels = field(default_factory=dict)
    over: str = ""
    order: tuple[Any, ...] = ()
    of: Labels = field(default_factory=dict)
    to: Labels | str = ""
    above: float | None = None
    below: float | None = None
    margin: float | None = None

    def __post_init__(self) -> None:
        if not self.claim.strip():
            raise BadInput("claim", self.claim, "give the claim as a sentence")
        own = _OWN[self.kind]
        for name in ("over", "order", "of", "to", "above", "below", "margin"):
            if name not in own and (value := getattr(self, name)) not in (None, "", (), {}):
                raise BadInput(name, value, f"a claim of the kind {self.kind.value} has {', '.join(own)}; leave it out")
        if "over" in own:
            self._check_axis()
        if "to" in own:
            self._check_sides()
        self._check_bounds()

    def _check_axis(self) -> None:
        if not self.over:
            raise BadInput("over", self.over, "give an axis of the study")
        if self.over in self.where:
            raise BadInput("where", self.where, f"it leaves one entry of {self.over}, which the claim compares; leave that out")
        if self.kind is ClaimKind.ORDER and len(set(map(str, self.order))) < max(2, len(self.order)):
            hint = f"give two or more different entries of {self.over}, the largest metric first"
            raise BadInput("order", list(self.order), hint)

    def _check_sides(self) -> None:
        if not self.to or (isinstance(self.to, str) and self.to != BASELINE):
            raise BadInput("to", self.to, f"give entries of axes, {{axis: entry}}, or {BASELINE}")
        sides = {"of": self.of} if isinstance(self.to, str) else {"of": self.of, "to": self.to}
        for name, side in sides.items():
            if both := [axis for axis in side if axis in self.where]:
                raise BadInput("where", self.where, f"{name} states {', '.join(both)} too; leave it out of one of them")
        if isinstance(self.to, str):
            if self.reference is Reference.BASELINE:
                hint = "a baseline does not deviate from itself; give golden or golden_same_inputs"
                raise BadInput("reference", self.reference.value, hint)
        elif set(self.of) != set(self.to):
            raise BadInput("of", dict(self.of), f"name the same axes as in to, which are {', '.join(self.to)}")
        elif dict(self.of) == dict(self.to):
            raise BadInput("to", dict(self.to), "it is the same as of; give other entries")

    def _check_bounds(self) -> None:
        for name in ("above", "below", "margin"):
            if (value := getattr(self, name)) is not None and not math.isfinite(value):
                raise BadInput(name, value, "give a finite number")
        if "above" in _OWN[self.kind]:
            if self.above is None and self.below is None:
                raise BadInput("above", None, "give a number from which on the claim holds; or give below, or both")
            if self.above is not None and self.below is not None and self.above >= self.below:
                raise BadInput("below", self.below, f"nothing lies between above and below; give a number above {self.above:g}")
            for name in ("above", "below") if self.kind is ClaimKind.RATIO else ():
                if (value := getattr(self, name)) is not None and value <= 0:
                    raise BadInput(name, value, "a ratio of deviations is positive; give a positive number")
        if self.margin is not None and self.margin < 1:
            hint = "give the factor within which two are the same, above 1, or 1 for equal numbers"
            raise BadInput("margin", self.margin, hint)

    @property
    def output(self) -> str:
        """The output whose metric it is."""
        return self.metric.rpartition(".")[0]

    @property
    def column(self) -> str:
        """The metric without the output."""
        return self.metric.rpartition(".")[2]

    def by(self, column: str) -> StatedClaim:
        """The same claim on another metric of the same output."""
        return replace(self, metric=f"{self.output}.{column}")

    @staticmethod
    def read(manifest: Mapping[str, Any]) -> StatedClaim:
        """The claim that a manifest keeps, see `plain`."""
        own: dict[str, Any] = {one.name: manifest[one.name] for one in fields(StatedClaim)}
        own |= {"kind": ClaimKind(own["kind"]), "reference": Reference(own["reference"]), "order": tuple(own["order"])}
        return StatedClaim(**own)


def plain(value: Scenario | StatedClaim) -> dict[str, Any]:
    """The fields of a scenario or claim as a manifest keeps them."""
    described: dict[str, Any] = describe(value)
    return {name: value for name, value in described.items() if name != "type"}


def stored_point(key: str, labels: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """A point of a manifest: the key of its record, its labels, and of these facts those that are not as in a plain study.

    `labels` are the values of what was swept, or of a single point everything that the user gave. `scenario` and `roles` are as
    those of `numdev.results.study.StudyPoint`; `number` is that of the job of a sweep, `command` its command line; `explicit`
    names everything that the user gave, that all points of the sweep have alike too; `composed` has every setting of the point
    by the name of the command line, also those that nobody gave.
    """
    plain_study = {"scenario": "default", "roles": {}, "number": 0, "command": "", "explicit": list(labels), "composed": {}}
    return {"key": key, "labels": dict(labels)} | plain_study | facts


def manifest_of(name: str, kind: str, title: str, points: Sequence[Mapping[str, Any]] = (), **parts: Any) -> dict[str, Any]:
    """A manifest: the name of a study or sweep, its kind of measurement, its title, each `stored_point`, and of its parts some.

    These are the fields of `numdev.results.study.Study`, and `stated_claims`, the claims of its file by name; `settings`, unit
    and meaning of the settings of the records by column; `swept`, the names of what a sweep from the command line swept, none
    for single points, None for a study. A store adds the points of a sweep one by one.
    """
    empty: dict[str, Any] = {"question": "", "command": "", "overrides": [], "figure": None, "more": [], "plot": None}
    empty |= {"claims": [], "stated_claims": {}, "scenarios": [plain(Scenario("default", ""))]}
    empty |= {"settings": {}, "words": {}, "swept": None}
    return {"name": name, "kind": kind, "title": title} | empty | parts | {"points": list(points)}


def is_old(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest is of a numdev whose manifests had another form, so that its points cannot be read."""
    return not {"scenarios", "overrides", "kind", "swept"} <= manifest.keys()
