from __future__ import annotations

import pandas as pd

from numdev.report.reading.primary import primary


def test_each_point_has_its_own_primary_output() -> None:
    """Two operations in one table: one that calls its result `out`, another whose outputs are gradients."""
    outputs = [("a", "out"), ("a", "lse"), ("b", "dq"), ("b", "dk"), ("a", "out"), ("b", "dq")]
    rows = pd.DataFrame(outputs, columns=["key", "output"])
    assert primary(rows)["output"].tolist() == ["out", "dq", "out", "dq"]
    assert primary(rows.iloc[:0]).empty


def test_rows_of_one_record_need_no_key() -> None:
    rows = pd.DataFrame({"output": ["dq", "dk", "dq"], "seed": [0, 0, 1]})
    assert primary(rows)["seed"].tolist() == [0, 1]
