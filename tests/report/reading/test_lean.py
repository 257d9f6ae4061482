from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from numdev.report.document import export
from numdev.report.reading.lean import TEXT, Run, numbered, part, repeated
from numdev.report.reading.typed import typed

NUMBERS = (0.0, -0.0, 1.5, 1 / 3, 1e-310, math.nan, math.inf, -math.inf)
CELLS: dict[str, st.SearchStrategy[Any]] = {
    "text": st.sampled_from(["", "a", "b", None]),
    "one text": st.just("a"),
    "no text": st.none(),
    "number": st.sampled_from(NUMBERS),
    "one number": st.just(0.5),
    "count": st.integers(0, 2),
    "one count": st.just(7),
    "gaps": st.sampled_from([1, 2, None]),
    "flag": st.booleans(),
}
TABLES = st.lists(st.fixed_dictionaries(CELLS), max_size=12).map(lambda rows: typed(rows, list(CELLS)))


def strides(column: pd.Series[Any]) -> tuple[int, ...]:
    return np.asarray(column.array).strides


@given(TABLES, st.data())
def test_a_part_is_what_pandas_chooses(table: pd.DataFrame, data: st.DataObject) -> None:
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(table), max_size=len(table))), dtype=bool)
    table.attrs = {"words": 1}
    found = part(table, chosen)
    pd.testing.assert_frame_equal(found, table[chosen], check_exact=True)
    assert found.attrs == table.attrs


@given(TABLES, st.data())
def test_repeated_is_what_pandas_takes(table: pd.DataFrame, data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.integers(0, len(table) - 1), max_size=9)) if len(table) else []
    places = np.array(drawn, dtype=np.int64)
    for name in table:
        expected = table[name].take(places).reset_index(drop=True)
        pd.testing.assert_series_equal(repeated(table[name], places), expected, check_names=False, check_exact=True)


@given(TABLES, st.lists(st.sampled_from(list(CELLS)), min_size=1, unique=True))
def test_numbers_are_those_of_groups(table: pd.DataFrame, names: list[str]) -> None:
    expected = table.groupby(names, sort=False, dropna=False).ngroup()
    assert numbered((table[name] for name in names), len(table)).tolist() == expected.tolist()


def test_a_column_of_one_value_keeps_one() -> None:
    table = typed([{"a": "x", "b": 1, "c": 0.5, "d": None, "e": i} for i in range(9000)], [])
    places = np.arange(0, 9000, 2)
    for found in (table, part(table, table["e"] > 10), pd.DataFrame({n: repeated(table[n], places) for n in table}, copy=False)):
        assert [strides(found[name]) for name in table] == [(0,), (0,), (0,), (0,), (8,)]
    assert table["a"].dtype == TEXT == table["d"].dtype


def test_equal_texts_are_one_object() -> None:
    table = typed([{"a": str(i % 2)} for i in range(9000)], [])
    assert len({id(text) for text in table["a"]}) == 2


def test_a_copy_can_be_changed() -> None:
    table = typed([{"a": "x", "b": 1}] * 3, []).copy()
    table.loc[1, "a"], table.loc[1, "b"] = "y", 2
    assert table.to_dict("list") == {"a": ["x", "y", "x"], "b": [1, 2, 1]}


@given(st.lists(st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=5), min_size=1, max_size=6))
def test_a_run_is_its_values_bit_for_bit(chunks: list[list[float]]) -> None:
    """Zeros of both signs are two values, and NaN is one."""
    run = Run(np.dtype(np.float64))
    for chunk in chunks:
        run.add(np.array(chunk))
    assert run.whole().tobytes() == np.concatenate(chunks).tobytes()


@given(TABLES, st.integers(1, 5), st.data())
def test_a_table_written_in_parts_is_the_table(table: pd.DataFrame, rows: int, data: st.DataObject) -> None:
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(table), max_size=len(table))), dtype=bool)
    whole, export._PART = export._PART, rows
    try:
        found = [b"".join(export.csv_of(table)), b"".join(export.csv_of(table, chosen))]
    finally:
        export._PART = whole
    assert found == [own.to_csv(index=False, float_format="%.9g", lineterminator="\n").encode() for own in (table, table[chosen])]
