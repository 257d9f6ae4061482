"""Results as files that a spreadsheet or another program reads. The same results give the same bytes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from numdev.measurement.deviation import KIND as DEVIATION
from numdev.report.claims.verdicts import ClaimResult, note
from numdev.report.reading.columns import dictionary, settings
from numdev.report.reading.frames import (
    LABEL,
    PLACE,
    ROLE,
    ROLES,
    RUN,
    SCENARIO,
    SPEED,
    TITLE,
    TRAINING,
    Results,
    Rows,
    figures_of,
    is_broken,
    places_of,
)
from numdev.report.reading.view import numbered
from numdev.report.studies.registry import words_of
from numdev.report.studies.speed import frame
from numdev.results.record import Column, summary, write_atomically

TEMPLATES = Path(__file__).resolve().parent / "templates"
SUMMARISED = ("max_difference", "mean_absolute", "std", "rmse", "wasserstein", "max_ulp", "bias")
"""The metrics of deviations of which a summary has the statistics; of other kinds it has those of every figure."""
_COMPARED = ["subject", "output", "reference"]
_STATISTICS = {"mean": "mean", "low": "low", "high": "high", "min": "least", "max": "most"}
_GROUP = 1 << 16  # rows of a row group of Parquet


def write_tables(results: Results, claims: Sequence[ClaimResult], out: Path, csv: bool = False) -> None:
    """Write the rows in Parquet, or as CSV with `csv`, and beside them other tables and the claims, as CSV and as a text.

    Every kind has points.csv, timings.csv, where alone times stand that differ from run to run, columns.md, the data dictionary,
    and environment.json. Speed has speed.csv in place of the rows and their summary.csv.

    Raises:
        StoreError: if a file cannot be written.
    """
    columns: dict[str, list[str]] = {}
    for name, table in _tables(results, claims, "csv" if csv else "parquet"):
        write_atomically(out / name, to_parquet(table) if name.endswith(".parquet") else to_csv(table))
        columns[name] = list(table.columns)
    known = results.columns | settings(results.manifests.values())
    if results.kind == TRAINING:
        known = {name: _of_weights(column) for name, column in known.items()}
    write_atomically(out / "columns.md", dictionary(columns, known, results.kind).encode())
    write_atomically(out / "claims.md", claims_markdown(claims).encode())
    write_atomically(out / "environment.json", environments(results))


def _of_weights(column: Column) -> Column:
    return replace(column, unit="absolute, in the units of the weights") if column.unit == "absolute" else column


def _tables(results: Results, claims: Sequence[ClaimResult], ending: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """The tables by the names of their files, one by one: of a large study each takes memory."""
    kind, points = results.kind, results.points
    if kind == SPEED:
        rows = frame(results)
        own = [name for name in map(str, rows) if name not in points or name == "operation" or results.repeats(name)]
        yield "speed.csv", rows[own].dropna(axis=1, how="all")  # without calls beside those that nobody makes
    else:
        chosen = ~results.primary.is_repeated() if kind == DEVIATION else None
        yield f"{'weights' if kind == TRAINING else 'results'}.{ending}", _written(results.primary, results, chosen)
        yield "summary.csv", summarise(results)
    yield "points.csv", points.drop(columns="seconds", errors="ignore")
    yield "timings.csv", points.reindex(columns=[*PLACE, "seconds"])
    yield "claims.csv", claim_table(claims)
    for name, further in results.further.items():
        if len(further):
            file = "runs" if name == RUN else f"table_{name}" if name in ("summary", "points", "timings", "claims") else name
            yield f"{file}.csv", _written(further, results)


def _written(rows: Rows, results: Results, chosen: NDArray[np.bool_] | None = None) -> pd.DataFrame:
    """Rows with the columns of their points that a file repeats."""
    return rows.frame(chosen, [name for name in rows.columns if name in rows.own or results.repeats(name)])


def to_parquet(table: pd.DataFrame) -> bytes:
    """A table as a Parquet file in row groups, numbers in full, texts with a dictionary."""
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False, row_group_size=_GROUP)
    return buffer.getvalue()


def to_csv(table: pd.DataFrame) -> bytes:
    """Writes numbers with nine significant digits, more than a metric of a rounded result has."""
    return table.to_csv(index=False, lineterminator="\n", float_format="%.9g").encode()


def summarise(results: Results) -> pd.DataFrame:
    """One row per point and place in its record: replicates, and of each figure the mean, its 95 % interval and the range.

    The places are what the kind declares. A deviation has subject, output and reference, and beside them the chief settings of
    its point (`Words.always`); its key stands for all others, which points.csv has.
    """
    rows, deviates = results.primary, results.kind == DEVIATION
    at = np.flatnonzero(~rows.is_repeated()) if deviates else np.arange(len(rows))
    places = _COMPARED if deviates else places_of(results.columns, rows.own)
    metrics = SUMMARISED if deviates else [column.name for column in figures_of(results.columns, rows.own)]
    chief = ("format", "seeds", *words_of(results.points).always) if deviates else ()
    labels = [name for name in rows.columns if name.startswith(LABEL)]
    number = numbered(rows.own[places].iloc[at].assign(point=rows.point[at]), ["point", *places])
    sizes, broken = np.bincount(number), is_broken(rows.own).to_numpy()[at]
    counts = {"replicates": sizes} | ({"nonfinite": np.bincount(number, broken).astype(np.int64)} if deviates else {})
    at = at[np.argsort(number, kind="stable")]  # stable: the replicates of a place stay in their order
    ends = np.cumsum(sizes)
    names = [*PLACE, TITLE, *labels, *places, *(name for name in chief if name in rows)]
    table = rows.frame(at[ends - sizes], names).reset_index(drop=True).assign(**counts)
    figures: dict[str, NDArray[np.float64]] = {}
    for metric in metrics:
        values, statistics = rows.own[metric].astype(float).to_numpy()[at], np.empty((len(sizes), len(_STATISTICS)))
        for i, (end, size) in enumerate(zip(ends.tolist(), sizes.tolist(), strict=True)):
            own = summary(values[end - size : end].tolist())
            statistics[i] = [getattr(own, field) for field in _STATISTICS.values()]
        figures |= {f"{metric}.{name}": column for name, column in zip(_STATISTICS, statistics.T, strict=True)}
    return pd.concat([table, pd.DataFrame(figures, index=table.index, dtype=float)], axis=1)


_CLAIM_COLUMNS = [
    *("claim", "text", "source", "study", SCENARIO, TITLE, ROLE, "verdict", "p_verdict", "questions", "figure"),
    *("verdict_rmse", "p_verdict_rmse", "figure_rmse", "over", "sentence", "overall"),
]


def claim_table(claims: Sequence[ClaimResult]) -> pd.DataFrame:
    """One row per claim, study and scenario."""
    rows = []
    for result in claims:
        claim: dict[str, Any] = {"claim": result.claim.name, "text": result.claim.text, "source": result.source}
        claim |= {"study": result.study, "questions": result.questions, "overall": result.overall}
        for scenario, finding in result.findings.items():
            row: dict[str, Any] = {SCENARIO: scenario.name, TITLE: scenario.title, ROLE: scenario.role.value}
            row |= {"verdict": finding.word, "p_verdict": finding.p, "figure": finding.figure, "over": finding.over}
            if (beside := finding.beside) is not None:
                row |= {"verdict_rmse": beside.verdict.value, "p_verdict_rmse": beside.p, "figure_rmse": beside.figure}
            rows.append(claim | row | {"sentence": finding.sentence})
    return pd.DataFrame(rows, columns=_CLAIM_COLUMNS)


def claims_markdown(claims: Sequence[ClaimResult]) -> str:
    """The claims as Markdown: a table of all, then each with its scenarios."""
    from jinja2 import Environment, FileSystemLoader  # late: tables need no templates

    templates = Environment(loader=FileSystemLoader(TEMPLATES), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    templates.filters["cell"] = lambda text: text.replace("|", "\\|")
    return templates.get_template("claims.md").render(claims=claims, note=note(claims), roles=ROLES)


def environments(results: Results) -> bytes:
    """Every environment of the results, and how many points of which study were measured in it."""
    counted = []
    for number, facts in enumerate(results.environments):
        here = results.points[results.points["environment"] == number]
        counts = {str(study): int(count) for study, count in here.groupby("study", sort=False).size().items()}
        counted.append({"environment": number, "points": counts, "facts": facts})
    return (json.dumps(counted, indent=1) + "\n").encode()
