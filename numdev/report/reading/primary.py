"""Which of an operation's outputs a table, figure or claim is about."""

from __future__ import annotations

import pandas as pd


def primary(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of each point's primary output, which its record lists first; rows without a `key` are of one record."""
    if rows.empty:
        return rows
    first = rows.groupby("key", sort=False)["output"].transform("first") if "key" in rows else rows["output"].iloc[0]
    return rows[rows["output"] == first]
