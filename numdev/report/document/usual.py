"""The figure of a study that names none, and the rows that it is drawn from: of a large study a part of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from numdev.report.figures.plot import Plot
from numdev.report.figures.points import NEEDED, POINTS
from numdev.report.figures.sweep import default_of, plot_of
from numdev.report.reading.frames import LABEL, PRIMARY, Results
from numdev.report.reading.kinds import is_own
from numdev.report.reading.rows import Rows
from numdev.report.reading.tidy import tidy
from numdev.report.reading.view import OF_A_COMPARISON, asked
from numdev.report.studies.own import own_plot

_NAMED = ("x", "colour", "facet")


def usual(results: Results, study: str) -> tuple[Plot, pd.DataFrame]:
    """The figure that a study describes; else, as of a sweep, its metric over its axes, or every point where it has too many.

    Raises:
        BadInput: if the rows do not have what the study describes, or those of a kind of the user's own differ in nothing.
    """
    manifest, at = results.manifests[study], results.of_study(study)
    rows = shown_by(results, at, manifest.get("plot") or {})
    if is_own([manifest]):
        return own_plot(manifest, rows) or plot_of(rows, {}), rows
    is_grid = manifest["swept"] != []
    found = own_plot(manifest, rows) or (default_of(rows) if is_grid and len(rows) else None)
    return (POINTS, _of_points(results, at)) if found is None else (found, rows)


def shown_by(results: Results, at: NDArray[np.int64], given: Mapping[str, Any]) -> pd.DataFrame:
    """The tidy table of those of some rows from which a view can be chosen and drawn; `at` has their numbers, `given` is stated.

    These are the rows of the one comparison that `numdev.report.reading.view.shown` keeps, of a deviation a tenth. They are all
    of `at` where the view spreads comparisons out, or where a point or a figure is in others alone.
    """
    rows, some = results.stored, at
    if not is_own(results.manifests.values()) and (wanted := _wanted(rows, asked(given))) is not None:
        kept = np.ones(len(rows.own), dtype=np.bool_)
        for column, value in wanted:
            kept &= (rows.own[column] == value).to_numpy(dtype=bool)
        some = at[kept[rows.places(at)]]
    names = [name for key in _NAMED for name in _several(asked(given).get(key, ()))]
    return tidy(results, rows.frame(some if _tell_the_same(rows, some, at) else at), names)


def _wanted(rows: Rows, view: Mapping[str, Any]) -> list[tuple[str, Any]] | None:
    """The values that `shown` asks of columns of the records; None for a view of which that is not known."""
    names = [name for key in _NAMED for name in _several(view.get(key, ()))]
    if any(name in rows.own or f"{LABEL}{name}" in rows.own for name in names):
        return None
    stated = OF_A_COMPARISON | ({"reference": view["reference"]} if "reference" in view else {})
    found: list[tuple[str, Any]] = [(name, value) for name, value in stated.items() if name in rows.own]
    y = view.get("y", "")
    output, _, metric = y.partition(".")
    if "output" in rows.own and metric in rows.own and (rows.own["output"] == output).any():
        return [*found, ("output", output)]
    if y and y not in rows:
        return None
    return [*found, (PRIMARY, True)] if PRIMARY in rows.own else found


def _several(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _tell_the_same(rows: Rows, some: NDArray[np.int64], at: NDArray[np.int64]) -> bool:
    """Whether some of the rows `at` have all of their points, and a value wherever any row has one."""
    if len(some) == len(at):
        return True
    has, needed = (np.bincount(rows.point[each], minlength=len(rows.points)) > 0 for each in (some, at))
    if not np.array_equal(has, needed):
        return False
    own = np.unique(rows.places(some))
    return all(rows.own[name].iloc[own].notna().any() for name in _filled(rows.own))


def _filled(table: pd.DataFrame) -> Iterator[str]:
    return (name for name in map(str, table) if table[name].notna().any())


def _of_points(results: Results, at: NDArray[np.int64]) -> pd.DataFrame:
    """The rows and columns that the figure of every point draws: variant and baseline against golden."""
    rows = results.stored
    names = [name for name in rows.columns if name in ("study", "key", *NEEDED) or name.startswith(LABEL)]
    kept = rows.own[PRIMARY].astype(bool) & (rows.own["reference"] == "golden")
    some = at[kept.to_numpy(dtype=bool)[rows.places(at)]]
    return tidy(results, rows.frame(some if _tell_the_same(rows, some, at) else at, names))
