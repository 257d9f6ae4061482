"""Claims as a study's file states them, each field checked against the study's axes and the metrics of its operation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from numdev.cli.compose import mapping
from numdev.cli.plots import function
from numdev.errors import BadInput, one_of
from numdev.results.claim import BASELINE, COLUMNS, ClaimKind, ClaimStatement, Reference
from numdev.results.manifest import EntryRole
from numdev.settings import choice

Axes = Mapping[str, Sequence[Any]]  # the entries of each

_FIELDS = {one.name: str(one.type) for one in fields(ClaimStatement)}
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "give text"),
    "float | None": (lambda value: isinstance(value, (int, float)) and not isinstance(value, bool), "give a number"),
    "bool": (lambda value: isinstance(value, bool), "give true or false"),
    "bool | None": (lambda value: isinstance(value, bool), "give true or false"),
}
_OF_A_PART = ("metric", "reference", "kind", "where", "over", "of", "to", "above", "below", "margin", "each", "condition", "also")


@dataclass(frozen=True)
class Comparable:
    """The figures that the claims of a study may compare.

    Attributes:
        figures: by name; of deviations as `output.metric`.
        beside: those that every point has of its baseline too; None where all have one.
        lacks: why `reference` and `to: baseline` mean nothing for a figure, where it is no deviation of an output.
    """

    figures: Sequence[str]
    beside: Collection[str] | None = None
    lacks: str = ""


def claims_of(claims: Any, axes: Axes, known: Callable[[], Comparable]) -> tuple[str | ClaimStatement, ...]:
    """The claims of a study: a name of one that ships with numdev as it is, and each that the file states.

    Args:
        claims: the field `claims` of the study's file.
        axes: the entries of every axis in any scenario.
        known: what there is to compare.

    Raises:
        BadInput: naming the field, as in `claims[1].metric`.
    """
    if not isinstance(claims, (list, tuple)):
        raise BadInput("claims", claims, "give a list of claims")
    return tuple(one if isinstance(one, str) else _Reader(f"claims[{i}]", axes, known).claim(one) for i, one in enumerate(claims))


@dataclass(frozen=True)
class _Reader:
    """Reads one claim; `where` it stands in the file, for the errors."""

    where: str
    axes: Axes
    known: Callable[[], Comparable]

    def claim(self, own: Any) -> ClaimStatement:
        if not isinstance(own, Mapping):
            hint = f"give the fields of a claim, {', '.join(_FIELDS)}, or the name of one that numdev ships"
            raise BadInput(self.where, own, hint)
        parts = mapping(f"{self.where}.parts", own.get("parts"))
        values = self._fields(own, _FIELDS)
        for name, part in parts.items():
            inner = _Reader(f"{self.where}.parts.{name}", self.axes, self.known)
            own = inner._fields(mapping(inner.where, part), _OF_A_PART)
            inner._made(values | own | {"parts": {}, "result": "", "finding": ""}, whole=False)
        return self._made(values, whole=not parts)

    def _made(self, values: Mapping[str, Any], *, whole: bool) -> ClaimStatement:
        try:
            is_one_value = not values.get("judge") and not values.get("parts")
            if is_one_value and values.get("kind") is not None and values.get("metric") not in (figures := self.known().figures):
                raise BadInput("metric", values.get("metric"), one_of(values.get("metric"), figures, most=12))
            claim = ClaimStatement(**values)
            if is_one_value:
                self._check_meaning(claim, values)
            if whole and not claim.judge and not claim.is_bounded:
                raise BadInput("above", None, "give a number from which on the claim holds; or give below, or both")
        except BadInput as error:
            if error.field.startswith(self.where):
                raise
            raise BadInput(f"{self.where}.{error.field}", error.value, error.mend) from None
        return claim

    def _fields(self, own: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
        """The fields of a claim or of a part, each by itself."""
        values: dict[str, Any] = {}
        for name, value in own.items():
            where = f"{self.where}.{name}"
            if name not in known:
                raise BadInput(where, value, f"a claim has no such field; {one_of(name, known)}")
            if name == "kind":
                values[name] = choice(where, ClaimKind, value)
            elif name == "reference":
                values[name] = choice(where, Reference, value)
            elif name in ("where", "of") or (name == "to" and value not in (None, BASELINE)):
                values[name] = self._entries(where, value)
            elif name == "order":
                values[name] = self._order(where, value, own.get("over", ""))
            elif value is not None:
                is_right, hint = _CHECKS.get(_FIELDS[name], (lambda _: True, ""))
                if not is_right(value):
                    raise BadInput(where, value, hint)
                values[name] = float(value) if "float" in _FIELDS[name] else value
        if values.get("judge"):
            function(f"{self.where}.judge", values["judge"])
        return values

    def _check_meaning(self, claim: ClaimStatement, values: Mapping[str, Any]) -> None:
        """Refuse what has no meaning for the figures of the study's command."""
        known = self.known()
        if known.lacks and "reference" in values:
            raise BadInput("reference", claim.reference.value, f"{known.lacks}; leave it out")
        if claim.to == BASELINE and known.beside is not None and claim.metric not in known.beside:
            other = f", or compare {' or '.join(known.beside)}, which both have" if known.beside else ""
            raise BadInput("to", BASELINE, f"{known.lacks}; give entries of an axis, {{axis: entry}}{other}")
        for axis in filter(None, (claim.over, claim.each)):
            self._check_axis(claim, axis)

    def _check_axis(self, claim: ClaimStatement, axis: str) -> None:
        if axis in COLUMNS:
            return
        if axis not in self.axes:
            raise BadInput("over", axis, one_of(axis, self.axes) if self.axes else "the study has no axes; give it one")
        if claim.kind is ClaimKind.SLOPE and not all(map(_is_positive, self.axes[axis])):
            able = [name for name, entries in self.axes.items() if all(map(_is_positive, entries))]
            hint = f"give one of {', '.join(able)}" if able else "the study has no axis of positive numbers"
            raise BadInput("over", axis, f"a slope is over positive numbers, and its entries are not; {hint}")

    def _entries(self, where: str, value: Any) -> dict[str, Any]:
        entries = dict(mapping(where, value))
        for axis, entry in entries.items():
            if axis not in (*self.axes, *COLUMNS):
                hint = f"it is no axis of the study; {one_of(axis, self.axes)}" if self.axes else "the study has no axes"
                raise BadInput(where, axis, hint)
            if isinstance(entry, Mapping):
                choice(f"{where}.{axis}.role", EntryRole, entry.get("role"))
            else:
                self._check_entry(f"{where}.{axis}", entry, axis)
        return entries

    def _order(self, where: str, value: Any, axis: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise BadInput(where, value, "give a list of entries, the one with the largest metric first")
        for entry in value:
            self._check_entry(where, entry, axis)
        return tuple(value)

    def _check_entry(self, where: str, entry: Any, axis: str) -> None:
        known = self.axes.get(axis, ())
        if known and entry not in known:
            raise BadInput(where, entry, one_of(entry, map(str, known), most=12))


def _is_positive(entry: Any) -> bool:
    return isinstance(entry, (int, float)) and not isinstance(entry, bool) and entry > 0
