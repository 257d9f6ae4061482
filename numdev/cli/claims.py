"""Claims, plots and figures as a study's file states them, checked against the study's axes and metrics."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf

from numdev.errors import BadInput, one_of
from numdev.results.claim import COLUMNS, ClaimKind, ClaimStatement
from numdev.results.record import Reference
from numdev.results.store import EntryRole
from numdev.settings import choice, make

Axes = Mapping[str, Sequence[Any]]  # the entries of each

_OF_A_PART = ("metric", "reference", "kind", "where", "over", "of", "to", "above", "below", "margin", "each", "condition", "also")
_FUNCTION = re.compile(r"[\w.]+:\w+")
_OF_POINTS = ("scenario.title", "output", "reference", "subject", "format", "policy")  # columns of every study, beside its axes
_DRAWN = ("draw", "about", "options", "title", "needs", "table")  # of a figure that a function draws
_FIELDS = ", ".join(one.name for one in fields(ClaimStatement))


def claims_of(claims: Any, axes: Axes, metrics: Collection[str]) -> tuple[str | ClaimStatement, ...]:
    """The claims of a study: a name of one that ships with numdev as it is, and each that the file states.

    Args:
        claims: the field `claims` of the study's file.
        axes: the entries of every axis in any scenario.
        metrics: what there is to compare.

    Raises:
        BadInput: naming the field, as in `claims[1].metric`.
    """
    if not isinstance(claims, (list, tuple)):
        raise BadInput("claims", claims, "give a list of claims")
    made = list[str | ClaimStatement]()
    for i, own in enumerate(claims):
        where = f"claims[{i}]"
        if not isinstance(own, (str, Mapping)):
            raise BadInput(where, own, f"give the fields of a claim, {_FIELDS}, or the name of one that numdev ships")
        made.append(own if isinstance(own, str) else _claim(where, own, axes, metrics))
    return tuple(made)


def _claim(where: str, own: Mapping[str, Any], axes: Axes, metrics: Collection[str]) -> ClaimStatement:
    claim = make(ClaimStatement, {name: value for name, value in own.items() if value is not None}, where)
    if claim.judge:
        function(f"{where}.judge", claim.judge)
        return claim
    for part, fields_of_part in claim.parts.items():
        for name in set(fields_of_part).difference(_OF_A_PART):
            hint = f"a part of a claim has no such field; {one_of(name, _OF_A_PART)}"
            raise BadInput(f"{where}.parts.{part}.{name}", fields_of_part[name], hint)
    for part, value in claim.values(where).items():
        _check(f"{where}.parts.{part}" if claim.parts else where, value, axes, metrics)
    if not (claim.parts or claim.is_bounded):
        raise BadInput(f"{where}.above", None, "give a number from which on the claim holds; or give below, or both")
    return claim


def _check(where: str, claim: ClaimStatement, axes: Axes, metrics: Collection[str]) -> None:
    """Refuse a claim on one value that names what the study does not have."""
    entries: Axes = {**dict.fromkeys(COLUMNS, ()), **axes}
    if claim.metric not in metrics:
        raise BadInput(f"{where}.metric", claim.metric or None, one_of(claim.metric, metrics, most=12))
    for axis in filter(None, (claim.over, claim.each)):
        if axis not in entries:
            raise BadInput(f"{where}.over", axis, one_of(axis, axes) if axes else "the study has no axes; give it one")
        if claim.kind is ClaimKind.SLOPE and not all(map(_is_positive, entries[axis])):
            raise BadInput(f"{where}.over", axis, "a slope is over positive numbers, and its entries are not; give another axis")
    labels: dict[str, Any] = {"where": claim.where, "of": claim.of, "to": claim.to if isinstance(claim.to, Mapping) else {}}
    chosen = [(name, axis, entry) for name, own in labels.items() for axis, entry in own.items()]
    for name, axis, entry in (*chosen, *(("order", claim.over, entry) for entry in claim.order)):
        place = where + (f".{name}" if name == "order" else f".{name}.{axis}")
        if axis not in entries:
            raise BadInput(f"{where}.{name}", axis, f"it is no axis of the study; {one_of(axis, entries)}")
        if isinstance(entry, Mapping):
            choice(f"{place}.role", EntryRole, entry.get("role"))
        elif entries[axis] and entry not in entries[axis]:
            raise BadInput(place, entry, one_of(entry, map(str, entries[axis]), most=12))


def _is_positive(entry: Any) -> bool:
    return isinstance(entry, (int, float)) and not isinstance(entry, bool) and entry > 0


def plot_of(plot: Any, axes: Collection[str], metrics: Sequence[str]) -> dict[str, Any]:
    """The parts of a figure by key, each name checked; `colour` and `facet` are lists.

    Args:
        plot: as `x: problem.n, y: out.rmse, colour: precision`, or as a mapping.
        axes: names that a figure can be drawn over, beside those of every study.
        metrics: as `output.metric`.

    Raises:
        BadInput: naming the field, as in `plot.x`.
    """
    try:
        parts: Any = OmegaConf.to_container(OmegaConf.create(f"{{{plot.strip('{}')}}}")) if isinstance(plot, str) else plot
    except Exception:  # whatever the parser of YAML raises
        parts = None
    if not isinstance(parts, Mapping) or None in parts.values():
        raise BadInput("plot", plot, "give it as in x: problem.n, y: out.rmse, colour: precision")
    names = list(dict.fromkeys([*axes, *_OF_POINTS]))
    known = {"y": metrics, "reference": [each.value for each in Reference], **dict.fromkeys(("x", "colour", "facet"), names)}
    for key, value in parts.items():
        if key not in known:
            raise BadInput(f"plot.{key}", value, f"a figure has no such part; {one_of(key, known)}")
        for name in value if isinstance(value, list) else [value]:
            if name not in known[key]:
                raise BadInput(f"plot.{key}", name, one_of(name, known[key], most=12))
    for key in ("x", "y"):
        if key not in parts:
            raise BadInput(f"plot.{key}", None, "name what stands on this axis, as in x: problem.n, y: out.rmse")
    lists = {key: [own] for key in ("colour", "facet") if (own := parts.get(key)) is not None and not isinstance(own, list)}
    return {key: value for key, value in {**parts, **lists}.items() if value != []}


def function(where: str, value: Any) -> None:
    """Refuse what is no name of a function, `module:name`."""
    if not isinstance(value, str) or not _FUNCTION.fullmatch(value):
        raise BadInput(where, value, "give a function as module:name")


def check_figures(figures: Mapping[str, Any]) -> None:
    """Check the figures that a study's file says how to draw, by name.

    Raises:
        BadInput: naming the field, as in `figures.ladder.draw`.
    """
    for name, own in figures.items():
        parts = own if isinstance(own, Mapping) else {"": own}
        for part in set(parts).difference(_DRAWN):
            raise BadInput(f"figures.{name}.{part}", parts[part], f"a figure has no such part; {one_of(part, _DRAWN)}")
        if "draw" in own or "options" not in own:
            function(f"figures.{name}.draw", own.get("draw"))
        if not isinstance(own.get("about"), str):
            raise BadInput(f"figures.{name}.about", own.get("about"), "describe it for those who cannot see it")
