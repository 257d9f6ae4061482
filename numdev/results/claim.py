"""A claim as a study's file states it, and its manifest keeps it: a sentence, what is compared, and when it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from numdev.errors import BadInput
from numdev.results.canonical import describe

BASELINE = "baseline"
"""What `to` says where the points are compared with their own baselines."""

Labels = Mapping[str, Any]  # entries by axis


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
        for name in dict.fromkeys(name for names in _OWN.values() for name in names):
            value = getattr(self, name)
            if name not in own and value not in (None, "", (), {}):
                raise BadInput(name, value, f"a claim of the kind {self.kind.value} has {', '.join(own)}; leave it out")
        for check in (self._check_axis, self._check_sides, self._check_bounds):
            check()

    def _check_axis(self) -> None:
        if "over" in _OWN[self.kind] and not self.over:
            raise BadInput("over", self.over, "give an axis of the study")
        if self.over in self.where:
            raise BadInput("where", self.where, f"it leaves one entry of {self.over}, which the claim compares; leave that out")
        if self.kind is ClaimKind.ORDER and len(set(map(str, self.order))) < max(2, len(self.order)):
            raise BadInput(
                "order", list(self.order), f"give two or more different entries of {self.over}, the largest metric first"
            )

    def _check_sides(self) -> None:
        if "to" not in _OWN[self.kind]:
            return
        if not self.to or (isinstance(self.to, str) and self.to != BASELINE):
            raise BadInput("to", self.to, f"give entries of axes, {{axis: entry}}, or {BASELINE}")
        if both := [axis for axis in self.of if axis in self.where]:
            raise BadInput("where", self.where, f"of states {', '.join(both)} too; leave it out of one of them")
        if isinstance(self.to, str):
            if self.reference is Reference.BASELINE:
                mend = "a baseline does not deviate from itself; give golden or golden_same_inputs"
                raise BadInput("reference", self.reference.value, mend)
            return
        if set(self.of) != set(self.to):
            raise BadInput("of", dict(self.of), f"name the same axes as in to, which are {', '.join(self.to)}")
        if dict(self.of) == dict(self.to):
            raise BadInput("to", dict(self.to), "it is the same as of; give other entries")
        if both := [axis for axis in self.to if axis in self.where]:
            raise BadInput("where", self.where, f"to states {', '.join(both)} too; leave it out of one of them")

    def _check_bounds(self) -> None:
        bounds = {"above": self.above, "below": self.below, "margin": self.margin}
        for name, value in bounds.items():
            if value is not None and not math.isfinite(value):
                raise BadInput(name, value, "give a finite number")
        if "above" in _OWN[self.kind]:
            if self.above is None and self.below is None:
                mend = "give a number from which on the claim holds; or give below, or both"
                raise BadInput("above", None, mend)
            if self.above is not None and self.below is not None and self.above >= self.below:
                raise BadInput("below", self.below, f"nothing lies between above and below; give a number above {self.above:g}")
            if self.kind is ClaimKind.RATIO:
                for name in ("above", "below"):
                    if (value := bounds[name]) is not None and value <= 0:
                        raise BadInput(name, value, "a ratio of deviations is positive; give a positive number")
        if self.margin is not None and self.margin < 1:
            raise BadInput(
                "margin", self.margin, "give the factor within which two are the same, above 1, or 1 for equal numbers"
            )

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

    def stated(self) -> dict[str, Any]:
        """As a study's manifest keeps it."""
        found: dict[str, Any] = describe(self)
        return {name: value for name, value in found.items() if name != "type"}

    @staticmethod
    def read(stated: Mapping[str, Any]) -> StatedClaim:
        """What `stated` says."""
        own: dict[str, Any] = {one.name: stated[one.name] for one in fields(StatedClaim)}
        own |= {"kind": ClaimKind(own["kind"]), "reference": Reference(own["reference"]), "order": tuple(own["order"])}
        return StatedClaim(**own)


def named(study: str, claims: tuple[str | StatedClaim, ...]) -> dict[str, StatedClaim | None]:
    """The claims of a study by name; one that its file states is called after its place there, and another has None."""
    return {
        one if isinstance(one, str) else f"{study}_{place}": None if isinstance(one, str) else one
        for place, one in enumerate(claims, 1)
    }
