"""What a rung of training looks like on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from numdev.cli.asked import Asked
from numdev.cli.show import MORE, Metrics, footer, opening
from numdev.results.record import Record, Use, summary
from numdev.training.weights import MODEL, RUN, WEIGHTS


def record(console: Console, found: Record, path: Path, asked: Asked, *, already: bool, metrics: Metrics = Metrics.CHIEF) -> None:
    """One rung: what was trained, how far its weights and losses differ from the reference's, and the figures over the steps."""
    opening(console, found, asked)
    if found.rows:
        for sentence in _sentences(found):
            console.print(sentence, markup=False)
        console.print(_weights(found, metrics))
        if metrics is Metrics.ALL:
            console.print(_runs(found))
    footer(console, found, path, already=already)


def cells(found: Record) -> tuple[str, ...]:
    """The figures of one point of a sweep, as `numdev.cli.sweeptable.HEADINGS` names them."""
    if not found.rows:
        return ()
    last = _last(found)
    differences = (f"{_mean(found, name, last):.3g}" for name in ("max_difference", "relative_frobenius"))
    return str(last), *differences, "yes" if _has_same_bits(found) else "no"


def _sentences(found: Record) -> Iterator[str]:
    last = _last(found)
    if _has_same_bits(found):
        yield f"After {last} steps the weights of the rung have the same bits as those of its reference."
    else:
        largest, relative = (_mean(found, name, last) for name in ("max_difference", "relative_frobenius"))
        yield f"After {last} steps the weights differ from the reference's by up to {largest:.3g}, relative norm {relative:.3g}."
    ours, theirs = (summary([row[name] for row in found.table(RUN)]).mean for name in ("held_out_loss", "baseline_held_out_loss"))
    seconds = summary([row["seconds_per_step"] for row in found.table(RUN)]).mean
    yield f"Loss on held-out data: {ours:.4g}, reference {theirs:.4g}; {seconds:.3g} s a step."


def _last(found: Record) -> int:
    return int(max(row["step"] for row in _of_model(found)))


def _mean(found: Record, name: str, step: int) -> float:
    return summary([row[name] for row in _of_model(found) if row["step"] == step]).mean


def _has_same_bits(found: Record) -> bool:
    return all(row["same_bits"] for row in found.table(RUN))


def _weights(found: Record, metrics: Metrics) -> Table:
    shown = (Use.CHIEF,) if metrics is Metrics.CHIEF else (Use.CHIEF, Use.FIGURE)
    names = [column.name for column in found.primary if column.use in shown]
    title = "all weights of the rung against those of its reference: mean over replicates"
    table = Table("step", *names, title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    if metrics is Metrics.CHIEF:
        table.caption, table.caption_justify = MORE, "left"
    for step in sorted({row["step"] for row in _of_model(found)}):
        table.add_row(str(step), *(_text(_mean(found, name, step)) for name in names))
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
