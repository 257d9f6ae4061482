"""The report of speed studies, made from their results: tables and figures. Nothing is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from numdev.report.claims.verdicts import ClaimResult, judge
from numdev.report.document.asked import Asked, asked_of, write
from numdev.report.document.export import claim_table, csv_of, environments
from numdev.report.document.markdown import claims_markdown
from numdev.report.document.tables import bad_outputs, claims_table, failures_table
from numdev.report.figures.sweep import default_of
from numdev.report.reading.columns import dictionary
from numdev.report.reading.configuration import settings
from numdev.report.reading.frames import LABEL, Results, load
from numdev.report.reading.rows import Rows
from numdev.report.reading.tidy import EVERY, tidy
from numdev.report.studies.latency import TABLES, crossovers, frame, of_attention
from numdev.report.studies.own import own_plot
from numdev.report.studies.registry import claims_of
from numdev.report.studies.speed import SPEED_FIGURES
from numdev.results.store import Store, write_atomically


def make_speed_report(
    results: Path,
    out: Path,
    console: Console | None = None,
    studies: Sequence[str] | None = None,
    plot: Mapping[str, Any] | None = None,
) -> bool:
    """Write speed.csv, crossover.csv, unsupported.csv, columns.md, environment.json and figures of speed studies into `out`.

    Where studies state claims, claims.csv and claims.md too.

    `studies` are the names of studies and sweeps, all unless given; `plot` see `numdev.report.figures.sweep.plot_of`.

    Returns:
        Whether every output is finite and a result.

    Raises:
        BadInput: if there are no results, or if `plot` names what they do not have.
        StoreError: if a file cannot be written.
    """
    console = console or Console()
    loaded = load(Store(results), studies, kind="speed")
    rows = frame(loaded)
    every = tidy(loaded.with_axes(EVERY))
    asked = asked_of(loaded, plot) if plot else None
    own = of_attention(rows)
    claims = judged(loaded)
    failed = loaded.points[loaded.points["status"] != "ok"]
    labels = [name for name in failed.columns if name.startswith(LABEL)]
    columns = ("study", "scenario", "key", "attention", *labels, "status", "reason")
    tables = {
        "speed.csv": rows,
        "crossover.csv": crossovers(own),
        "unsupported.csv": failed[[name for name in columns if name in failed]],
        **({"claims.csv": claim_table(claims)} if claims else {}),
    }
    if claims:
        write_atomically(out / "claims.md", claims_markdown(claims).encode())
    for name, table in tables.items():
        write_atomically(out / name, csv_of(table))
    said = dictionary(
        {name: table.columns for name, table in tables.items()}, loaded.columns | settings(loaded.manifests.values())
    )
    write_atomically(out / "columns.md", said.encode())
    write_atomically(out / "environment.json", environments(loaded))
    draw(loaded, rows, out / "figures")
    _draw_sweeps(loaded, every, asked, out / "figures")
    bad = bad_outputs(loaded)
    for note in (*filter(None, [bad]), *loaded.notes):
        console.print(f"note: {note}", markup=False, highlight=False)
    tables_shown = [failures_table(loaded, "unsupported.csv"), *(_shown(make(own), title) for title, make in TABLES.items())]
    for shown in (*tables_shown, claims_table(claims) if claims else None):
        if shown is not None:
            console.print(shown)
    return not bad


def judged(loaded: Results) -> list[ClaimResult]:
    """The claims of studies of speed."""
    every = tidy(loaded.with_axes(EVERY))
    return judge(claims_of(loaded), replace(loaded, stored=Rows.of(every))) if len(every) else []


def draw(loaded: Results, rows: pd.DataFrame, folder: Path) -> None:
    """The figures of every study of the speed of attention as PNG and SVG."""
    found = of_attention(rows)
    for study in (name for name, manifest in loaded.manifests.items() if manifest["swept"] is None):
        own = found[found["study"] == study]
        for name, plot in SPEED_FIGURES.items() if len(own) else ():
            write(folder / f"{study}_{name}", plot, own, plot.title)


def _draw_sweeps(loaded: Results, rows: pd.DataFrame, asked: Asked | None, folder: Path) -> None:
    """The figure of every sweep of speed, and the one that is asked for, of all the results."""
    if asked is not None:
        asked.write(folder / "plot")
    for study, manifest in loaded.manifests.items():
        own = rows[rows["study"] == study]
        plot = own_plot(manifest, own) or (default_of(own) if manifest["swept"] and len(own) else None)
        if plot is not None:
            write(folder / study, plot, own, str(manifest["title"]))


def _shown(found: pd.DataFrame, title: str) -> Table | None:
    if found.empty:
        return None
    table = Table(*found.columns, title=title, title_justify="left")
    for row in found.itertuples(index=False):
        table.add_row(*map(Text, row))
    return table
