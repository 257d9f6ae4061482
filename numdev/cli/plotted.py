"""Translates `plot=x: problem.n, y: out.max_difference, colour: precision` into the form that Hydra reads."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from numdev.cli.schema import PlotConfig
from numdev.errors import BadInput, one_of

_FORM = "give plot='x: NAME, y: METRIC, colour: NAME, facet: NAME', of which any may be left out"
_PARTS = re.compile(r",(?![^\[]*\])")  # a comma that stands in no list


def asked(cfg: DictConfig) -> dict[str, Any]:
    """The settings of a figure that a configuration states; none where it asks for no figure."""
    node = cfg.get("plot")
    plain: Any = {} if node is None else OmegaConf.to_container(node, resolve=True)
    return {key: value for key, value in plain.items() if value is not None}


def braced(argument: str) -> str:
    """An argument of a command; of `plot=x: a, y: b` the mapping in braces, of `title=a, b` the text in quotes.

    Raises:
        BadInput: as `mapping`.
    """
    name, equals, value = argument.partition("=")
    if equals and name in ("title", "author") and value != "null" and value[:1] not in ("'", '"'):
        return "".join([name, "='", value.replace("'", "\\'"), "'"])
    return f"plot={mapping(value)}" if name == "plot" and equals else argument


def mapping(text: str) -> str:
    """The mapping in braces that Hydra takes, of pairs that stand without.

    Raises:
        BadInput: for what is no pair, and for a name that a figure does not have.
    """
    if text.lstrip().startswith("{"):
        return text
    known = [each.name for each in fields(PlotConfig)]
    pairs = []
    for part in _PARTS.split(text):
        name, colon, value = (each.strip() for each in part.partition(":"))
        if not colon or not value:
            raise BadInput("plot", text, _FORM)
        if name not in known:
            raise BadInput("plot", name, one_of(name, known))
        pairs.append(f"{name}: {value}")
    return f"{{{', '.join(pairs)}}}"
