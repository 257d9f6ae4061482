"""Results of training runs as files that a spreadsheet or another program reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd

from numdev.report.claims.verdicts import ClaimResult
from numdev.report.document.export import claim_table, csv_of, environments, summarise_by, write_rows
from numdev.report.reading.columns import dictionary
from numdev.report.reading.configuration import settings
from numdev.report.reading.frames import LABEL, PLACE, Results
from numdev.report.reading.rows import Rows
from numdev.report.reading.scenarios import ENTRY_ROLE
from numdev.report.reading.training import LOSS, RUN, WATCH
from numdev.results.record import Column
from numdev.results.store import write_atomically

_ABOUT = (
    "A figure of weights compares those of a run with those of its reference (columns `baseline.`) after the same step.\n"
    "An empty cell does not apply."
)
_GROUP = ["step", "tensor"]


def write_training_tables(results: Results, claims: list[ClaimResult], out: Path, csv: bool = False) -> None:
    """Write weights.parquet, summary.csv, loss.csv, runs.csv, points.csv, timings.csv, claims.csv, columns.md, environment.json.

    Where runs were watched, watch.csv too. With `csv`, weights.csv in place of weights.parquet.

    Raises:
        StoreError: if a file cannot be written.
    """
    weights = _narrow(results.stored)
    tables: dict[str, pd.DataFrame | Rows] = {
        "summary.csv": summarise_weights(weights.frame()),
        "loss.csv": _narrow(results.further[LOSS]),
        "runs.csv": _narrow(results.further[RUN]),
        **({"watch.csv": _narrow(results.further[WATCH])} if len(results.further[WATCH]) else {}),
        "points.csv": results.points.drop(columns="seconds", errors="ignore"),
        "timings.csv": results.points.reindex(columns=[*PLACE, "seconds"]),
        "claims.csv": claim_table(claims),
    }
    for name, table in tables.items():
        write_atomically(out / name, csv_of(table))
    file = write_rows(out, "weights", weights, csv=csv)
    declared = {name: _of_weights(column) for name, column in results.columns.items()} | settings(results.manifests.values())
    said = dictionary({name: table.columns for name, table in {file: weights, **tables}.items()}, declared, _ABOUT)
    write_atomically(out / "columns.md", said.encode())
    write_atomically(out / "environment.json", environments(results))


def _of_weights(column: Column) -> Column:
    return replace(column, unit="absolute, in the units of the weights") if column.unit == "absolute" else column


def _narrow(rows: Rows) -> Rows:
    """Rows without the settings of their points, which points.csv has."""
    return replace(rows, points=_without_settings(rows.points), own=_without_settings(rows.own))


def _without_settings(table: pd.DataFrame) -> pd.DataFrame:
    return table[[name for name in table if not str(name).startswith(("problem.", "variant.", "baseline.", "scenario."))]]


def summarise_weights(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per point, step and tensor: mean over replicates, its 95 % interval and the range of every metric."""
    by = [*PLACE, *(str(name) for name in rows if str(name).startswith((LABEL, ENTRY_ROLE))), *_GROUP]
    metrics = [str(name) for name in rows if name not in (*by, "seed")]
    return summarise_by(rows, by, metrics)
