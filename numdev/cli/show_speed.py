"""What a measurement of speed looks like on a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from numdev.cli.asked import Asked
from numdev.cli.show import MORE, Metrics, footer, opening
from numdev.measurement.speed.columns import FOLLOWING, derived
from numdev.results.record import Record, Use

_CHIEF = (
    *("latency", "latency_low", "latency_high", "tflops", "share", "bandwidth"),
    *("peak_bytes", "temporary_bytes", "max_difference", "rmse", "max_u"),
)


def record(console: Console, found: Record, path: Path, asked: Asked, *, already: bool, metrics: Metrics = Metrics.CHIEF) -> None:
    """One point: what was timed, its time in words, and its chief figures or all of them with their meanings."""
    opening(console, found, asked)
    if found.rows:
        console.print(f"{asked.variant}: {', '.join(_brief(derived(found.rows[0])))} from golden.", markup=False)
        console.print(_table(found, metrics))
    footer(console, found, path, already=already)


def _table(found: Record, metrics: Metrics) -> Table:
    """A column per replicate."""
    title = "; ".join(filter(None, [found.kernel, MORE if metrics is Metrics.CHIEF else ""]))
    table = Table("figure", "unit", title=title or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in found.rows:
        table.add_column(f"seed {row['seed']}", justify="right")
    rows = [derived(row) for row in found.rows]
    figures = {column.name: (column.unit, column.meaning) for column in found.primary if column.use is Use.FIGURE} | FOLLOWING
    if metrics is Metrics.ALL:
        table.add_column("meaning")
    for name in _CHIEF if metrics is Metrics.CHIEF else figures:
        if name in rows[0]:
            unit, text = figures[name]
            table.add_row(name, unit, *(_text(row[name]) for row in rows), *([text] if metrics is Metrics.ALL else []))
    return table


def cells(found: Record) -> tuple[str, ...]:
    """The figures of one point of a sweep, as `numdev.cli.sweeptable.HEADINGS` names them."""
    if not found.rows:
        return ()
    row = derived(found.rows[0])
    known = math.isfinite(row["tflops"])  # of an operation that says how many operations it needs
    rate = (f"{row['tflops']:.3g}", f"{100 * row['share']:.0f} %") if known else ("", "")
    return f"{1e3 * row['latency']:.3g}", *rate, f"{row['peak_bytes'] / 2**20:.3g}", f"{row['rmse']:.2g}"


def _brief(row: dict[str, Any]) -> Iterator[str]:
    yield f"{1e3 * row['latency']:.3g} ms a call"
    if math.isfinite(row["tflops"]):
        yield f"{row['tflops']:.3g} TFLOP/s ({100 * row['share']:.0f} % of a matrix product)"
    yield f"{row['peak_bytes'] / 2**20:.3g} MiB"
    yield f"RMSE {row['rmse']:.2g}"


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
