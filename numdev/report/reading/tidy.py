"""All results of a folder as one table: what a notebook starts from, and what figures over any column are drawn from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from numdev.errors import BadInput
from numdev.report.reading.columns import configured, meaning, settings
from numdev.report.reading.frames import Results, column_of_values, figures_of, is_own, load, places_of
from numdev.report.reading.scenarios import LABEL, PRIMARY
from numdev.report.reading.view import CHIEF, FACTS, LABELS, OF_A_COMPARISON, PLACES, names_in, parsed
from numdev.report.reading.wording import UNITS, WORDS
from numdev.results.record import Column
from numdev.results.store import Store

_SHORT = 40  # characters
_INPUTS = ("source.kind", "source.type")


def loaded(results: Path, studies: Sequence[str] | None) -> pd.DataFrame:
    """The table of a folder of results, see `numdev.report.offered.load`."""
    return tidy(load(Store(results), studies))


def of_comparison(results: Results, plot: Mapping[str, Any], study: str = "") -> pd.DataFrame:
    """The tidy table from which a view of a study, or of all results, is chosen and drawn: `plot` is what somebody states of it.

    Of deviations these are the rows of the one comparison that `numdev.report.reading.view.shown` keeps, a tenth of all; they are
    all where the view spreads comparisons out, or where a point has no row in that one.
    """
    rows = results.primary
    every = rows.where(study=study) if study else np.ones(len(rows), dtype=np.bool_)
    names = [name for _, name in names_in(plot)]
    chosen = every
    if not is_own(results.manifests.values()) and not any(name in rows.own or f"{LABEL}{name}" in rows.own for name in names):
        part = parsed(plot)
        y, (output, _, metric) = part.get("y", ""), part.get("y", "").partition(".")
        of_output = metric in rows and "output" in rows.own and (rows.own["output"] == output).any()
        values: dict[str, Any] = OF_A_COMPARISON | ({"reference": part["reference"]} if "reference" in part else {})
        values |= {"output": output} if of_output else {PRIMARY: True}
        if of_output or not y or y in rows:
            chosen = every & rows.where(**{name: value for name, value in values.items() if name in rows.own})
    measured, kept = (np.unique(rows.point[mask]) for mask in (every, chosen))
    return tidy(results, chosen if len(kept) == len(measured) else every, more=names)


def tidy(
    results: Results, chosen: NDArray[np.bool_] | None = None, names: Sequence[str] | None = None, more: Iterable[str] = ()
) -> pd.DataFrame:
    """The rows of some results with the labels of all their points, and with the words for its columns in `attrs`.

    A column `label.<name>` has what any point states of a setting; of a point that states nothing, the value that it had.

    Args:
        results: of one kind or several.
        chosen: which rows, all unless given.
        names: the other columns, all unless given.
        more: settings, by their names on the command line, that have such a column though no point states them.
    """
    rows = results.primary
    table = rows.frame(chosen, names).reset_index(drop=True)
    places, place = np.unique(rows.point if chosen is None else rows.point[chosen], return_inverse=True)
    points = rows.points.iloc[places]
    labels_of = {study: _labels_of(results.manifests[study]) for study in points["study"].unique()}
    more = (name for name in more if name not in table and f"{LABEL}{name}" not in table)
    names_of = dict.fromkeys([*(name for own in labels_of.values() for name in own), *more])
    labels = {f"{LABEL}{name}": _label(results, points, name).take(place).reset_index(drop=True) for name in names_of}
    at = max((i for i, name in enumerate(table) if str(name).startswith(LABEL)), default=len(table.columns) - 1) + 1
    order = [*table.columns[:at], *(name for name in labels if name not in table), *table.columns[at:]]
    table = pd.DataFrame({name: labels[name] if name in labels else table[name] for name in order}, table.index, copy=False)
    words = {name: tuple(word) for one in results.manifests.values() for name, word in one.get(WORDS, {}).items()}
    known = settings(results.manifests.values())
    differ = (known[name] for name in map(str, table) if name in known and table[name].nunique() > 1)
    words |= {one.name: (word, one.unit) for one in differ if one.name not in words and (word := _word(one, words))}
    units = {name: of[0] for name in results.columns if (of := meaning(name, results.columns)) and of[0]}
    table.attrs = {WORDS: words, UNITS: units, LABELS: labels_of, PLACES: places_of(results.columns, table), FACTS: results.facts}
    if is_own(results.manifests.values()) and (chief := figures_of(results.columns, table)):
        table.attrs[CHIEF] = chief[0].name
    return table


def of_shadow(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The table of the rows of `numdev.shadow`: a replicate is a head, and the output of the forward pass is the primary one.

    Raises:
        BadInput: where there are no rows.
    """
    if not rows:
        raise BadInput("frame", "[]", "it has no rows; run the model within the context of shadow")
    table = pd.DataFrame(rows)
    table = table.rename(columns={"head": "seed"}).assign(cluster="", **{PRIMARY: table["output"] == "out"})
    table.attrs = {PLACES: ("subject", "step", "call", "layer")}
    return table


def _word(setting: Column, words: Mapping[str, Sequence[str]]) -> str:
    """Of a variant the word for the setting of the command line, or its name; else the first words of its sentence."""
    part, _, own = setting.name.partition(".")
    if part == "variant":
        return words.get(own, ("",))[0] or own
    start = "inputs" if own in _INPUTS else re.split(r"[;:]", setting.meaning)[0]
    return start if len(start) <= _SHORT else ""


def _labels_of(manifest: Mapping[str, Any]) -> list[str]:
    """The labels of a study's points; of a sweep everything that any of them states."""
    return list(dict.fromkeys(name for point in manifest["points"] for name in point["explicit"]))


def _label(results: Results, points: pd.DataFrame, name: str) -> pd.Series[Any]:
    """A setting of some points: what each states, else what it was composed of, or what its record has."""
    stated = {
        (study, point["key"]): point["labels"].get(name, point["composed"].get(name))
        for study in points["study"].unique()
        for point in results.manifests[study]["points"]
    }
    values = [stated.get(place) for place in zip(points["study"], points["key"], strict=True)]
    if None in values and (known := configured(name, points)) is not None:
        had = known.astype(object).where(known.notna(), None)
        values = [one if value is None else value for value, one in zip(values, had, strict=True)]
    return column_of_values(values)
