"""Which of an operation's outputs a table, figure or claim is about."""

from __future__ import annotations

import pandas as pd

from numdev.report.reading.frames import PRIMARY
from numdev.report.reading.lean import part


def primary(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the primary output, as the records say of each row whether it is of that."""
    return part(rows, rows[PRIMARY].astype(bool))


def compared(rows: pd.DataFrame, subject: str = "variant", reference: str = "") -> pd.DataFrame:
    """The rows of the primary output of one subject, against one reference where it is named."""
    wanted = rows[PRIMARY].astype(bool) & (rows["subject"] == subject)
    return part(rows, wanted & (rows["reference"] == reference) if reference else wanted)
