"""What a rung of training looks like on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from numdev.cli.show import status, status_text
from numdev.results.columns import Use
from numdev.results.record import Record, summary
from numdev.training.columns import RUN, WEIGHTS
from numdev.training.weights import MODEL


def record(console: Console, found: Record, path: Path, *, already: bool) -> None:
    """The deviation of all weights over the steps, then what is said of the runs, a column per replicate."""
    if found.rows:
        console.print(_weights(found))
        console.print(_runs(found))
    console.print(status(found, already=already))
    console.print(f"record {found.key} in {path}", style="dim", soft_wrap=True)


def job(overrides: str, found: Record, *, already: bool) -> Text:
    """One point of a sweep, in one line."""
    line = Text.assemble((overrides or "defaults", "bold"), ": ", status_text(found.status))
    if not found.rows:
        return line.append(f", {found.reason}")
    return line.append(", " + ", ".join(_brief(found)) + (", already measured" if already else ""))


def _brief(found: Record) -> Iterator[str]:
    rows = _of_model(found)
    last = max(row["step"] for row in rows)
    for name in ("max_difference", "relative_frobenius"):
        yield f"{name} {summary([row[name] for row in rows if row['step'] == last]).mean:.3g}"
    yield f"after {last} steps"
    if all(row["same_bits"] for row in found.table(RUN)):
        yield "the same bits as the reference"


def _weights(found: Record) -> Table:
    rows = _of_model(found)
    names = [column.name for column in found.primary if column.use in (Use.CHIEF, Use.FIGURE)]
    title = "all weights, the rung's against the reference's: mean over replicates"
    table = Table("step", *names, title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for step in sorted({row["step"] for row in rows}):
        at = [row for row in rows if row["step"] == step]
        table.add_row(str(step), *(_text(summary([row[name] for row in at]).mean) for name in names))
    return table


def _runs(found: Record) -> Table:
    rows = found.table(RUN)
    table = Table("of the run", "unit", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_column(f"replicate {row['seed']}", justify="right")
    table.add_column("meaning")
    for column in found.columns[RUN]:
        if column.use is Use.FIGURE or (column.use is Use.NOTE and "checksum" not in column.name):
            table.add_row(column.name, column.unit, *(_text(row[column.name]) for row in rows), column.meaning)
    return table


def _of_model(found: Record) -> list[dict[str, Any]]:
    return [row for row in found.table(WEIGHTS) if row["tensor"] == MODEL]


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
