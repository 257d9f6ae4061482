"""A comparison of two result sets as a file and on a terminal."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from numdev.report.comparison.changes import REGRESSIONS, Change
from numdev.report.document.export import to_csv
from numdev.report.reading.frames import Results
from numdev.report.reading.scenarios import TITLE
from numdev.report.statistics import Interval, significant
from numdev.results.files import write_atomically

_MOST = 20  # rows of a table of changes


def write(changes: pd.DataFrame, out: Path) -> None:
    """Write compare.csv into `out`, or raise StoreError."""
    write_atomically(out / "compare.csv", to_csv(changes))


def show(changes: pd.DataFrame, a: Results, b: Results, console: Console) -> None:
    """Print how the environments differ, how many comparisons changed how, what is worse, what may be, and what A lacks."""
    for table in (_environments(a, b), _counts(changes), _worse(changes), _open(changes), _new(changes)):
        if table is not None:
            console.print(table)


def _environments(a: Results, b: Results) -> Table | None:
    table = Table("fact", "A", "B", title="Environments differ", title_justify="left")
    for name in dict.fromkeys(name for facts in (*a.environments, *b.environments) for name in facts):
        facts = [", ".join(dict.fromkeys(own.get(name, "none") for own in side.environments)) for side in (a, b)]
        if facts[0] != facts[1]:
            table.add_row(name, *map(Text, facts))
    return table if table.row_count else None


def _counts(changes: pd.DataFrame) -> Table:
    present = [change.value for change in Change if (changes["change"] == change.value).any()]
    table = Table("study", *present, title="Comparisons", title_justify="left")
    for study, group in changes.groupby("study", sort=False):
        table.add_row(str(study), *(str(int((group["change"] == name).sum())) for name in present))
    return table


def _worse(changes: pd.DataFrame) -> Table | None:
    """The order of the table: broken points first, then those that B lacks, then worse ones by ratio."""
    worse = changes[changes["change"].isin(REGRESSIONS)]
    worse = worse.assign(order=worse["change"].map(REGRESSIONS.index))
    return _table("Changes for the worse", worse.sort_values(["order", "ratio"], ascending=[True, False], kind="stable"))


def _open(changes: pd.DataFrame) -> Table | None:
    """Ratios above 1 that cannot be tested; where nothing is worse, also those that are not called a change."""
    is_open = changes["change"] == Change.UNKNOWN.value
    if not changes["change"].isin(REGRESSIONS).any():
        is_open |= changes["change"] == Change.SAME.value
    largest = changes[is_open & (changes["ratio"] > 1)].sort_values("ratio", ascending=False, kind="stable")
    return _table("Largest ratios B / A, none of them judged worse", largest)


def _new(changes: pd.DataFrame) -> Table | None:
    return _table("Points that A lacks", changes[changes["change"] == Change.ONLY_B.value])


def _table(title: str, changes: pd.DataFrame) -> Table | None:
    table = Table(
        "study", "point", "output", "A", "B", "B / A", "adjusted p", "change", "note", title=title, title_justify="left"
    )
    for row in changes.head(_MOST).to_dict("records"):
        ratio = Interval(row["ratio"], row["ratio_low"], row["ratio_high"], 0).text()
        figures = [significant(row["a"], 3), significant(row["b"], 3), ratio, significant(row["p_adjusted"])]
        known = ["" if figure == "unknown" else figure for figure in figures]
        cells = [row["study"], f"{row[TITLE]} {row['point']}".strip(), row["output"], *known, row["change"], row["note"]]
        table.add_row(*(Text(str(cell)) for cell in cells))
    if len(changes) > _MOST:
        table.caption = f"and {len(changes) - _MOST} more, which out=FOLDER writes to compare.csv"
    return table if table.row_count else None
