"""Tables for a reader: claims with their verdicts, points that failed, and points that deviate most."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from numdev.report.claims.verdicts import ClaimResult, Verdict, note
from numdev.report.reading.frames import DEFAULTS, Results, figures_of, is_broken, is_own, places_of
from numdev.report.reading.scenarios import LABEL, TITLE
from numdev.report.statistics import mean, significant, typical
from numdev.results.record import BAD_OUTPUT, Use

MOST_FAILURES = 40
"""Points that failed of which a reader is told one by one."""
_FIRST = 3  # points whose outputs are wrong that a sentence names
_MOST = 60  # points of a study that a table has
_SHOWN = (("golden", "max_difference"), ("golden", "rmse"), ("baseline", "max_difference"))
_COLOURS = {Verdict.HOLDS: "green", Verdict.FAILS: "red", Verdict.UNDECIDED: "yellow", Verdict.NOT_MEASURED: "bright_black"}
_FURTHEST = (
    "Furthest from golden: the largest difference D, also in unit roundoffs u of the output's format at its largest value r"
)


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
        table.add_row(result.claim.text, result.claim.source, measured, Text(result.brief, style=colour))
    return table


def failures(wholes: Sequence[Results], whole: str, titles: Mapping[str, str] | None = None) -> pd.DataFrame:
    """The first points that failed; `whole` says where all of them are, `titles` what studies are called."""
    failed = [own.points[own.points["status"] != "ok"] for own in wholes]
    first = [point for own in failed for _, point in own[:MOST_FAILURES].iterrows()][:MOST_FAILURES]
    names = titles or {}
    lines = [[names.get(p["study"], p["study"]), place(p), p["status"], p["reason"]] for p in first]
    if (count := sum(map(len, failed))) > MOST_FAILURES:
        lines.append(["", f"and {count - MOST_FAILURES} more", "", whole])
    return pd.DataFrame(lines, columns=["study", "point", "status", "reason"])


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
    points = results.points.drop_duplicates("key").set_index("key").loc[means.index]
    lines = [
        (point["study"], place(point), significant(own["max_u"], 3), significant(own["max_difference"], 3))
        for (_, point), (_, own) in zip(points.iterrows(), means.iterrows(), strict=True)
    ]
    return printed(pd.DataFrame(lines, columns=["study", "point", "max |D| / (u max |r|)", "max |D|"]), _FURTHEST)


def points_table(results: Results, study: str, most: int = _MOST) -> pd.DataFrame:
    """The chief figures of every point of a study, means over replicates, as text: its deviations, or what its kind declares."""
    if is_own([results.manifests[study]]):
        rows = results.study(study)
        places, own = places_of(results.columns, rows), figures_of(results.columns, rows)
        chief = [column for column in own if column.use is Use.CHIEF] or own[:1]
        heads = [", ".join(filter(None, (column.name.replace("_", " "), column.unit))) for column in chief]

        def figures(group: pd.DataFrame) -> list[str]:
            values = [group[column.name].astype(float).tolist() for column in chief]
            return ["NaN or Inf" if not all(map(math.isfinite, each)) else mean(each).text() for each in values]

        return _by_point(rows, places, heads, figures, most)
    rows = results.primary.frame(results.primary.where(study=study, primary=True, subject="variant"))
    return _by_point(rows, [], ["max |D| from golden", "RMSE from golden", "max |D| from the baseline"], _deviations, most)


def _deviations(group: pd.DataFrame) -> list[str]:
    """How far one point is from golden and from its baseline."""
    cells = []
    for reference, metric in _SHOWN:
        against = group[group["reference"] == reference]
        broken = bool(is_broken(against).any())
        cells.append("" if against.empty else "NaN or Inf" if broken else typical(against[metric].tolist()).text())
    return cells


def _by_point(
    rows: pd.DataFrame, places: list[str], heads: list[str], figures: Callable[[pd.DataFrame], list[str]], most: int
) -> pd.DataFrame:
    """A row for each point and place of it, the first ones where there are more."""
    groups = rows.groupby(["key", *places], sort=False, dropna=False)
    lines = []
    for _, group in islice(groups, most):
        first = group.iloc[0]
        lines.append([place(first), *(str(first[name]) for name in places), *figures(group)])
    if len(groups) > most:
        lines.append([f"and {len(groups) - most} more in summary.csv", *[""] * (len(places) + len(heads))])
    return pd.DataFrame(lines, columns=["point", *places, *heads])


def place(point: pd.Series[Any]) -> str:
    """Scenario and labels of a point in one line."""
    names = [str(name) for name in point.index if str(name).startswith(LABEL) and not pd.isna(point[str(name)])]
    labels = [f"{name.removeprefix(LABEL)}={point[name]}" for name in names]
    return " ".join(part for part in (str(point[TITLE]), *labels) if part) or DEFAULTS
