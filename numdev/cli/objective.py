"""The figure that a sweep may minimise: `objective=out.max_difference`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numdev.errors import BadInput
from numdev.nearest import one_of

Row = Mapping[str, Any]  # of a record


def refuse_unusable(text: str | None, command: str, sweeper: str | None = None) -> None:
    """Find out before anything is measured that there is no such figure; `sweeper` names one that cannot do without.

    Raises:
        BadInput: for a metric that does not exist, and for a sweeper that is given no figure.
    """
    if text is not None:
        output = text.rpartition(".")[0] or "out"
        names = [f"{output}.{name}" for name in _metrics()] if command == "measure" else _columns()
        if text not in names:
            raise BadInput("objective", text, one_of(text, names, most=12))
    elif sweeper is not None:
        example = _EXAMPLES.get(command)
        mend = (
            f"it minimises a figure; name one, as in objective={example}" if example else f"numdev {command} has no figure for it"
        )
        raise BadInput("hydra/sweeper", sweeper, mend)


def value(text: str | None, command: str, rows: Sequence[Row]) -> float | None:
    """The figure of a point from the rows of its record, the mean over its seeds; None where there is none, or it is NaN.

    Raises:
        BadInput: for an output that the variant does not have.
    """
    if text is None or not rows:
        return None
    figures = _of_deviation(rows) if command == "measure" else _of_speed(rows)
    if text not in figures:
        raise BadInput("objective", text, one_of(text, figures, most=12))
    mean = math.fsum(figures[text]) / len(figures[text])
    return None if math.isnan(mean) else mean


def _of_deviation(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Every metric of every output of the variant against golden, by seed."""
    total = [row for row in rows if (row["subject"], row["reference"]) == ("variant", "golden")]
    return _gathered({f"{row['output']}.{name}": row[name] for name in _metrics()} for row in total)


def _of_speed(rows: Sequence[Row]) -> dict[str, list[float]]:
    from numdev.measurement.speed.columns import derived

    return _gathered({name: row[name] for name in _columns() if name in row} for row in map(derived, rows))


def _gathered(rows: Iterable[Row]) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {}
    for row in rows:
        for name, figure in row.items():
            if isinstance(figure, (int, float)):
                figures.setdefault(name, []).append(float(figure))
    return figures


def _metrics() -> list[str]:
    from numdev.measurement.deviation.metrics import METRICS

    return list(METRICS)


def _columns() -> list[str]:
    """The figures of `numdev speed`, among them those of the deviation beside the time."""
    from numdev.measurement.speed.columns import COUNTED, FOLLOWING, MEASURED

    return [*MEASURED, *COUNTED, *FOLLOWING, *_metrics()]


_EXAMPLES = {"measure": "out.max_difference", "speed": "latency"}
