"""The sentence that says what a point found: how far variant and baseline lie from golden, and their ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numdev.results.record import Record, Status, Use

if TYPE_CHECKING:
    from numdev.report.statistics import Interval


@dataclass(frozen=True)
class Compared:
    """The first chief figure of a record's primary output.

    Attributes:
        metric: its name.
        output: that of the primary output.
        variant: from golden.
        baseline: from golden; None without a baseline.
        quotient: of the two, paired by replicate; None without a baseline.
    """

    metric: str
    output: str
    variant: Interval
    baseline: Interval | None
    quotient: Interval | None


def compared(found: Record) -> Compared:
    """What the rows of a record say."""
    from numdev.report.statistics import mean, ratio  # late: a report's libraries

    metric = next(column.name for column in found.primary if column.use is Use.CHIEF)
    output = found.outputs[0]
    rows = {subject: _rows(found, subject, output) for subject in ("variant", "baseline")}
    values = {subject: [row[metric] for row in own] for subject, own in rows.items()}
    clusters = {subject: [row["cluster"] for row in own] for subject, own in rows.items()}
    variant = mean(values["variant"], clusters=clusters["variant"])
    if not rows["baseline"]:
        return Compared(metric, output, variant, None, None)
    quotient = ratio(values["variant"], values["baseline"], clusters=clusters["variant"])
    return Compared(metric, output, variant, mean(values["baseline"], clusters=clusters["baseline"]), quotient)


def _rows(found: Record, subject: str, output: str) -> list[Mapping[str, Any]]:
    own = (row for row in found.rows if (row["subject"], row["reference"], row["output"]) == (subject, "golden", output))
    return sorted(own, key=lambda row: int(row["seed"]))


def sentences(found: Record, variant: str, baseline: str) -> list[str]:
    """What was found, in words, a line each; `variant` and `baseline` are what the user calls the two.

    No verdict follows from an output that holds NaN or Inf, or zeros alone; `found.reason` says how many.
    """
    from numdev.report.statistics import significant  # late: a report's libraries

    one = compared(found)
    head = f"{one.metric} of {one.output} from golden: {variant} {significant(one.variant.estimate, 3)}"
    if found.status is Status.NONFINITE:
        head = f"Of the other elements, {head}"
    if one.baseline is None or one.quotient is None:
        return [f"{head}, {_interval(one.variant)}."]
    return [
        f"{head}, baseline ({baseline}) {significant(one.baseline.estimate, 3)}.",
        f"{variant} / baseline = {_quotient(one.quotient, variant, judged=found.status is Status.OK)}.",
    ]


def _quotient(found: Interval, variant: str, *, judged: bool) -> str:
    from numdev.report.statistics import significant  # late: a report's libraries

    replicates = f"{found.excluded} replicate{'s' * (found.excluded != 1)}"
    left_out = f"; {replicates} left out (a deviation is zero or not finite)" if found.excluded else ""
    if not found.count:
        return f"unknown{left_out}"
    said = f"{significant(found.estimate, 3)}, {_interval(found)}"
    if not judged:
        return f"{said}{left_out}; no verdict follows"
    if found.count == 1:
        return f"{said}{left_out}"
    if found.low == found.high == 1:
        return f"{said}: both deviate equally{left_out}"
    if found.outside(1.0, 1.0):
        return f"{said}: {variant} deviates {'more' if found.estimate > 1 else 'less'}{left_out}"
    return f"{said}: no difference is shown{left_out}"


def _interval(found: Interval) -> str:
    from numdev.report.statistics import significant  # late: a report's libraries

    if found.count < 2:
        return "no interval from one replicate"
    return f"95 % interval {significant(found.low, 3)} to {significant(found.high, 3)}"
