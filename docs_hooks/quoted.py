"""Numbers that pages quote from the reference results, so that each stands in one file."""

from __future__ import annotations

import csv
import re
from functools import lru_cache
from pathlib import Path

REFERENCE = Path(__file__).resolve().parent.parent / "reports" / "reference"


def figure(path: str, pick: str = "", form: str = "", column: str = "figure", factor: float = 1, **row: str) -> str:
    """One number of a file of the reference results, as a page shows it.

    A table (`.csv`) needs the cells that name one row, and the column; another file needs a pattern.

    Args:
        path: of the file, in `reports/reference`.
        pick: regular expression whose one group is taken of the text, and which may match in one place only.
        form: format of the number, such as `.0%` or `.3g`; as it stands in the file without.
        column: of a table.
        factor: of a number with a form, such as 1e3 for seconds in ms.
        row: cells that name one row of a table, by column.

    Raises:
        LookupError: if this names nothing, or more than one thing.
    """
    text = _cell(path, column, row) if path.endswith(".csv") else (REFERENCE / path).read_text()
    if pick:
        found = set(re.findall(pick, text, re.MULTILINE))
        if len(found) != 1:
            raise LookupError(f"{path}: {pick!r} finds {sorted(found) or 'nothing'} in {text[:200]!r}")
        (text,) = found
    return format(float(text) * factor, form) if form else text.strip()


def spread(path: str, *columns: str, form: str = "", **row: str) -> str:
    """The smallest and the largest number of some columns of a table, as "0.1 to 0.3".

    Args:
        path: of the table, in `reports/reference`.
        columns: of numbers; an empty cell holds none.
        form: format of both numbers, as in `figure`.
        row: cells that select rows, by column; all rows without.

    Raises:
        LookupError: if no row is selected, or none holds a number.
    """
    rows = [each for each in rows_of(path) if all(each.get(name) == value for name, value in row.items())]
    found = [each[name] for each in rows for name in columns if each.get(name)]
    if not found:
        raise LookupError(f"{path}: no row of {row} has a number in {', '.join(columns) or 'no column'}")
    low, high = (format(float(end), form) if form else end for end in (min(found, key=float), max(found, key=float)))
    return low if low == high else f"{low} to {high}"


def ratio(path: str, column: str, of: dict[str, str], to: dict[str, str], form: str = ".2f") -> str:
    """A number of one row of a table over that of another, each row named by its cells; raises LookupError as `figure` does."""
    return format(float(_cell(path, column, of)) / float(_cell(path, column, to)), form)


def _cell(path: str, column: str, row: dict[str, str]) -> str:
    found = [each for each in rows_of(path) if all(each.get(name) == value for name, value in row.items())]
    if len(found) != 1:
        raise LookupError(f"{path}: {len(found)} rows have {row}; name one")
    if column not in found[0]:
        raise LookupError(f"{path} has no column {column!r}; it has {', '.join(found[0])}")
    return found[0][column]


@lru_cache(maxsize=16)
def rows_of(path: str) -> list[dict[str, str]]:
    """The rows of a table in `reports/reference`."""
    with (REFERENCE / path).open(newline="") as file:
        return list(csv.DictReader(file))
