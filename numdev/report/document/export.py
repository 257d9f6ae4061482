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
from numdev.report.reading.frames import LOSS, PLACE, RUN, SPEED, TRAINING, Results, Rows, figures_of, is_broken, places_of
from numdev.report.reading.scenarios import ENTRY_ROLE, LABEL, ROLE, ROLES, SCENARIO, TITLE
from numdev.report.reading.view import numbered
from numdev.report.reading.wording import Words
from numdev.report.studies.registry import words_of
from numdev.report.studies.speed import crossovers, frame, of_attention
from numdev.results.files import write_atomically
from numdev.results.record import Column, summary

TEMPLATES = Path(__file__).resolve().parent / "templates"
SUMMARISED = ("max_difference", "mean_absolute", "std", "rmse", "wasserstein", "max_ulp", "bias")
_COMPARED = ["subject", "output", "reference"]
_STATISTICS = {"mean": "mean", "low": "low", "high": "high", "min": "least", "max": "most"}
_VARYING = ("kernel", "problem.", "variant.", "baseline.")  # a summary has these where points of one class differ in them
_GROUP = 1 << 16  # rows of a row group of Parquet
_FILES = {LOSS: "loss.csv", RUN: "runs.csv"}


def write_tables(results: Results, claims: Sequence[ClaimResult], out: Path, csv: bool = False) -> None:
    """Write the rows in Parquet, or as CSV with `csv`, and summary.csv, points.csv, timings.csv, claims.csv and others beside.

    Of every kind columns.md, the data dictionary, and environment.json. Times differ from run to run and stand in timings.csv
    alone. Speed has speed.csv, crossover.csv and unsupported.csv in their place.

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
    write_atomically(out / "environment.json", environments(results))


def _of_weights(column: Column) -> Column:
    return replace(column, unit="absolute, in the units of the weights") if column.unit == "absolute" else column


def _tables(results: Results, claims: Sequence[ClaimResult], ending: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """The tables by the names of their files, one by one: of a large study each takes memory."""
    kind, points = results.kind, results.points
    if kind == SPEED:
        rows = frame(results)
        yield (
            "speed.csv",
            rows[[name for name in map(str, rows) if name not in points or name == "operation" or results.repeats(name)]],
        )
        yield "crossover.csv", crossovers(of_attention(rows))
        yield "unsupported.csv", _unsupported(results)
        if claims:
            yield "claims.csv", claim_table(claims)
        return
    chosen = ~results.primary.is_repeated() if kind == DEVIATION else None
    yield f"{'weights' if kind == TRAINING else 'results'}.{ending}", _written(results.primary, results, chosen)
    if kind == DEVIATION:
        yield "deviations.csv", _deviations(results)
    yield "summary.csv", summarise(results)
    taken = ["summary.csv", "points.csv", "timings.csv", "claims.csv"]
    for name, own in results.further.items():
        if len(own) or kind != TRAINING or name in _FILES:  # few runs of training are watched
            file = _FILES.get(name, f"{name}.csv")
            yield f"table_{file}" if file in taken else file, _written(own, results)
    yield "points.csv", points.drop(columns="seconds", errors="ignore")
    yield "timings.csv", points.reindex(columns=[*PLACE, "seconds"])
    yield "claims.csv", claim_table(claims)


def _written(rows: Rows, results: Results, chosen: NDArray[np.bool_] | None = None) -> pd.DataFrame:
    """Rows with the columns of their points that a file repeats."""
    return rows.frame(chosen, [name for name in rows.columns if name in rows.own or results.repeats(name)])


def _unsupported(results: Results) -> pd.DataFrame:
    failed = results.points[results.points["status"] != "ok"]
    labels = [name for name in failed.columns if name.startswith(LABEL)]
    columns = ("study", "scenario", "key", "attention", *labels, "status", "reason")
    return failed[[name for name in columns if name in failed]]


def to_parquet(table: pd.DataFrame) -> bytes:
    """A table as a Parquet file in row groups, numbers in full, texts with a dictionary."""
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False, row_group_size=_GROUP)
    return buffer.getvalue()


def to_csv(table: pd.DataFrame) -> bytes:
    """Writes numbers with nine significant digits, more than a metric of a rounded result has."""
    own = {name: _digits(column) for name, column in table.items()}
    return pd.DataFrame(own, columns=table.columns).to_csv(index=False, lineterminator="\n").encode()


def _digits(column: pd.Series[Any]) -> pd.Series[Any]:
    """Numbers as nine digits: pandas' `float_format` takes three times as long, a third of a report of 20,000 points."""
    if column.dtype != np.float64:
        return column
    texts = np.array(list(map("%.9g".__mod__, column.tolist())), dtype=object)
    return pd.Series(texts, column.index, dtype=object).mask(column.isna(), "")


