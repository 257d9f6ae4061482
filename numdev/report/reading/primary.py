"""Which of an operation's outputs a table, figure or claim is about."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from numdev.report.reading.frames import PRIMARY
from numdev.report.reading.lean import part


def primary(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the primary output, as the records say of each row whether it is of that."""
    return part(rows, rows[PRIMARY].astype(bool))


def compared(rows: pd.DataFrame, subject: str = "variant", reference: str = "") -> pd.DataFrame:
    """The rows of the primary output of one subject, against one reference where it is named."""
    return part(rows, is_compared(rows, subject, reference))


def is_compared(rows: pd.DataFrame, subject: str = "variant", reference: str = "") -> NDArray[np.bool_]:
    """Which rows `compared` keeps."""
    wanted = rows[PRIMARY].astype(bool) & (rows["subject"] == subject)
    return (wanted & (rows["reference"] == reference) if reference else wanted).to_numpy(dtype=bool)
