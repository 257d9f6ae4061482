from __future__ import annotations

import pandas as pd

from numdev.report.reading.primary import primary


def test_each_point_has_its_own_primary_output() -> None:
    """Two operations in one table, of which one lists another output first."""
    outputs = [("a", "out", True), ("a", "lse", False), ("b", "dk", False), ("b", "dq", True)]
    rows = pd.DataFrame(outputs, columns=["key", "output", "primary"])
    assert primary(rows)["output"].tolist() == ["out", "dq"]
    assert primary(rows.iloc[:0]).empty


def test_a_point_that_lacks_its_primary_output_has_none() -> None:
    rows = pd.DataFrame({"output": ["dk", "dk"], "primary": [False, False]})
    assert primary(rows).empty
