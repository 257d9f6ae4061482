"""Tables for a reader: claims with their verdicts, points that failed, and the chief figures of every point."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from numdev.measurement.deviation import KIND as DEVIATION
from numdev.report.claims.verdicts import ClaimResult, Verdict, note
from numdev.report.reading.frames import DEFAULTS, LABEL, TITLE, Results, compared, figures_of, is_broken, places_of
from numdev.report.statistics import mean
from numdev.results.record import BAD_OUTPUT, Use

MOST_FAILURES = 40
"""Points that failed of which a reader is told one by one."""
_FIRST = 3  # points whose outputs are wrong that a sentence names
_MOST, _FIGURES = 60, 3  # points of a study that a table has, and figures of each
_COLOURS = {Verdict.HOLDS: "green", Verdict.FAILS: "red", Verdict.UNDECIDED: "yellow", Verdict.NOT_MEASURED: "bright_black"}


def printed(rows: pd.DataFrame, title: str) -> Table | None:
    """A table of text for the terminal; None where it is empty."""
    table = Table(*rows.columns, title=title, title_justify="left")
    for row in rows.itertuples(index=False):
        table.add_row(*map(Text, row))
    return table if len(rows) else None


def claims_table(claims: Sequence[ClaimResult]) -> Table:
    """One row per claim: what it says, where, what was measured in the source's circumstances, and the verdict over all."""
    table = Table(title="Claims", title_justify="left", show_lines=True, caption=note(claims), caption_justify="left")
    for name, ratio in (("claim", 3), ("source", 2), ("measured", 3), ("verdict", 3)):
        table.add_column(name, ratio=ratio, overflow="fold")
    for result in claims:
        measured = "\n".join(f"{scenario.title}: {result.findings[scenario].figure}" for scenario in result.chief)
        verdicts = {finding.verdict for finding in result.findings.values()}
        colour = _COLOURS[verdicts.pop()] if len(verdicts) == 1 else "yellow"
        table.add_row(result.claim.text, result.source, measured, Text(result.brief, style=colour))
    return table


def failures(wholes: Sequence[Results], titles: Mapping[str, str] | None = None) -> pd.DataFrame:
    """The first points that failed; `titles` says what studies are called."""
    failed = [own.points[own.points["status"] != "ok"] for own in wholes]
    first = [point for own in failed for point in own[:MOST_FAILURES].to_dict("records")][:MOST_FAILURES]
    names = titles or {}
    lines = [[names.get(p["study"], p["study"]), place(p), p["status"], p["reason"]] for p in first]
    if (count := sum(map(len, failed))) > MOST_FAILURES:
        lines.append(["", f"and {count - MOST_FAILURES} more", "", "all are in points.csv"])
    return pd.DataFrame(lines, columns=["study", "point", "status", "reason"])


def bad_outputs(results: Results) -> str:
    """How many points are not finite, 0 or no result, and the first ones with their reasons; empty where there are none."""
    points = results.points.drop_duplicates("key")
    bad = points[points["status"].isin([status.value for status in BAD_OUTPUT])]
    if bad.empty:
        return ""
    counts = ", ".join(f"{count} {status}" for status, count in bad["status"].value_counts().items())
    first = "; ".join(f"{p['study']} {place(p)}: {p['reason']}".rstrip(".") for p in bad[:_FIRST].to_dict("records"))
    return f"{len(bad)} of {len(points)} points have an output that is wrong or not finite ({counts}). {first}."


def points_table(results: Results, study: str) -> pd.DataFrame:
    """The chief figures of every point of a study as text, means over replicates: a row for each place in its record.

    Of deviations these are the primary output of the variant, from golden and from the baseline.
    """
    rows, places = results.study(study), []
    if results.kind == DEVIATION:
        rows, places = compared(rows), ["reference"]
        rows = rows[rows["reference"].isin(("golden", "baseline"))]
    places += places_of(results.columns, rows)
    figures = figures_of(results.columns, rows)
    chief = [column for column in figures if column.use is Use.CHIEF][:_FIGURES] or figures[:1]
    groups, lines = rows.groupby(["key", *places], sort=False, dropna=False), []
    for _, group in islice(groups, _MOST):
        values = [group[column.name].astype(float).tolist() for column in chief]
        is_whole = not is_broken(group).any() and all(map(math.isfinite, (value for each in values for value in each)))
        first = group.iloc[0].to_dict()
        cells = [mean(each).text() if is_whole else "NaN or Inf" for each in values]
        lines.append([place(first), *(str(first[name]) for name in places), *cells])
    if len(groups) > _MOST:
        lines.append([f"and {len(groups) - _MOST} more in summary.csv", *[""] * (len(places) + len(chief))])
    heads = [", ".join(filter(None, (column.name.replace("_", " "), column.unit))) for column in chief]
    return pd.DataFrame(lines, columns=["point", *places, *heads])


def place(point: Mapping[Any, Any]) -> str:
    """Scenario and labels of a point in one line."""
    known = ((name.removeprefix(LABEL), value) for name, value in point.items() if name.startswith(LABEL) and not pd.isna(value))
    labels = (f"{name}={value}" for name, value in known)
    return " ".join(part for part in (str(point[TITLE]), *labels) if part) or DEFAULTS
