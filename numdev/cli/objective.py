"""The figure that a sweep may minimise: `objective=out.max_difference`, or `objective=latency` of speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numdev.errors import BadInput
from numdev.nearest import one_of

if TYPE_CHECKING:
    from numdev.measurement.protocol import MeasurementKind
    from numdev.results.record import Column, Record

Row = Mapping[str, Any]  # of a record


def names(kind: MeasurementKind) -> list[str]:
    """The figures of a kind of measurement: each as `output.figure` where it compares every output, else by its own name."""
    from numdev.measurement.deviation.measurement import KIND

    table = next(iter(kind.columns.values()))
    figures = [*_figures(table), *_following(table)]
    outputs = kind.operation.output_names if kind.name == KIND else ()
    return [f"{output}.{name}" for output in outputs for name in figures] if outputs else figures


def refuse_unusable(text: str | None, kind: MeasurementKind) -> None:
    """Find out before anything is measured that there is no such figure.

    Raises:
        BadInput: naming the figures that there are.
    """
    if text is not None and text not in (known := names(kind)):
        raise BadInput("objective", text, one_of(text, known, most=12))


def refuse_none(sweeper: str, kind: MeasurementKind | None, command: str) -> None:
    """Say what a sweeper lacks that minimises a figure; `kind` is None where the command has no figures.

    Raises:
        BadInput: always.
    """
    if kind is None:
        raise BadInput("hydra/sweeper", sweeper, f"numdev {command} has no figure for it")
    raise BadInput("hydra/sweeper", sweeper, f"it minimises a figure; name one, as in objective={_example(kind)}")


def value(text: str | None, found: Record) -> float | None:
    """The figure of a point from its record, the mean over its seeds; None where there is none, or the output holds NaN or Inf.

    Raises:
        BadInput: for an output that the variant does not have.
    """
    if text is None or not found.rows:
        return None
    output, _, name = text.rpartition(".")
    rows = [row for row in found.rows if (row["subject"], row["reference"]) == ("variant", "golden")]
    own = [row for row in rows if row["output"] == (output or found.outputs[0])]
    if not own:
        known = [f"{one}.{name}" for one in dict.fromkeys(row["output"] for row in rows)]
        raise BadInput("objective", text, f"the variant returns no {output}; {one_of(text, known)}")
    if found.status.value != "ok" and any(row.get(count, 1) for row in own for count in ("nan_count", "inf_count")):
        return None  # a figure of the elements that are left, or the time of a wrong result, would win
    figures = [row[name] for row in _with_following(own, found.primary)]
    mean = math.fsum(figures) / len(figures)
    return None if math.isnan(mean) else mean


def _figures(table: Sequence[Column]) -> list[str]:
    from numdev.results.record import Use

    return [column.name for column in table if column.use in (Use.CHIEF, Use.FIGURE) and column.unit]


def _example(kind: MeasurementKind) -> str:
    """The first chief figure of the primary output, or the first there is."""
    from numdev.results.record import Use

    table = next(iter(kind.columns.values()))
    chief = [column.name for column in table if column.use is Use.CHIEF]
    known = names(kind)
    return next((name for name in known if chief and name.endswith(f".{chief[0]}")), known[0])


def _following(table: Sequence[Column]) -> list[str]:
    """What is in no record of speed, since it follows from what is."""
    from numdev.measurement.speed.columns import DERIVED, OF_COUNTED

    names = {column.name for column in table}
    if "latency" not in names:
        return []
    return [*DERIVED, *(OF_COUNTED if "l2_bytes" in names else ())]


def _with_following(rows: Sequence[Row], table: Sequence[Column]) -> list[Row]:
    from numdev.measurement.speed.columns import derived

    return [derived(row) for row in rows] if _following(table) else list(rows)
