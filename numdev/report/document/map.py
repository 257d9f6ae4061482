"""The error of every element of one head: a map and a distribution as files, and the largest error in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from numdev.report.figures.elements import COLUMN, ROW, error_histogram, error_map
from numdev.report.figures.theme import to_png, to_svg
from numdev.report.statistics import significant
from numdev.results.record import write_atomically

_MAP = "Errors of one head by row and column, in u max |{reference}|, blue below zero and red above, a ring at the largest."
_HISTOGRAM = "The share of elements over their error in ulp, with a band of half an ulp on both sides."


def write_figures(elements: pd.DataFrame, title: str, out: Path, suffix: str = "", reference: str = "golden") -> list[Path]:
    """Write error_map and error_histogram of `element_errors` as PNG and SVG into `out`; returns where.

    Raises:
        StoreError: if a file cannot be written.
    """
    drawn = {
        "error_map": (error_map(elements, title, reference), _MAP.format(reference=reference)),
        "error_histogram": (error_histogram(elements, title), _HISTOGRAM),
    }
    files: dict[Path, bytes] = {}
    for name, (figure, alt) in drawn.items():
        caption = f"{name.replace('_', ' ').capitalize()}: {' '.join(title.split())}"
        files |= {out / f"{name}{suffix}.png": to_png(figure), out / f"{name}{suffix}.svg": to_svg(figure, caption, alt)}
    for path, data in files.items():
        write_atomically(path, data)
    return list(files)


def summary(elements: pd.DataFrame, reference: str = "golden") -> Iterator[str]:
    """The largest error with its place, then how the elements spread."""
    finite = elements[np.isfinite(elements["error"])]
    lost = len(elements) - len(finite)
    if finite.empty:
        yield f"all {lost} elements are NaN or Inf"
        return
    worst = finite.loc[finite["error"].abs().idxmax()]
    exact = float(worst["reference"])
    largest, ulp, u, value, r = (
        significant(number, 4)
        for number in (*(abs(worst[name]) for name in ("error", "error_ulp", "error_u")), exact + float(worst["error"]), exact)
    )
    yield f"largest |D|: {largest} at row {worst[ROW]}, column {worst[COLUMN]}, where it is {value} and {reference} is {r}"
    yield f"that is {ulp} ulp of {elements['format'].iloc[0]} there, and {u} u max |{reference}|"
    within = 100 * float((finite["error_ulp"].abs() <= 0.5).mean())
    rmse = significant(float(np.sqrt((finite["error"] ** 2).mean())), 4)
    yield f"RMSE {rmse}; {within:.3g} % of the elements lie within half an ulp"
    if lost:
        yield f"{lost} elements are NaN or Inf, black in the map and in no other figure"
