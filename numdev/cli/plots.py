"""A figure in words, as a study's file states it: `x: problem.n, y: out.rmse, colour: precision`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf

from numdev.cli.plotted import mapping
from numdev.cli.schema import PlotConfig
from numdev.errors import BadInput, one_of

_KEYS = tuple(one.name for one in fields(PlotConfig))
_COLUMNS = ("scenario.title", "output", "reference", "subject", "format", "policy")  # of every study, beside its axes
_REFERENCES = ("golden", "golden_same_inputs", "baseline")


def _parts(plot: Any) -> dict[str, Any]:
    """The parts of a figure in a text or a mapping, by key.

    Raises:
        BadInput: if it is neither.
    """
    try:
        parts = OmegaConf.to_container(OmegaConf.create(mapping(plot))) if isinstance(plot, str) else plot
    except BadInput:
        raise
    except Exception:  # whatever the parser of YAML raises
        parts = None
    if not isinstance(parts, Mapping) or None in parts.values():
        raise BadInput("plot", plot, "give it as in x: problem.n, y: out.rmse, colour: precision")
    return {str(key): value for key, value in parts.items()}


def plot_of(plot: Any, axes: Collection[str], figures: Callable[[], Sequence[str]]) -> dict[str, Any]:
    """The parts of a study's figure, by key; `colour` and `facet` are lists.

    Args:
        plot: the field `plot` of the study's file.
        axes: of the study.
        figures: the metrics that there are, as `output.metric`.

    Raises:
        BadInput: naming the field, as in `plot.x`.
    """
    parts = _parts(plot)
    for key, value in parts.items():
        if key not in _KEYS:
            raise BadInput(f"plot.{key}", value, f"a figure has no such part; {one_of(key, _KEYS)}")
    for key in ("x", "y"):
        if key not in parts:
            raise BadInput(f"plot.{key}", None, "name what stands on this axis, as in x: problem.n, y: out.rmse")
    return asked_of(parts, axes, figures)


def asked_of(parts: Mapping[str, Any], axes: Collection[str], figures: Callable[[], Sequence[str]]) -> dict[str, Any]:
    """Parts of a figure, each name checked; `colour` and `facet` are lists. Arguments see `plot_of`.

    Raises:
        BadInput: naming the field, as in `plot.x`.
    """
    if "y" in parts:
        _check("plot.y", parts["y"], figures())
    _check("plot.reference", parts.get("reference", _REFERENCES[0]), _REFERENCES)
    names = {
        key: value if isinstance(value, list) else [value] for key, value in parts.items() if key in ("x", "colour", "facet")
    }
    for key, own in names.items():
        for name in own:
            _check(f"plot.{key}", name, list(dict.fromkeys([*axes, *_COLUMNS])))
    several = {key: own for key, own in names.items() if key != "x"}
    return {key: value for key, value in {**parts, **several}.items() if value != []}


_DRAWN = ("draw", "about", "options", "title", "needs", "table", "files")  # of a figure that a function draws
_FUNCTION = re.compile(r"[\w.]+:\w+")


def function(where: str, value: Any) -> str:
    """The name of a function.

    Raises:
        BadInput: for anything but `module:name`.
    """
    if not isinstance(value, str) or not _FUNCTION.fullmatch(value):
        raise BadInput(where, value, "give a function as module:name")
    return value


def figures_of(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that a study's file says how to draw, by name.

    Raises:
        BadInput: naming the field, as in `figures.ladder.draw`.
    """
    for name, own in figures.items():
        where = f"figures.{name}"
        if not isinstance(own, Mapping):
            raise BadInput(where, own, f"give the parts of a figure, {', '.join(_DRAWN)}")
        for key, value in own.items():
            if key not in _DRAWN:
                raise BadInput(f"{where}.{key}", value, f"a figure has no such part; {one_of(key, _DRAWN)}")
        function(f"{where}.draw", own.get("draw"))
        if not isinstance(own.get("about"), str):
            raise BadInput(f"{where}.about", own.get("about"), "describe it for those who cannot see it")
    return dict(figures)


def _check(where: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise BadInput(where, value, one_of(value, known, most=12))
