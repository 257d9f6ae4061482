from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numdev.report.reading import typed as typing_of_tables
from numdev.report.reading.typed import Growing, column_of_values, flatten, typed

CELLS = st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.floats(), st.sampled_from("ab"), st.lists(st.integers(0, 9)))
ALIKE = st.lists(st.fixed_dictionaries({"a": CELLS, "b": st.floats()}), max_size=9)
UNLIKE = st.lists(st.dictionaries(st.sampled_from("abc"), CELLS), max_size=5)


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": None}}, "e": [1, 2]}) == {"a.b": 1, "a.c.d": None, "e": "[1, 2]"}


def test_columns_have_one_type_each() -> None:
    record: dict[str, Any] = {"a": 1, "b": True, "c": 0.5, "d": 3, "e": None}
    other = {"a": "x", "b": None, "c": 2, "d": None, "e": None}
    found = typed([record, other], [])
    assert found["a"].tolist() == ["1", "x"]
    assert str(found["b"].dtype) == "boolean"
    assert found["c"].tolist() == [0.5, 2.0]
    assert str(found["d"].dtype) == "Int64"
    assert found["e"].isna().all()


def test_columns_stand_by_kind_and_those_asked_for_are_there() -> None:
    found = typed([{"seconds": 1.0, "variant.b": 1, "problem.a": 1, "label.x": 1, "seeds": 1}], ["key", "seconds"])
    assert list(found) == ["key", "label.x", "problem.a", "variant.b", "seeds", "seconds"]
    assert list(typed([], ["key"])) == ["key"]


@given(st.lists(st.one_of(ALIKE, UNLIKE), max_size=4), st.integers(1, 5))
def test_rows_together_are_their_values_by_column(groups: list[list[dict[str, Any]]], chunk: int) -> None:
    table, plain = Growing(), list[dict[str, Any]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typing_of_tables, "_CHUNK", chunk)
        for number, rows in enumerate(groups):
            table.extend(rows, point=number)
            for row in rows:
                texts = {name: " ".join(map(str, cell)) for name, cell in row.items() if isinstance(cell, list)}
                plain.append({"point": number} | row | texts)
        found = table.typed(["point"])
    names = dict.fromkeys(["point", *(name for row in plain for name in row)])
    expected = {name: column_of_values([row.get(name) for row in plain]) for name in names}
    pd.testing.assert_frame_equal(found, pd.DataFrame(expected), check_exact=True)


def test_a_label_that_is_a_list_stands_as_it_is_written() -> None:
    assert typed([{"label.a": [1, 2]}], [])["label.a"].tolist() == ["[1, 2]"]


def test_texts_beyond_the_most_that_are_shared_keep_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typing_of_tables, "_MANY", 2)
    values = [f"text {i % 4}" for i in range(12)]
    found = typed([{"a": value} for value in values], [])["a"]
    assert found.tolist() == values
    assert len({id(text) for text in found if text in ("text 0", "text 1")}) == 2
