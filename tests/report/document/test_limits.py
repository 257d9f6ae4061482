"""What a reader gets of very many points: the first ones, how many are left out, and where all of them stand."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from numdev.report.document.context import failures
from numdev.report.document.tables import MOST_FAILURES, failures_table
from numdev.report.reading.frames import Results, Rows
from numdev.report.studies.registry import MOST_ENTRIES, own_chapter


def failing(count: int) -> Results:
    points = [
        {"study": "s", "scenario.title": "", "label.n": n, "status": "error", "reason": f"because {n}"} for n in range(count)
    ]
    return Results(Rows.of(pd.DataFrame()), pd.DataFrame([*points, points[0] | {"status": "ok"}]), {})


def cells(found: Any) -> list[tuple[Any, ...]]:
    return list(zip(*(map(str, column.cells) for column in found.columns), strict=True))


@pytest.mark.parametrize("left", [0, 1, 7])
def test_failures_in_the_terminal_end(left: int) -> None:
    rows = cells(failures_table(failing(MOST_FAILURES + left), "unsupported.csv"))
    assert rows[:MOST_FAILURES] == [("s", f"n={n}", "error", f"because {n}") for n in range(MOST_FAILURES)]
    assert rows[MOST_FAILURES:] == ([("", f"and {left} more", "", "all are in unsupported.csv")] if left else [])


def test_failures_of_a_document_end_over_all_of_its_parts() -> None:
    half = MOST_FAILURES - 10
    rows = list(failures([failing(half), failing(half)], {"s": "A study"}))
    assert [row[1] for row in rows[:-1]] == [f"n={n}" for n in (*range(half), *range(10))]
    assert rows[-1][1] == f"and {half - 10} more"
    assert len(list(failures([failing(half)], {"s": "A study"}))) == half


@pytest.mark.parametrize("left", [0, 1, 900])
def test_the_entries_of_an_axis_end(left: int) -> None:
    count = MOST_ENTRIES + left
    points = [{"key": str(n), "labels": {"n": n, "m": n % 2}} for n in range(count)]
    told = own_chapter({"name": "s", "title": "t", "points": points}, ()).measured
    listed = ", ".join(map(str, range(MOST_ENTRIES))) + (f", and {left} more in points.csv" if left else "")
    assert told == f"{count} points: n ({listed}), m (0, 1)."
