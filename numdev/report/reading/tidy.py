"""All results of a folder as one table: what a notebook starts from, and what figures over any column are drawn from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from numdev.measurement.speed.columns import FOLLOWING, derived
from numdev.report.reading.columns import meaning
from numdev.report.reading.configuration import settings
from numdev.report.reading.frames import LABEL, Results, load
from numdev.report.reading.kinds import figures_of, is_own, places_of
from numdev.report.reading.lean import numbered, repeated
from numdev.report.reading.typed import column_of_values
from numdev.report.reading.view import CHIEF, PLACES
from numdev.report.reading.wording import UNITS, WORDS
from numdev.results.store import Store

EVERY = ("",)  # what every column begins with
_SPEED = "speed"
_SHORT = 40  # characters


def loaded(results: Path, studies: Sequence[str] | None) -> pd.DataFrame:
    """The table of a folder of results, see `numdev.report.offered.load`."""
    return tidy(load(Store(results), studies, axes=EVERY)).copy()  # columns that can be written to


def tidy(results: Results, rows: pd.DataFrame | None = None) -> pd.DataFrame:
    """The rows of some results with the labels of all their points, and with the words for its columns in `attrs`.

    Points of a sweep have in a column `label.<name>` what any of them states, those that do not state it the value that they had.
    """
    found = (results.rows if rows is None else rows).reset_index(drop=True)
    labels = {f"{LABEL}{name}": values for name, values in _stated(results, found)}
    at = max((i for i, name in enumerate(found) if str(name).startswith(LABEL)), default=len(found.columns) - 1) + 1
    names = [*found.columns[:at], *(name for name in labels if name not in found), *found.columns[at:]]
    found = pd.DataFrame({name: labels[name] if name in labels else found[name] for name in names}, found.index, copy=False)
    found = _with_speed(found.drop(columns="point", errors="ignore"))
    words = {name: tuple(said) for one in results.manifests.values() for name, said in one.get(WORDS, {}).items()}
    known = settings(results.manifests.values())
    said_of = {name: _short(known[name].meaning) for name in map(str, found) if name in known and found[name].nunique() > 1}
    words |= {name: (word, known[name].unit) for name, word in said_of.items() if word and name not in words}
    units = {name: said[0] for name in results.columns if (said := meaning(name, results.columns)) and said[0]}
    found.attrs = {WORDS: words, UNITS: units}
    if is_own(results.manifests.values()):
        found.attrs |= _of_own_kind(results, found)
    return found


def _of_own_kind(results: Results, rows: pd.DataFrame) -> dict[Any, Any]:
    """What figures need to know of a kind that is the user's own."""
    chief = figures_of(results.columns, rows)
    return {PLACES: places_of(results.columns, rows), **({CHIEF: chief[0].name} if chief else {})}


def _short(meaning: str) -> str:
    """The first words of a setting's sentence, where they fit an axis."""
    words = re.split(r"[,;]", meaning)[0]
    return words if len(words) <= _SHORT else ""


def _stated(results: Results, rows: pd.DataFrame) -> Iterator[tuple[str, pd.Series[Any]]]:
    """The labels that points state, by row: what its point states, else what its point had without a word about it."""
    points = {(study, str(point["key"])): point for study, one in results.manifests.items() for point in one["points"]}
    names = dict.fromkeys(name for point in points.values() for name in point.get("said", ()))
    if not names:
        return
    place = numbered((rows["study"], rows["key"]), len(rows))
    _, first = np.unique(place, return_index=True)
    own = [points[each] for each in zip(rows["study"].iloc[first], rows["key"].iloc[first], strict=True)]
    for name in names:
        values = [point["labels"].get(name, point.get("composed", {}).get(name)) for point in own]
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