def summarise(results: Results) -> pd.DataFrame:
    """One row per point and place in its record: replicates, and of each figure the mean, its 95 % interval and the range.

    The place of a deviation is subject, output and reference; beside it stand the point's chief settings (`Words.always`) and
    every other setting in which points of one class differ. Of other kinds it is what the kind declares.
    """
    rows = results.primary
    if results.kind in (DEVIATION, SPEED):
        summaries = _summaries(rows, _COMPARED, SUMMARISED, ~rows.is_repeated())
        first = [*PLACE, *_COMPARED]
        names = [*first, *(name for name in summaries if name not in first and not str(name).startswith(ENTRY_ROLE))]
        return _with_settings(summaries[names], results.points)
    if results.kind == TRAINING:
        places = [name for name in ("step", "tensor") if name in rows.own]
        return _summaries(rows, places, [str(name) for name in rows.own if name not in (*places, "seed")])
    return _summaries(rows, places_of(results.columns, rows.own), [one.name for one in figures_of(results.columns, rows.own)])


def _summaries(rows: Rows, places: list[str], metrics: Sequence[str], chosen: NDArray[np.bool_] | None = None) -> pd.DataFrame:
    """The labels of each point, some places in its record, and the statistics of metrics over the replicates there."""
    at = np.arange(len(rows)) if chosen is None else np.flatnonzero(chosen)
    number = numbered(rows.own[places].iloc[at].assign(point=rows.point[at]), ["point", *places])
    sizes, broken = np.bincount(number), is_broken(rows.own).to_numpy()[at]
    counts = {"replicates": sizes} | ({"nonfinite": np.bincount(number, broken).astype(np.int64)} if places == _COMPARED else {})
    at = at[np.argsort(number, kind="stable")]  # stable: the replicates of a place stay in their order
    ends = np.cumsum(sizes)
    heads = [name for name in rows.columns if name in PLACE or name.startswith((LABEL, ENTRY_ROLE))]
    table = rows.frame(at[ends - sizes], [*heads, *places]).reset_index(drop=True).assign(**counts)
    figures: dict[str, NDArray[np.float64]] = {}
    for metric in metrics:
        values, statistics = rows.own[metric].astype(float).to_numpy()[at], np.empty((len(sizes), len(_STATISTICS)))
        for i, (end, size) in enumerate(zip(ends.tolist(), sizes.tolist(), strict=True)):
            own = summary(values[end - size : end].tolist())
            statistics[i] = [getattr(own, field) for field in _STATISTICS.values()]
        figures |= {f"{metric}.{name}": column for name, column in zip(_STATISTICS, statistics.T, strict=True)}
    return pd.concat([table, pd.DataFrame(figures, index=table.index, dtype=float)], axis=1)


def _with_settings(summaries: pd.DataFrame, points: pd.DataFrame) -> pd.DataFrame:
    """Summaries with settings of their points, which a key stands for, behind the labels."""
    words = words_of(points)
    chief = ("format", "seeds", *words.always)
    names = [name for name in points.columns if name in chief or (name.startswith(_VARYING) and _varies(name, points, words))]
    own = points.drop_duplicates("key").set_index("key")[names].loc[summaries["key"]].reset_index(drop=True)
    at = list(summaries).index("replicates")
    return pd.concat([summaries.iloc[:, :at], own, summaries.iloc[:, at:]], axis=1)


def _varies(name: str, points: pd.DataFrame, words: Words) -> bool:
    """Whether points of one class differ in a setting. That classes have different settings does not count."""
    kind = words.problem_class if name.startswith("problem.") else f"{name.partition('.')[0]}.type"
    if name == kind or kind not in points:
        return points[name].nunique(dropna=False) > 1
    return bool((points[name].groupby(points[kind], dropna=False).nunique(dropna=False) > 1).any())


def _deviations(results: Results) -> pd.DataFrame:
    """The table for a reader: of each point how far its primary output is from golden and from the baseline."""
    rows = results.primary
    chosen = rows.where(primary=True, subject="variant") & (rows.where(reference="golden") | rows.where(reference="baseline"))
    table = _with_settings(_summaries(rows, _COMPARED, ("max_difference", "rmse"), chosen), results.points)
    table = table.merge(results.points[["study", SCENARIO, TITLE]].drop_duplicates(), how="left")
    labels = [name for name in table if str(name).startswith(LABEL)]
    figures = [f"{metric}.{statistic}" for metric in ("max_difference", "rmse") for statistic in ("mean", "low", "high")]
    names = ["study", TITLE, *labels, "format", "policy", "reference", "replicates", "nonfinite", *figures, "key"]
    return table[[name for name in names if name in table]]  # another operation may have no policies


_CLAIM_COLUMNS = [
    *("claim", "text", "source", "study", SCENARIO, TITLE, ROLE, "verdict", "p_verdict", "questions", "figure"),
    *("verdict_rmse", "p_verdict_rmse", "figure_rmse", "over", "sentence", "overall"),
]


def claim_table(claims: Sequence[ClaimResult]) -> pd.DataFrame:
    """One row per claim, study and scenario."""
    rows = []
    for result in claims:
        claim: dict[str, Any] = {
            "claim": result.claim.name,
            "text": result.claim.text,
            "source": result.claim.source,
            "study": result.study,
        }
        claim |= {"questions": result.questions, "overall": result.overall}
        for scenario, finding in result.findings.items():
            row: dict[str, Any] = {SCENARIO: scenario.name, TITLE: scenario.title, ROLE: scenario.role.value}
            row |= {"verdict": finding.verdict.value, "p_verdict": finding.p, "figure": finding.figure, "over": finding.over}
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
