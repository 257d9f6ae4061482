"""Claims, plots and figures as a study's file states them, each field checked against the study's axes and metrics."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf

from numdev.cli.schema import PlotConfig
from numdev.errors import BadInput, one_of
from numdev.results.claim import BASELINE, COLUMNS, ClaimKind, ClaimStatement
from numdev.results.manifest import EntryRole
from numdev.results.record import Reference
from numdev.settings import choice, make

Axes = Mapping[str, Sequence[Any]]  # the entries of each

_FIELDS = tuple(one.name for one in fields(ClaimStatement))
_OF_A_PART = ("metric", "reference", "kind", "where", "over", "of", "to", "above", "below", "margin", "each", "condition", "also")
_FUNCTION = re.compile(r"[\w.]+:\w+")
_OF_PLOTS = tuple(one.name for one in fields(PlotConfig))
_OF_POINTS = ("scenario.title", "output", "reference", "subject", "format", "policy")  # columns of every study, beside its axes
_DRAWN = ("draw", "about", "options", "title", "needs", "table", "files")  # of a figure that a function draws


def mapping(where: str, value: Any) -> Mapping[str, Any]:
    """Settings with their values; nothing at all states nothing."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadInput(where, value, "give settings with their values, {setting: value}")
    return value


def _check_names(where: str, own: Mapping[str, Any], known: Collection[str], what: str) -> None:
    for name, value in own.items():
        if name not in known:
            raise BadInput(f"{where}.{name}", value, f"{what}; {one_of(name, known)}")


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
    made: list[str | ClaimStatement] = []
    for i, own in enumerate(claims):
        where = f"claims[{i}]"
        if isinstance(own, str):
            made.append(own)
            continue
        if not isinstance(own, Mapping):
            hint = f"give the fields of a claim, {', '.join(_FIELDS)}, or the name of one that numdev ships"
            raise BadInput(where, own, hint)
        parts = mapping(f"{where}.parts", own.get("parts"))
        for name, part in parts.items():
            inner = f"{where}.parts.{name}"
            _check_names(inner, mapping(inner, part), _OF_A_PART, "a claim has no such field")
            whole = {key: value for key, value in own.items() if key not in ("parts", "result", "finding")}
            _claim(inner, {**whole, **mapping(inner, part)}, axes, metrics)
        made.append(_claim(where, own, axes, metrics, needs_bounds=not parts))
    return tuple(made)


def _claim(
    where: str, own: Mapping[str, Any], axes: Axes, metrics: Collection[str], *, needs_bounds: bool = False
) -> ClaimStatement:
    """The claim of some fields, each checked; `where` it stands in the file, for the errors."""
    _check_names(where, own, _FIELDS, "a claim has no such field")
    for name in ("where", "of", "to"):
        if not (name == "to" and own.get(name) in (None, BASELINE)):
            _check_entries(f"{where}.{name}", own.get(name), axes)
    is_one_value = not (own.get("judge") or own.get("parts"))
    try:
        if not isinstance(own.get("order", []), list):
            raise BadInput("order", own["order"], "give a list of entries, the one with the largest metric first")
        if is_one_value and own.get("kind") is not None and own.get("metric") not in metrics:
            raise BadInput("metric", own.get("metric"), one_of(own.get("metric"), metrics, most=12))
        claim = make(ClaimStatement, {name: value for name, value in own.items() if value is not None}, where)
        if claim.judge:
            function("judge", claim.judge)
        for axis in filter(None, (claim.over, claim.each) if is_one_value else ()):
            if axis not in (*COLUMNS, *axes):
                raise BadInput("over", axis, one_of(axis, axes) if axes else "the study has no axes; give it one")
            if claim.kind is ClaimKind.SLOPE and axis in axes and not all(map(_is_positive, axes[axis])):
                raise BadInput("over", axis, "a slope is over positive numbers, and its entries are not; give another axis")
        for entry in claim.order:
            _check_entry("order", entry, axes.get(claim.over, ()))
        if needs_bounds and not claim.judge and not claim.is_bounded:
            raise BadInput("above", None, "give a number from which on the claim holds; or give below, or both")
    except BadInput as error:
        field = error.field if error.field.startswith(where) else f"{where}.{error.field}"
        raise BadInput(field, error.value, error.hint) from None
    return claim


