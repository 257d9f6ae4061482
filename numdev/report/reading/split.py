"""What tells points apart that a line of a figure would join, although they differ in a setting that the figure does not show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from numdev.report.reading.frames import LABEL
from numdev.report.reading.lean import numbered, part, repeated
from numdev.report.reading.scenarios import TITLE

STATED, PLACES = "stated", "places"
"""In `DataFrame.attrs`: the labels that the points of each study state; the columns that tell the rows of one replicate apart."""
_Codes = NDArray[np.int64]


def split(rows: pd.DataFrame, x: str, shown: Sequence[str], *, with_baseline: bool) -> tuple[pd.DataFrame, list[str]]:
    """The fewest further columns by which no line joins points that differ in a setting, and the rows with these columns.

    Points of a line may differ in x, and in what follows from it: no point of a study states the setting, and it has one value
    wherever what they state agrees, as the tile follows from a size of on-chip memory. Such a value is missing from the column,
    and so is the setting of a variant in rows of a baseline that stands beside several. Of several records of one replicate of a
    mark, as those of a point in two studies, the first counts.

    Args:
        rows: of one figure.
        x: the column along a line.
        shown: the columns that tell lines and panels apart.
        with_baseline: whether the settings of the baseline matter too.
    """
    labels = [name for name in map(str, rows) if name.startswith(LABEL) and differs(rows, name)]
    titles = [TITLE] if differs(rows, TITLE) and bool((rows[TITLE].fillna("") != "").all()) else []
    parts = ("problem.", "variant.", *(("baseline.",) if with_baseline else ()))
    settings = [name for name in map(str, rows) if name.startswith(parts) and differs(rows, name)]
    settings.sort(key=lambda name: not name.endswith((".name", ".kind", ".type")))  # a preset before what it consists of
    places = [name for name in rows.attrs.get(PLACES, ()) if differs(rows, name)]
    machine = ["environment"] if differs(rows, "environment") else []
    known = [name for name in ("study", "subject", "pairing", x, *shown) if name in rows]
    columns = dict.fromkeys([*known, *titles, *labels, *settings, *places, *machine])
    place = _numbered(rows, columns)
    points = rows.iloc[np.unique(place, return_index=True)[1]]

    told = _numbered(points, [*titles, *labels, x, *shown])
    settings = [name for name in settings if not _follows(points[name], told)]
    every = _numbered(points, [*settings, *places], told)
    machine = [name for name in machine if not _follows(points[name], every)]  # a point was measured in two environments
    lines, found = _numbered(points, shown), list[str]()
    for name in (*titles, *labels, *settings, *places, *machine):
        if name in (x, *shown):
            continue
        values = points[name].astype(object)
        if name != TITLE:
            values = values.mask(_implied(points, name, x, [*shown, *found], rows.attrs.get(STATED, {})), None)
        if not _follows(values, lines):
            points = points.assign(**{name: values.infer_objects()})
            lines = _numbered(points, [name], lines)
            found.append(name)
    own = rows.assign(**{name: repeated(points[name], place).set_axis(rows.index) for name in found})
    return _once(own, [x, *shown, *found, *places]), found


def differs(rows: pd.DataFrame, name: str) -> bool:
    """Whether rows differ in a column."""
    return name in rows and rows[name].nunique(dropna=False) > 1


def _numbered(rows: pd.DataFrame, names: Iterable[str], within: _Codes | None = None) -> _Codes:
    """A number for each row, the same where rows agree in some columns, and in the numbers that they have."""
    columns = (rows[name] for name in names)
    return numbered(columns if within is None else [pd.Series(within), *columns], len(rows))


def _follows(values: pd.Series[Any], groups: _Codes) -> bool:
    """Whether rows of one group agree in a column."""
    return int(numbered([pd.Series(groups), values], len(groups)).max()) == int(groups.max())


def _implied(
    points: pd.DataFrame, name: str, x: str, lines: Sequence[str], stated: Mapping[str, Sequence[str]]
) -> NDArray[np.bool_]:
    """The points whose value of a column follows from others, within their study or of their baseline."""
    found = np.zeros(len(points), dtype=np.bool_)
    for study, at in _studies(points):
        own = points.iloc[at]
        labels = [f"{LABEL}{each}" for each in stated[study]] if study in stated else _labels(own)
        basis = [each for each in (*labels, *({TITLE} & {x, *lines})) if each in own]
        given = basis if name not in basis else [x, *lines] if x not in basis else []
        varies = not _follows(own[name], _numbered(own, lines))
        found[at] = varies and bool(given) and _follows(own[name], _numbered(own, given))
    if {"subject", "pairing"} <= set(points) and name.startswith((LABEL, "variant.")):
        at = np.flatnonzero(points["subject"] == "baseline")
        own = points.iloc[at]
        found[at] |= len(at) > 0 and not _follows(own[name], _numbered(own, ["pairing"]))
    return found


def _studies(points: pd.DataFrame) -> Iterator[tuple[str, NDArray[np.int64]]]:
    names = points["study"] if "study" in points else pd.Series("", points.index)
    for name in names.unique():
        yield str(name), np.flatnonzero(names == name)


def _labels(rows: pd.DataFrame) -> list[str]:
    return [name for name in map(str, rows) if name.startswith(LABEL) and rows[name].notna().any()]


def _once(rows: pd.DataFrame, mark: Sequence[str]) -> pd.DataFrame:
    """Rows without further records of a replicate that a mark has already."""
    if "key" not in rows:
        return rows
    replicate = _numbered(rows, dict.fromkeys([*mark, *(name for name in ("seed", "cluster") if name in rows)]))
    record = _numbered(rows, [name for name in ("study", "key") if name in rows])
    first = record[np.unique(replicate, return_index=True)[1]]
    return part(rows, record == first[replicate])
