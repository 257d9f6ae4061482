"""The rows of a baseline, which stand under every point of its problem and count once."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from numdev.report.reading.frames import COMPARISON
from numdev.report.reading.lean import part
from numdev.report.reading.rows import Rows
from numdev.report.reading.scenarios import SCENARIO


def distinct(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows without a baseline's repetitions: in a scenario it stands once per problem, under its first point."""
    return part(rows, ~is_repeated(rows))


def is_repeated(table: pd.DataFrame | Rows) -> NDArray[np.bool_]:
    """Which rows `distinct` leaves out."""
    rows = Rows.of(table)
    same = ("study", SCENARIO, "pairing", *(name for name in COMPARISON if name in rows))
    own = rows.where(own=(rows.own["subject"] == "baseline").to_numpy(dtype=bool))
    found = np.zeros(len(rows), dtype=np.bool_)
    found[own] = pd.Series(rows.numbered(same, own)).duplicated()
    return found
