"""Results of a kind of measurement of the user's own: its tables as files, and a table of its points for a reader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from numdev.report.claims.verdicts import ClaimResult
from numdev.report.document.export import claim_table, csv_of, environments, summarise_by, write_rows
from numdev.report.reading.columns import dictionary
from numdev.report.reading.configuration import settings
from numdev.report.reading.frames import LABEL, PLACE, Results, load
from numdev.report.reading.kinds import figures_of, places_of
from numdev.report.reading.rows import Rows
from numdev.report.reading.scenarios import ENTRY_ROLE
from numdev.results.store import Store, write_atomically

_ABOUT = "A figure is what the kind of measurement says that it is. An empty cell does not apply."


def load_own(store: Store, kind: str, studies: Sequence[str]) -> Results:
    """The studies and sweeps of a kind, with every further table of their records.

    Raises:
        BadInput: as `load`.
    """
    keys = (str(point["key"]) for name in studies for point in (store.study(name) or {"points": ()})["points"])
    records = (record for key in keys if (record := store.get(key)) is not None)
    tables = dict.fromkeys(name for record in records for name in list(record.columns)[1:])
    return load(store, studies, kind=kind, tables=list(tables))


def write_own_tables(results: Results, claims: list[ClaimResult], out: Path, csv: bool = False) -> None:
    """Write results.parquet, summary.csv, points.csv, timings.csv, claims.csv, columns.md and environment.json into `out`.

    A further table has a file of its own name. With `csv`, results.csv in place of results.parquet.

    Raises:
        StoreError: if a file cannot be written.
    """
    tables: dict[str, pd.DataFrame | Rows] = {
        "summary.csv": summary_of(results),
        "points.csv": results.points.drop(columns="seconds", errors="ignore"),
        "timings.csv": results.points.reindex(columns=[*PLACE, "seconds"]),
        "claims.csv": claim_table(claims),
    }
    for name, rows in results.further.items():
        tables[f"{name}.csv" if f"{name}.csv" not in tables else f"table_{name}.csv"] = rows
    for name, table in tables.items():
        write_atomically(out / name, csv_of(table))
    file = write_rows(out, "results", results.stored, csv=csv)
    declared = results.columns | settings(results.manifests.values())
    names = {file: list(results.stored.columns)} | {name: list(table.columns) for name, table in tables.items()}
    said = dictionary(names, declared, _ABOUT)
    write_atomically(out / "columns.md", said.encode())
    write_atomically(out / "environment.json", environments(results))


def summary_of(results: Results) -> pd.DataFrame:
    """One row per point and place that the kind declares: mean over replicates, its 95 % interval and range of each figure."""
    rows = results.rows
    labels = [str(name) for name in rows if str(name).startswith((LABEL, ENTRY_ROLE))]
    by = [*PLACE, *labels, *places_of(results.columns, rows)]
    return summarise_by(rows, by, [column.name for column in figures_of(results.columns, rows)])
