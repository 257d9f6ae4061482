"""Claims as a study's file states them, each field checked against the study's axes and the metrics of its operation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from numdev.cli.statements import mapping
from numdev.errors import BadInput
from numdev.nearest import choice, one_of
from numdev.results.manifest import BASELINE, ClaimKind, Reference, StatedClaim

Axes = Mapping[str, Sequence[Any]]  # the entries of each

_FIELDS = tuple(one.name for one in fields(StatedClaim))


@dataclass(frozen=True)
class Comparable:
    """What the claims of a study may compare.

    Attributes:
        figures: by name; of deviations as `output.metric`.
        beside: those that every point has of its baseline too; None where all have one.
        lacks: why `reference` and `to: baseline` mean nothing for a figure, where it is no deviation of an output.
    """

    figures: Sequence[str]
    beside: Collection[str] | None = None
    lacks: str = ""


def claims_of(stated: Any, axes: Axes, known: Callable[[], Comparable]) -> tuple[str | StatedClaim, ...]:
    """The claims of a study: a name of one that ships with numdev as it is, and each that the file states.

    Args:
        stated: the field `claims` of the study's file.
        axes: the entries of every axis in any scenario.
        known: what there is to compare.

    Raises:
        BadInput: naming the field, as in `claims[1].metric`.
    """
    if not isinstance(stated, (list, tuple)):
        raise BadInput("claims", stated, "give a list of claims")
    return tuple(one if isinstance(one, str) else _claim(f"claims[{i}]", one, axes, known) for i, one in enumerate(stated))


def _claim(where: str, own: Any, axes: Axes, known: Callable[[], Comparable]) -> StatedClaim:
    if not isinstance(own, Mapping):
        raise BadInput(where, own, f"give the fields of a claim, {', '.join(_FIELDS)}, or the name of one that numdev ships")
    for key, value in own.items():
        if key not in _FIELDS:
            raise BadInput(f"{where}.{key}", value, f"a claim has no such field; {one_of(key, _FIELDS)}")
    figures = known().figures
    if own.get("metric") not in figures:
        raise BadInput(f"{where}.metric", own.get("metric"), one_of(own.get("metric"), figures, most=12))
    kind = choice(f"{where}.kind", ClaimKind, own.get("kind"))
    reference = choice(f"{where}.reference", Reference, own.get("reference", Reference.GOLDEN.value))
    found: dict[str, Any] = {name: _number(f"{where}.{name}", own.get(name)) for name in ("above", "below", "margin")}
    found |= {name: _text(f"{where}.{name}", own.get(name, "")) for name in ("claim", "source", "over")}
    found |= {name: _entries(f"{where}.{name}", own.get(name), axes) for name in ("where", "of")}
    to = own.get("to")
    _check_meaning(where, own, known())
    found["to"] = BASELINE if to == BASELINE else "" if to is None else _entries(f"{where}.to", to, axes)
    found["order"] = _order(where, own.get("order"), found["over"], axes)
    if found["over"]:
        _check_axis(where, kind, found["over"], axes)
    try:
        return StatedClaim(kind=kind, metric=str(own["metric"]), reference=reference, **found)
    except BadInput as error:
        raise BadInput(f"{where}.{error.field}", error.value, error.mend) from None


def _check_meaning(where: str, own: Mapping[str, Any], known: Comparable) -> None:
    """Refuse what a study of this kind has not got: other references, and a baseline beside each point."""
    if known.lacks and own.get("reference") is not None:
        raise BadInput(f"{where}.reference", own["reference"], f"{known.lacks}; leave it out")
    if own.get("to") == BASELINE and known.beside is not None and own["metric"] not in known.beside:
        other = f", or compare {' or '.join(known.beside)}, which both have" if known.beside else ""
        raise BadInput(f"{where}.to", BASELINE, f"{known.lacks}; give entries of an axis, {{axis: entry}}{other}")


def _check_axis(where: str, kind: ClaimKind, axis: str, axes: Axes) -> None:
    if axis not in axes:
        raise BadInput(f"{where}.over", axis, one_of(axis, axes) if axes else "the study has no axes; give it one")
    if kind is ClaimKind.SLOPE and not all(map(_is_positive, axes[axis])):
        able = [name for name, entries in axes.items() if all(map(_is_positive, entries))]
        mend = f"give one of {', '.join(able)}" if able else "the study has no axis of positive numbers"
        raise BadInput(f"{where}.over", axis, f"a slope is over positive numbers, and its entries are not; {mend}")


def _is_positive(entry: Any) -> bool:
    return isinstance(entry, (int, float)) and not isinstance(entry, bool) and entry > 0


def _entries(where: str, value: Any, axes: Axes) -> dict[str, Any]:
    found = dict(mapping(where, value))
    for axis, entry in found.items():
        if axis not in axes:
            raise BadInput(where, axis, f"it is no axis of the study; {one_of(axis, axes)}" if axes else "the study has no axes")
        _check_entry(f"{where}.{axis}", entry, axes[axis])
    return found


def _order(where: str, value: Any, axis: str, axes: Axes) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise BadInput(f"{where}.order", value, "give a list of entries, the one with the largest metric first")
    for entry in value:
        _check_entry(f"{where}.order", entry, axes.get(axis, ()))
    return tuple(value)


def _check_entry(where: str, entry: Any, known: Sequence[Any]) -> None:
    if known and entry not in known:
        raise BadInput(where, entry, one_of(entry, map(str, known), most=12))


def _number(where: str, value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise BadInput(where, value, "give a number")
    return None if value is None else float(value)


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadInput(where, value, "give text")
    return value
