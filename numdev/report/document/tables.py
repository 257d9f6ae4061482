"""Tables for a reader: claims with their verdicts, points that failed, and points that deviate most."""

from __future__ import annotations

import math
from itertools import islice

import pandas as pd
from rich.table import Table
from rich.text import Text

from numdev.report.claims.verdicts import ClaimResult, Verdict, note
from numdev.report.reading.frames import DEFAULTS, Results, figures_of, is_broken, places_of
from numdev.report.reading.scenarios import LABEL, TITLE
from numdev.report.statistics import mean, significant, typical
from numdev.results.record import BAD_OUTPUT, Column, Use

MOST_FAILURES = 40
"""Points that failed of which a reader is told one by one."""
_FIRST = 3  # points whose outputs are wrong that a sentence names
_SHOWN = (("golden", "max_difference"), ("golden", "rmse"), ("baseline", "max_difference"))
_COLOURS = {Verdict.HOLDS: "green", Verdict.FAILS: "red", Verdict.UNDECIDED: "yellow", Verdict.NOT_MEASURED: "bright_black"}


def printed(rows: pd.DataFrame, title: str) -> Table | None:
    """A table of text for the terminal; None where it is empty."""
    table = Table(*rows.columns, title=title, title_justify="left")
    for row in rows.itertuples(index=False):
        table.add_row(*map(Text, row))
    return table if len(rows) else None


def claims_table(claims: list[ClaimResult]) -> Table:
    """One row per claim: what it says, where, what was measured in the source's circumstances, and the verdict over all."""
    table = Table(title="Claims", title_justify="left", show_lines=True, caption=note(claims), caption_justify="left")
    for name, ratio in (("claim", 3), ("source", 2), ("measured", 3), ("verdict", 3)):
        table.add_column(name, ratio=ratio, overflow="fold")
    for result in claims:
        table.add_row(result.claim.text, result.claim.source, _measured(result), _verdict(result))
    return table


def _measured(result: ClaimResult) -> str:
    return "\n".join(f"{scenario.title}: {result.findings[scenario].figure}" for scenario in result.chief)


def _verdict(result: ClaimResult) -> Text:
    verdicts = {finding.verdict for finding in result.findings.values()}
    colour = _COLOURS[verdicts.pop()] if len(verdicts) == 1 else "yellow"
    return Text(result.brief, style=colour)


def failures_table(results: Results, whole: str = "points.csv") -> Table | None:
    """The first points whose status is not ok; None if there are none. `whole` is the file that has all of them."""
    failed = results.points[results.points["status"] != "ok"]
    if failed.empty:
        return None
    table = Table("study", "point", "status", "reason", title="Points without a full result", title_justify="left")
    for _, point in failed[:MOST_FAILURES].iterrows():
        table.add_row(point["study"], place(point), point["status"], Text(point["reason"]))
    if len(failed) > MOST_FAILURES:
        table.add_row("", f"and {len(failed) - MOST_FAILURES} more", "", f"all are in {whole}")
    return table


def bad_outputs(results: Results) -> str:
    """How many points are not finite, 0 or no result, and the first ones with their reasons; empty where there are none."""
    points = results.points.drop_duplicates("key")
    bad = points[points["status"].isin([status.value for status in BAD_OUTPUT])]
    if bad.empty:
        return ""
    counts = ", ".join(f"{count} {status}" for status, count in bad["status"].value_counts().items())
    first = "; ".join(f"{point['study']} {place(point)}: {point['reason']}".rstrip(".") for _, point in bad[:_FIRST].iterrows())
    return f"{len(bad)} of {len(points)} points have an output that is wrong or not finite ({counts}). {first}."


def worst_table(results: Results, count: int = 5) -> Table | None:
    """The points furthest from golden, in unit roundoffs of their own format; None where nothing was measured."""
    rows = results.primary
    sound = rows.where(primary=True, subject="variant", reference="golden") & ~is_broken(rows.own).to_numpy()
    figures = rows.frame(sound, ["key", "max_u", "max_difference"])
    if figures.empty:
        return None
    means = figures.groupby("key")[["max_u", "max_difference"]].mean().nlargest(count, "max_u")
    shown = results.points[results.points["key"].isin(means.index)].drop_duplicates("key")
    points = {point["key"]: point for _, point in shown.iterrows()}
    title = (
        "Furthest from golden: the largest difference D, also in unit roundoffs u of the output's format at its largest value r"
    )
    table = Table("study", "point", "max |D| / (u max |r|)", "max |D|", title=title, title_justify="left")
    for key, own in means.iterrows():
        point = points[str(key)]
        table.add_row(point["study"], place(point), significant(own["max_u"], 3), significant(own["max_difference"], 3))
    return table


def deviations(results: Results, study: str, most: int = 60) -> pd.DataFrame:
    """The deviation of every point of a study from golden and from its baseline, over seeds, as text."""
    rows = results.primary.frame(results.primary.where(study=study, primary=True, subject="variant"))
    every = rows["key"].unique()
    own = rows[rows["key"].isin(every[:most])]
    lines: list[tuple[str, ...]] = []
    for _, point in own.groupby("key", sort=False):
        cells = [place(point.iloc[0])]
        for reference, metric in _SHOWN:
            against = point[point["reference"] == reference]
            broken = bool(is_broken(against).any())
            cells.append("" if against.empty else "NaN or Inf" if broken else typical(against[metric].tolist()).text())
        lines.append(tuple(cells))
    if len(every) > most:
        lines.append((f"and {len(every) - most} more in summary.csv", *[""] * len(_SHOWN)))
    return pd.DataFrame(lines, columns=["point", "max |D| from golden", "RMSE from golden", "max |D| from the baseline"])


def figures_table(results: Results, study: str, most: int = 60) -> pd.DataFrame:
    """The chief figures of every point of a study of a kind of the user's own, means over replicates, as text."""
    rows = results.study(study)
    places, own = places_of(results.columns, rows), figures_of(results.columns, rows)
    chief = [column for column in own if column.use is Use.CHIEF] or own[:1]
    lines = []
    groups = rows.groupby(["key", *places], sort=False, dropna=False)
    for _, group in islice(groups, most):
        first = group.iloc[0]
        values = [group[column.name].astype(float).tolist() for column in chief]
        cells = ["NaN or Inf" if not all(map(math.isfinite, each)) else mean(each).text() for each in values]
        lines.append((place(first), *(str(first[name]) for name in places), *cells))
    if len(groups) > most:
        lines.append((f"and {len(groups) - most} more in summary.csv", *[""] * (len(places) + len(chief))))
    return pd.DataFrame(lines, columns=["point", *places, *(_headed(column) for column in chief)])


def _headed(column: Column) -> str:
    return ", ".join(part for part in (column.name.replace("_", " "), column.unit) if part)


def place(point: pd.Series[str]) -> str:
    """Scenario and labels of a point in one line."""
    labels = [f"{name.removeprefix(LABEL)}={point[name]}" for name in labels_of(point)]
    return " ".join(part for part in (str(point[TITLE]), *labels) if part) or DEFAULTS


def labels_of(point: pd.Series[str]) -> list[str]:
    return [str(name) for name in point.index if str(name).startswith(LABEL) and not pd.isna(point[str(name)])]
