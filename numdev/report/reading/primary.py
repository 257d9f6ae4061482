"""Which of an operation's outputs a table, figure or claim is about."""

from __future__ import annotations

import pandas as pd

from numdev.report.reading.frames import PRIMARY


def primary(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the primary output, as the records say of each row whether it is of that."""
    return rows[rows[PRIMARY].astype(bool)]
