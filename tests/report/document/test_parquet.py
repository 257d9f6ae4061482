from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

from numdev.report.document import export
from numdev.report.document.export import parquet_of, write_tables
from numdev.report.reading.frames import Results, Rows, column_of_values, load
from numdev.results.store import Store
from tests.report.reading.test_rows import TABLES


def pandas_writes(table: pd.DataFrame) -> bytes:
    """The oracle: all at once, by pandas."""
    buffer = io.BytesIO()
    table.to_parquet(buffer, engine="pyarrow", index=False)
    return buffer.getvalue()


def assert_same(found: bytes, expected: bytes) -> None:
    """Types, metadata and values, NaN and missing ones too."""
    ours, theirs = (pq.read_table(io.BytesIO(data)) for data in (found, expected))
    assert ours.schema.equals(theirs.schema, check_metadata=True)
    pd.testing.assert_frame_equal(
        pd.read_parquet(io.BytesIO(found)), pd.read_parquet(io.BytesIO(expected)), check_exact=True, check_freq=False
    )
    for name in theirs.column_names:
        a, b = (each[name].combine_chunks() for each in (ours, theirs))
        assert a.is_valid().equals(b.is_valid())
        if a.type == "double":
            assert a.to_numpy(zero_copy_only=False).tobytes() == b.to_numpy(zero_copy_only=False).tobytes()  # signs of zeros


@settings(max_examples=40)
@given(TABLES, st.integers(1, 5), st.data())
def test_parts_are_what_pandas_writes_at_once(table: pd.DataFrame, group: int, data: st.DataObject) -> None:
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(table), max_size=len(table))), dtype=bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_GROUP", group)
        parts, whole = list(parquet_of(Rows.of(table), chosen)), list(parquet_of(Rows.of(table)))
    assert_same(b"".join(parts), pandas_writes(table[chosen]))
    assert_same(b"".join(whole), pandas_writes(table))
    stated = pq.read_metadata(io.BytesIO(b"".join(parts)))
    sizes = [stated.row_group(i).num_rows for i in range(stated.num_row_groups)]
    assert all(0 < size <= group for size in sizes)


def test_a_column_that_is_missing_in_a_whole_group_keeps_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_GROUP", 2)
    rows: list[dict[str, Any]] = [{"i": 0}, {"i": 1}, {"i": 2, "text": "a", "count": 2, "yes": True}]
    table = pd.DataFrame({name: column_of_values([row.get(name) for row in [*rows, rows[2]]]) for name in rows[2]})
    found = pd.read_parquet(io.BytesIO(b"".join(parquet_of(Rows.of(table)))))
    assert (found["text"].isna().tolist(), found["text"].tolist()[2:]) == ([True, True, False, False], ["a", "a"])
    assert (str(found["count"].dtype), str(found["yes"].dtype)) == ("Int64", "boolean")


def test_tables_without_rows_or_columns_can_be_read() -> None:
    for table in (pd.DataFrame({"a": pd.Series(dtype="float64"), "b": pd.Series(dtype="Int64")}), pd.DataFrame()):
        assert_same(b"".join(parquet_of(Rows.of(table))), pandas_writes(table))


@pytest.fixture(scope="module")
def results(toy_results: Store) -> Results:
    return load(toy_results)


def test_a_report_has_the_distinct_rows(results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_GROUP", 1000)
    write_tables(results, [], tmp_path)
    data = (tmp_path / "results.parquet").read_bytes()
    assert pq.read_metadata(io.BytesIO(data)).num_row_groups > 1
    assert_same(data, pandas_writes(results.primary.frame(~results.primary.is_repeated())))
