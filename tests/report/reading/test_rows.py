"""Rows in little memory are the rows that are read one by one: every column, every type, every bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.report.reading.frames import is_broken
from numdev.report.reading.lean import numbered
from numdev.report.reading.rows import Reading, Rows
from numdev.report.reading.typed import column_of_values
from tests.report.reading.test_lean import CELLS

SUBJECTS = st.sampled_from(["variant", "baseline"])
ROW = st.fixed_dictionaries({"subject": SUBJECTS}, optional=CELLS)
BLOCKS = st.lists(ROW, max_size=4)
POOL = st.lists(BLOCKS, min_size=1, max_size=3)
"""What records say: few different things, so that records repeat them."""
LABELS = st.fixed_dictionaries({"label.n": st.integers(0, 2), "label.text": st.sampled_from(["x", "y"]), "one": st.just(0.5)})
DECLARED = ["subject", *CELLS]
Record = list[dict[str, Any]]


@st.composite
def studies(draw: st.DrawFn) -> list[tuple[dict[str, Any], Record]]:
    """Points and the rows of their records, which are put together of what few records say."""
    pool = draw(POOL)
    record = st.lists(st.sampled_from(pool), max_size=3).map(lambda blocks: [dict(row) for block in blocks for row in block])
    return draw(st.lists(st.tuples(LABELS, record), max_size=6))


def kept(study: list[tuple[dict[str, Any], Record]]) -> Rows:
    reading = Reading()
    for _, record in study:
        reading.add(record)
    points = pd.DataFrame([labels for labels, _ in study], columns=["label.n", "label.text", "one"])
    return reading.typed(DECLARED, points)


def one_by_one(study: list[tuple[dict[str, Any], Record]]) -> dict[str, list[Any]]:
    """The oracle: every row as a dictionary of its own."""
    rows = [labels | dict.fromkeys(DECLARED) | row for labels, record in study for row in record]
    return {name: [row[name] for row in rows] for name in ("label.n", "label.text", "one", *DECLARED)}


def bits(values: pd.Series[Any]) -> list[str]:
    """Zeros of both signs are two values, and everything that is missing is one."""
    return ["missing" if pd.isna(value) else repr(value) for value in values.tolist()]


@settings(max_examples=60)
@given(studies())
def test_the_columns_are_those_of_rows_read_one_by_one(study: list[tuple[dict[str, Any], Record]]) -> None:
    rows, expected = kept(study), one_by_one(study)
    assert len(rows) == sum(len(record) for _, record in study)
    found = rows.frame()
    assert sorted(rows.columns) == sorted(map(str, found)) == sorted(expected)
    for name, values in expected.items():
        column = column_of_values(values)
        assert bits(found[name]) == bits(column)
        if name in DECLARED:
            assert found[name].dtype == column.dtype
    assert len(rows.own) == len(set(map(repr, _blocks(study))))


def _blocks(study: list[tuple[dict[str, Any], Record]]) -> list[tuple[Any, ...]]:
    """Each row of what a record says of a subject, with its place there and with all that the record says of the subject."""
    found = []
    for _, record in study:
        for subject in dict.fromkeys(row["subject"] for row in record):
            block = [list(row.items()) for row in record if row["subject"] == subject]
            found += [(place, block) for place in range(len(block))]
    return found


@settings(max_examples=30)
@given(studies(), st.data())
def test_a_part_is_that_of_the_whole(study: list[tuple[dict[str, Any], Record]], data: st.DataObject) -> None:
    rows = kept(study)
    whole = rows.frame()
    at = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5) if len(rows) else st.just([])), dtype=np.int64)
    names = data.draw(st.lists(st.sampled_from(rows.columns), min_size=1, unique=True))
    pd.testing.assert_frame_equal(rows.frame(at, names), whole[names].iloc[at], check_exact=True)
    for name in names:
        assert bits(rows.column(name)) == bits(whole[name])
    assert rows.numbered(names, at).tolist() == numbered((whole[name].iloc[at] for name in names), len(at)).tolist()


@settings(max_examples=30)
@given(studies())
def test_rows_are_found_by_what_they_say_and_by_their_point(study: list[tuple[dict[str, Any], Record]]) -> None:
    rows = kept(study)
    whole = rows.frame()
    own = (rows.own["subject"] == "variant").to_numpy(dtype=bool)
    points = (rows.points["label.n"] == 1).to_numpy(dtype=bool)
    variant, ones = whole["subject"] == "variant", whole["label.n"] == 1
    assert rows.where(own).tolist() == whole.index[variant].tolist()
    assert rows.where(points=points).tolist() == whole.index[ones].tolist()
    assert rows.where(own, points).tolist() == whole.index[variant & ones].tolist()
    assert rows.where().tolist() == whole.index.tolist()


def test_what_differs_by_a_bit_is_no_repetition() -> None:
    """-0.0 is not 0.0, 1 is not True, and NaN is NaN."""
    for first, second, count in ((0.0, -0.0, 2), (1, True, 2), (1, 1.0, 2), (math.nan, math.nan, 1), (None, math.nan, 2)):
        reading = Reading()
        for value in (first, second, first):
            reading.add([{"subject": "baseline", "rmse": value}])
        assert len(reading.typed([], pd.DataFrame(index=range(3))).own) == count


def test_a_baseline_is_kept_once_and_stands_under_every_point() -> None:
    reading = Reading()
    for point in range(4):
        variant = [{"subject": "variant", "seed": seed, "rmse": float(point)} for seed in range(2)]
        baseline = [row | {"subject": "baseline", "rmse": 7.0} for row in variant]
        reading.add([row for pair in zip(variant, baseline, strict=True) for row in pair])
    rows = reading.typed([], pd.DataFrame({"key": list("abcd")}))
    assert (len(rows), len(rows.own)) == (16, 4 * 2 + 2)
    found = rows.frame()
    assert found["key"].tolist() == [name for name in "abcd" for _ in range(4)]
    assert found["rmse"].tolist() == [value for point in range(4) for value in [float(point), 7.0] * 2]
    assert rows.point.dtype == np.int32


def test_a_table_is_not_copied() -> None:
    table = pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]}, index=[5, 5])
    rows = Rows.of(table)
    assert Rows.of(rows) is rows
    assert np.shares_memory(rows.frame()["a"].to_numpy(), table["a"].to_numpy())
    assert rows.frame(np.array([1])).to_dict("records") == [{"a": 2.0, "b": "y"}]


def test_faults_are_counted_also_where_a_column_has_gaps() -> None:
    table = pd.DataFrame({"nan_count": pd.array([0, 1, None], dtype="Int64"), "inf_count": [0.0, 0.0, math.nan]})
    assert is_broken(table).tolist() == [False, True, False]
    assert is_broken(table.assign(both_nan_count=[2, 0, 0])).tolist() == [True, True, False]
