"""A figure in words, as a study's file states it: `x: problem.n, y: out.rmse, colour: precision`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf

from numdev.cli.plotted import mapping
from numdev.cli.schema import PlotConfig
from numdev.errors import BadInput
from numdev.nearest import one_of

_KEYS = tuple(one.name for one in fields(PlotConfig))
_COLUMNS = ("scenario.title", "output", "reference", "subject", "format", "policy")  # of every study, beside its axes
_REFERENCES = ("golden", "golden_same_inputs", "baseline")


def _parts(stated: Any) -> dict[str, Any]:
    """What a text, or a mapping, says by key.

    Raises:
        BadInput: if it is neither.
    """
    try:
        found = OmegaConf.to_container(OmegaConf.create(mapping(stated))) if isinstance(stated, str) else stated
    except BadInput:
        raise
    except Exception:  # whatever the parser of YAML raises
        found = None
    if not isinstance(found, Mapping) or None in found.values():
        raise BadInput("plot", stated, "give it as in x: problem.n, y: out.rmse, colour: precision")
    return {str(key): value for key, value in found.items()}


def plot_of(stated: Any, axes: Collection[str], figures: Callable[[], Sequence[str]]) -> dict[str, Any]:
    """What the figure of a study shows, by key; `colour` and `facet` are lists.

    Args:
        stated: the field `plot` of the study's file.
        axes: of the study.
        figures: the metrics that there are, as `output.metric`.

    Raises:
        BadInput: naming the field, as in `plot.x`.
    """
    found = _parts(stated)
    for key, value in found.items():
        if key not in _KEYS:
            raise BadInput(f"plot.{key}", value, f"a figure has no such part; {one_of(key, _KEYS)}")
    for key in ("x", "y"):
        if key not in found:
            raise BadInput(f"plot.{key}", None, "name what stands on this axis, as in x: problem.n, y: out.rmse")
    return asked_of(found, axes, figures)


def asked_of(found: Mapping[str, Any], axes: Collection[str], figures: Callable[[], Sequence[str]]) -> dict[str, Any]:
    """The parts of a figure that are stated, each name checked; `colour` and `facet` are lists. Arguments see `plot_of`.

    Raises:
        BadInput: naming the field, as in `plot.x`.
    """
    if "y" in found:
        _check("plot.y", found["y"], figures())
    _check("plot.reference", found.get("reference", _REFERENCES[0]), _REFERENCES)
    names = {
        key: value if isinstance(value, list) else [value] for key, value in found.items() if key in ("x", "colour", "facet")
    }
    for key, own in names.items():
        for name in own:
            _check(f"plot.{key}", name, list(dict.fromkeys([*axes, *_COLUMNS])))
    several = {key: own for key, own in names.items() if key != "x"}
    return {key: value for key, value in {**found, **several}.items() if value != []}


def _check(where: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise BadInput(where, value, one_of(value, known, most=12))
