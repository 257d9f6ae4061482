"""Rows that are kept beside their points are the rows that are read one by one: every column, every type, every bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from numdev.report.reading import frames
from numdev.report.reading.frames import TEXT, Rows, column_of_values, is_broken
from numdev.report.reading.view import numbered

NUMBERS = (0.0, -0.0, 1.5, 1 / 3, 1e-310, math.nan, math.inf, -math.inf)
CELLS: dict[str, st.SearchStrategy[Any]] = {
    "text": st.sampled_from(["", "a", "b", "\x00", None]),
    "no text": st.none(),
    "number": st.sampled_from(NUMBERS),
    "count": st.integers(0, 2),
    "gaps": st.sampled_from([1, 2, None]),
    "flag": st.sampled_from([True, False, None]),
    "mixed": st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.floats(0, 1)),
    "list": st.lists(st.integers(0, 9), max_size=2),
}
DECLARED = ["subject", *CELLS]
ROW = st.fixed_dictionaries({"subject": st.sampled_from(["variant", "baseline"])}, optional=CELLS)
LABELS = st.fixed_dictionaries({"label.n": st.integers(0, 2), "label.text": st.sampled_from(["x", "y"])})
STUDY = st.lists(st.tuples(LABELS, st.lists(ROW, max_size=4)), max_size=6)
Study = list[tuple[dict[str, Any], list[dict[str, Any]]]]


def kept(study: Study, chunk: int = 1 << 14) -> Rows:
    """The rows of the records of some points, of which `chunk` are packed at a time."""
    reading = frames._Table()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "_CHUNK", chunk)
        for number, (_, record) in enumerate(study):
            reading.extend(record, number)
        return reading.rows(DECLARED, pd.DataFrame([labels for labels, _ in study], columns=["label.n", "label.text"]))


TABLES = st.lists(ROW, max_size=12).map(lambda rows: kept([({}, rows)]).frame(names=DECLARED))


def one_by_one(study: Study) -> dict[str, list[Any]]:
    """The oracle: every row as a dictionary of its own."""
    rows = [labels | dict.fromkeys(DECLARED) | row for labels, record in study for row in record]
    for row in rows:
        row["list"] = None if row["list"] is None else " ".join(map(str, row["list"]))
    return {name: [row[name] for row in rows] for name in ("label.n", "label.text", *DECLARED)}


def bits(values: pd.Series[Any]) -> list[str]:
    """Zeros of both signs are two values, and everything that is missing is one."""
    return ["missing" if pd.isna(value) else repr(value) for value in values.tolist()]


@settings(max_examples=40)
@given(STUDY, st.integers(1, 5))
def test_the_columns_are_those_of_rows_read_one_by_one(study: Study, chunk: int) -> None:
    """However rows are packed, the type of a column is that which all of its values allow."""
    table, expected = kept(study, chunk).frame(), one_by_one(study)
    assert sorted(map(str, table)) == sorted(expected)
    for name, values in expected.items():
        column = column_of_values(values)
        assert bits(table[name]) == bits(column), name
        if name in DECLARED:
            assert table[name].dtype == column.dtype, name


@settings(max_examples=25)
@given(STUDY, st.data())
def test_a_part_is_that_of_the_whole(study: Study, data: st.DataObject) -> None:
    rows = kept(study)
    whole = rows.frame()
    at = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5) if len(rows) else st.just([])), dtype=np.int64)
    names = data.draw(st.lists(st.sampled_from(rows.columns), min_size=1, unique=True))
    pd.testing.assert_frame_equal(rows.frame(at, names), whole[names].iloc[at], check_exact=True)
    chosen = rows.where(**{"subject": "variant", "label.n": 1})
    expected = (whole["subject"] == "variant") & (whole["label.n"] == 1)
    assert chosen.tolist() == expected.tolist()
    pd.testing.assert_frame_equal(rows.frame(chosen, names), whole[names][expected], check_exact=True)


@settings(max_examples=30)
@given(TABLES, st.lists(st.sampled_from(["text", "count", "gaps", "flag"]), min_size=1, unique=True))
def test_numbers_are_those_of_groups(table: pd.DataFrame, names: list[str]) -> None:
    expected = table.groupby(names, sort=False, dropna=False).ngroup()
    assert numbered(table, names).tolist() == expected.tolist()


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-(2**62), 2**62), st.floats(), st.text(max_size=3))


@given(st.lists(VALUES, max_size=9))
@example(["\x00", ""])
def test_a_column_has_every_value_or_its_text(values: list[Any]) -> None:
    column = column_of_values(values)
    kinds = {type(value) for value in values if value is not None}
    if column.dtype == TEXT:
        assert column.isna().tolist() == [value is None for value in values]
        assert column.dropna().tolist() == [str(value) for value in values if value is not None]
    else:
        number = float if float in kinds else bool if kinds == {bool} else int
        numbers = [None if value is None else number(value) for value in values]
        assert bits(column) == bits(pd.Series(numbers, dtype=object))


def test_a_row_is_broken_by_nan_or_by_inf_where_the_other_side_has_none() -> None:
    rows = pd.DataFrame({"nan_count": [0, 1, 0, None], "inf_count": [0, 0, 2, None]})
    assert is_broken(rows).tolist() == [False, True, True, False]
    assert is_broken(pd.DataFrame({"a": [1.0]})).tolist() == [False]
