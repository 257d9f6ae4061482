"""What a measurement of speed looks like on a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from numdev.cli.show import status, status_text
from numdev.measurement.speed.columns import FOLLOWING, derived
from numdev.results.columns import Use
from numdev.results.record import Record


def record(console: Console, found: Record, path: Path, *, already: bool) -> None:
    """Every figure of one point, a column per replicate."""
    if found.rows:
        table = Table("figure", "unit", title=found.kernel or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for row in found.rows:
            table.add_column(f"seed {row['seed']}", justify="right")
        table.add_column("meaning")
        rows = [derived(row) for row in found.rows]
        figures = {column.name: (column.unit, column.meaning) for column in found.primary if column.use is Use.FIGURE}
        for name, (unit, text) in (figures | FOLLOWING).items():
            if name in rows[0]:
                table.add_row(name, unit, *(_text(row[name]) for row in rows), text)
        console.print(table)
    console.print(status(found, already=already))
    console.print(f"record {found.key} in {path}", style="dim", soft_wrap=True)


def job(overrides: str, found: Record, *, already: bool) -> Text:
    """One point of a sweep, in one line."""
    line = Text.assemble((overrides or "defaults", "bold"), ": ", status_text(found.status))
    if not found.rows:
        return line.append(f", {found.reason}")
    return line.append(", " + ", ".join(_brief(derived(found.rows[0]))) + (", already measured" if already else ""))


def _brief(row: dict[str, Any]) -> Iterator[str]:
    yield f"{1e3 * row['latency']:.3g} ms"
    if math.isfinite(row["tflops"]):  # of an operation that says how many operations it needs
        yield f"{row['tflops']:.3g} TFLOP/s ({100 * row['share']:.0f} % of a matrix product)"
    yield f"{row['peak_bytes'] / 2**20:.3g} MiB"
    yield f"RMSE {row['rmse']:.2g}"


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
