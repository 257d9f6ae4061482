"""What a report knows of a kind of measurement that does not ship with numdev: what the columns of its records declare."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pandas as pd

from numdev.measurement.deviation.measurement import KIND as DEVIATION
from numdev.report.reading.frames import COMPARISON
from numdev.report.reading.training import KIND as TRAINING
from numdev.results.record import Column, Use

SPEED = "speed"
SHIPPED = (DEVIATION, SPEED, TRAINING)
_REPLICATES = (*COMPARISON, "cluster")  # places that every report knows
_SHORTEST = (Use.CHIEF, Use.FIGURE)  # chief figures first


def is_own(manifests: Iterable[Mapping[str, Any]]) -> bool:
    """Whether all of some studies are of kinds of the user's own."""
    return all(manifest["kind"] not in SHIPPED for manifest in manifests)


def places_of(columns: Mapping[str, Column], rows: pd.DataFrame) -> list[str]:
    """The columns that tell the rows of one replicate apart."""
    return [name for name in _present(columns, rows, (Use.PLACE,)) if name not in _REPLICATES]


def figures_of(columns: Mapping[str, Column], rows: pd.DataFrame) -> list[Column]:
    """The columns of figures, the chief ones first."""
    found = [columns[name] for name in _present(columns, rows, _SHORTEST) if pd.api.types.is_numeric_dtype(rows[name])]
    return sorted(found, key=lambda column: _SHORTEST.index(column.use))


def _present(columns: Mapping[str, Column], rows: pd.DataFrame, uses: Collection[Use]) -> list[str]:
    return [name for name, column in columns.items() if column.use in uses and name in rows and rows[name].notna().any()]
