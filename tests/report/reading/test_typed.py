from __future__ import annotations

from typing import Any

from numdev.report.reading.typed import flatten, typed


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