def _check_entries(where: str, value: Any, axes: Axes) -> None:
    for axis, entry in mapping(where, value).items():
        if axis not in (*axes, *COLUMNS):
            raise BadInput(where, axis, f"it is no axis of the study; {one_of(axis, (*axes, *COLUMNS))}")
        if isinstance(entry, Mapping):
            choice(f"{where}.{axis}.role", EntryRole, entry.get("role"))
        else:
            _check_entry(f"{where}.{axis}", entry, axes.get(axis, ()))


def _check_entry(where: str, entry: Any, known: Sequence[Any]) -> None:
    if known and entry not in known:
        raise BadInput(where, entry, one_of(entry, map(str, known), most=12))


def _is_positive(entry: Any) -> bool:
    return isinstance(entry, (int, float)) and not isinstance(entry, bool) and entry > 0


def plot_of(plot: Any, axes: Collection[str], metrics: Sequence[str], *, whole: bool = True) -> dict[str, Any]:
    """The parts of a figure by key, each name checked; `colour` and `facet` are lists.

    Args:
        plot: as `x: problem.n, y: out.rmse, colour: precision`, or as a mapping.
        axes: names that a figure can be drawn over, beside those of every study.
        metrics: as `output.metric`.
        whole: whether it needs `x` and `y`.

    Raises:
        BadInput: naming the field, as in `plot.x`.
    """
    try:
        read = OmegaConf.to_container(OmegaConf.create(f"{{{plot.strip('{}')}}}")) if isinstance(plot, str) else plot
    except Exception:  # whatever the parser of YAML raises
        read = None
    if not isinstance(read, Mapping) or None in read.values():
        raise BadInput("plot", plot, "give it as in x: problem.n, y: out.rmse, colour: precision")
    names = list(dict.fromkeys([*axes, *_OF_POINTS]))
    known = {"y": metrics, "reference": [each.value for each in Reference], **dict.fromkeys(("x", "colour", "facet"), names)}
    parts: dict[str, Any] = {str(key): value for key, value in read.items()}
    _check_names("plot", parts, _OF_PLOTS, "a figure has no such part")
    for key, value in parts.items():
        for name in value if isinstance(value, list) else [value]:
            if name not in known[key]:
                raise BadInput(f"plot.{key}", name, one_of(name, known[key], most=12))
    for key in ("x", "y") if whole else ():
        if key not in parts:
            raise BadInput(f"plot.{key}", None, "name what stands on this axis, as in x: problem.n, y: out.rmse")
    lists = {key: [own] for key in ("colour", "facet") if (own := parts.get(key)) is not None and not isinstance(own, list)}
    return {key: value for key, value in {**parts, **lists}.items() if value != []}


def function(where: str, value: Any) -> str:
    """The name of a function.

    Raises:
        BadInput: for anything but `module:name`.
    """
    if not isinstance(value, str) or not _FUNCTION.fullmatch(value):
        raise BadInput(where, value, "give a function as module:name")
    return value


def check_figures(figures: Mapping[str, Any]) -> None:
    """Check the figures that a study's file says how to draw, by name.

    Raises:
        BadInput: naming the field, as in `figures.ladder.draw`.
    """
    for name, own in figures.items():
        where = f"figures.{name}"
        _check_names(where, mapping(where, own), _DRAWN, "a figure has no such part")
        function(f"{where}.draw", own.get("draw"))
        if not isinstance(own.get("about"), str):
            raise BadInput(f"{where}.about", own.get("about"), "describe it for those who cannot see it")
