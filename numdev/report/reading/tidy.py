"""All results of a folder as one table: what a notebook starts from, and what figures over any column are drawn from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from numdev.errors import BadInput
from numdev.measurement.speed.columns import FOLLOWING, derived
from numdev.report.reading.columns import meaning
from numdev.report.reading.configuration import settings
from numdev.report.reading.derived import configured
from numdev.report.reading.frames import LABEL, PRIMARY, Results, load
from numdev.report.reading.kinds import figures_of, is_own, places_of
from numdev.report.reading.lean import numbered, repeated
from numdev.report.reading.split import PLACES, STATED
from numdev.report.reading.typed import column_of_values
from numdev.report.reading.view import CHIEF
from numdev.report.reading.wording import UNITS, WORDS
from numdev.results.record import Column
from numdev.results.store import Store

EVERY = ("",)  # what every column begins with
_SPEED = "speed"
_SHORT = 40  # characters
_INPUTS = ("source.kind", "source.type")


def loaded(results: Path, studies: Sequence[str] | None) -> pd.DataFrame:
    """The table of a folder of results, see `numdev.report.offered.load`."""
    return tidy(load(Store(results), studies, axes=EVERY)).copy()  # columns that can be written to


def tidy(results: Results, rows: pd.DataFrame | None = None, more: Iterable[str] = ()) -> pd.DataFrame:
    """The rows of some results with the labels of all their points, and with the words for its columns in `attrs`.

    A column `label.<name>` has what any point states of a setting; of a point that states nothing, the value that it had. `more`
    are settings, by their names on the command line, that have such a column though no point states them.
    """
    found = (results.rows if rows is None else rows).reset_index(drop=True)
    stated = {study: _stated(results.manifests[study]) for study in found["study"].unique()}
    more = (name for name in more if name not in found and f"{LABEL}{name}" not in found)
    names_of = dict.fromkeys([*(name for own in stated.values() for name in own), *more])
    labels = {f"{LABEL}{name}": values for name, values in _labels(results, found, list(names_of))}
    at = max((i for i, name in enumerate(found) if str(name).startswith(LABEL)), default=len(found.columns) - 1) + 1
    names = [*found.columns[:at], *(name for name in labels if name not in found), *found.columns[at:]]
    found = pd.DataFrame({name: labels[name] if name in labels else found[name] for name in names}, found.index, copy=False)
    found = _with_speed(found.drop(columns="point", errors="ignore"))
    words = {name: tuple(said) for one in results.manifests.values() for name, said in one.get(WORDS, {}).items()}
    known = settings(results.manifests.values())
    differ = (known[name] for name in map(str, found) if name in known and found[name].nunique() > 1)
    words |= {one.name: (word, one.unit) for one in differ if one.name not in words and (word := _word(one, words))}
    units = {name: said[0] for name in results.columns if (said := meaning(name, results.columns)) and said[0]}
    found.attrs = {WORDS: words, UNITS: units, STATED: stated, PLACES: places_of(results.columns, found)}
    if is_own(results.manifests.values()) and (chief := figures_of(results.columns, found)):
        found.attrs[CHIEF] = chief[0].name
    return found


def of_shadow(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The table of the rows of `numdev.shadow`: a replicate is a head, and the output of the forward pass is the primary one.

    Raises:
        BadInput: where there are no rows.
    """
    if not rows:
        raise BadInput("frame", "[]", "it has no rows; run the model within the context of shadow")
    found = pd.DataFrame(rows)
    found = found.rename(columns={"head": "seed"}).assign(cluster="", **{PRIMARY: found["output"] == "out"})
    found.attrs = {PLACES: ("subject", "step", "call", "layer")}
    return found


def _word(setting: Column, words: Mapping[str, Sequence[str]]) -> str:
    """Of a variant the word for the setting of the command line, or its name; else the first words of its sentence."""
    part, _, own = setting.name.partition(".")
    if part == "variant":
        return words.get(own, ("",))[0] or own
    start = "inputs" if own in _INPUTS else re.split(r"[;:]", setting.meaning)[0]
    return start if len(start) <= _SHORT else ""


def _stated(manifest: Mapping[str, Any]) -> list[str]:
    """The labels of a study's points; of a sweep everything that any of them states."""
    return list(dict.fromkeys(name for point in manifest["points"] for name in point["explicit"]))


def _labels(results: Results, rows: pd.DataFrame, names: Sequence[str]) -> Iterator[tuple[str, pd.Series[Any]]]:
    """Labels by row: what its point states, else what the point was composed of, or what its record has of that setting."""
    if not names:
        return
    points = {(study, str(point["key"])): point for study, one in results.manifests.items() for point in one["points"]}
    place = numbered((rows["study"], rows["key"]), len(rows))
    _, first = np.unique(place, return_index=True)
    own = [
        points.get(each, {"labels": {}, "composed": {}})
        for each in zip(rows["study"].iloc[first], rows["key"].iloc[first], strict=True)
    ]
    records = results.points.drop_duplicates("key").set_index("key").reindex(rows["key"].iloc[first])
    for name in names:
        values = [point["labels"].get(name, point["composed"].get(name)) for point in own]
        if None in values and (known := configured(name, records)) is not None:
            had = known.astype(object).where(known.notna(), None)
            values = [one if value is None else value for value, one in zip(values, had, strict=True)]
        yield name, repeated(column_of_values(values), place)


def _with_speed(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of speed with what follows from the figures, such as TFLOP/s."""
    counts = {"kind", "operations"} <= set(rows)  # an operation need not say how many it takes
    is_speed = (rows["kind"] == _SPEED) & rows["operations"].notna() if counts else pd.Series(data=False, index=rows.index)
    if not is_speed.any():
        return rows
    measured = rows[is_speed].dropna(axis="columns", how="all").to_dict("records")
    follows = pd.DataFrame([derived({str(k): v for k, v in row.items()}) for row in measured], index=rows.index[is_speed])
    return pd.concat([rows, follows[[name for name in FOLLOWING if name in follows]]], axis=1)
