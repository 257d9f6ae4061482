"""Results as files that a spreadsheet or another program reads. The same results give the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from numdev.report.claims.verdicts import ClaimResult
from numdev.report.document.parquet import parquet_of
from numdev.report.reading.columns import dictionary
from numdev.report.reading.configuration import settings
from numdev.report.reading.frames import LABEL, PLACE, Results, is_broken
from numdev.report.reading.once import is_repeated
from numdev.report.reading.primary import is_compared
from numdev.report.reading.rows import Rows
from numdev.report.reading.scenarios import ROLE, SCENARIO, TITLE
from numdev.report.reading.words import Words
from numdev.report.studies.registry import words_of
from numdev.results.record import summary
from numdev.results.store import write_atomically

SUMMARISED = ("max_difference", "mean_absolute", "std", "rmse", "wasserstein", "max_ulp", "bias")
_PART = 1 << 14  # rows that are text at a time
_GROUP = [*PLACE, "subject", "output", "reference"]
_VARYING = ("kernel", "problem.", "variant.", "baseline.")  # what it tells where points of one class differ in it


def write_tables(results: Results, claims: list[ClaimResult], out: Path, csv: bool = False) -> None:
    """Write results.parquet, deviations.csv, summary.csv, points.csv, timings.csv, claims.csv, columns.md and environment.json.

    Times differ from run to run and stand in timings.csv alone. With `csv`, results.csv in place of results.parquet.

    Raises:
        StoreError: if a file cannot be written.
    """
    rows, once = results.stored, ~is_repeated(results.stored)
    tables: dict[str, Callable[[], pd.DataFrame]] = {  # made one by one: of a large study each takes memory
        "deviations.csv": lambda: _deviations(rows, results.points),
        "summary.csv": lambda: summarise(rows, results.points, once),
        "points.csv": lambda: results.points.drop(columns="seconds", errors="ignore"),
        "timings.csv": lambda: results.points.reindex(columns=[*PLACE, "seconds"]),
        "claims.csv": lambda: claim_table(claims),
    }
    columns = {write_rows(out, "results", rows, once, csv=csv): rows.columns}
    for name, make in tables.items():
        table = make()
        write_atomically(out / name, csv_of(table))
        columns[name] = list(table.columns)
    said = dictionary(columns, results.columns | settings(results.manifests.values()))
    write_atomically(out / "columns.md", said.encode())
    write_atomically(out / "environment.json", environments(results))


def write_rows(
    out: Path, name: str, rows: pd.DataFrame | Rows, chosen: NDArray[np.bool_] | None = None, *, csv: bool = False
) -> str:
    """Write a table with a row per replicate as Parquet, a tenth as large as it is as CSV; returns the name of the file."""
    file = f"{name}.csv" if csv else f"{name}.parquet"
    write_atomically(out / file, csv_of(rows, chosen) if csv else parquet_of(rows, chosen))
    return file


def _deviations(rows: Rows, points: pd.DataFrame) -> pd.DataFrame:
    """What a person reads: of each point how far its primary output is from golden and from the baseline."""
    wanted = is_compared(rows.own) & rows.own["reference"].isin(("golden", "baseline")).to_numpy(dtype=bool)
    found = summarise(rows, points, wanted[rows.places(np.arange(len(rows)))])
    found = found.merge(points[["study", SCENARIO, TITLE]].drop_duplicates(), how="left")
    labels = [name for name in found if str(name).startswith(LABEL)]
    shown = [f"{metric}.{statistic}" for metric in ("max_difference", "rmse") for statistic in ("mean", "low", "high")]
    names = ["study", TITLE, *labels, "format", "policy", "reference", "replicates", "nonfinite", *shown, "key"]
    return found[[name for name in names if name in found]]  # another operation may have no policies


def to_csv(table: pd.DataFrame) -> bytes:
    """Writes numbers with nine significant digits, more than a metric of a rounded result has."""
    return b"".join(csv_of(table))


def csv_of(table: pd.DataFrame | Rows, chosen: NDArray[np.bool_] | None = None) -> Iterator[bytes]:
    """What `to_csv` writes of a table, or of its rows that are chosen, in parts: the text of all takes more than the table."""
    rows = Rows.of(table)
    count = len(rows) if chosen is None else int(chosen.sum())
    places = np.arange(count) if chosen is None else np.flatnonzero(chosen)
    for start in range(0, max(1, count), _PART):
        own = rows.frame(places[start : start + _PART])
        own = pd.DataFrame({name: _digits(column) for name, column in own.items()}, own.index, own.columns, copy=False)
        yield own.to_csv(index=False, header=start == 0, lineterminator="\n").encode()


def _digits(column: pd.Series[Any]) -> pd.Series[Any]:
    """Numbers as the texts of `to_csv`: pandas' `float_format` asks of each number by itself whether it is missing."""
    if column.dtype != np.float64:
        return column
    texts = np.array(list(map("%.9g".__mod__, column.tolist())), dtype=object)
    texts[column.isna().to_numpy()] = ""
    return pd.Series(texts, column.index, dtype=object, copy=False)


def summarise(table: pd.DataFrame | Rows, points: pd.DataFrame, chosen: NDArray[np.bool_] | None = None) -> pd.DataFrame:
    """One row per point, subject, output and reference: mean, its 95 % interval and the range of the chief metrics.

    Beside each stand the point's labels, the operation's chief settings (`Words.told`), and every other setting in which `points`
    of one class differ. Of the table's rows, those that are `chosen`, which are all unless given.
    """
    rows = Rows.of(table)
    by = [*_GROUP, *(name for name in rows.columns if name.startswith(LABEL))]  # one key may stand under several labels
    own = np.arange(len(rows)) if chosen is None else np.flatnonzero(chosen)
    group = rows.numbered(by, own)
    sizes = np.bincount(group)
    broken = np.bincount(group, is_broken(rows.own).to_numpy()[rows.places(own)]).astype(np.int64)
    own = own[np.argsort(group, kind="stable")]  # stable: the replicates of a group stay in their order
    ends = np.cumsum(sizes)
    places = _with_settings(rows.frame(own[ends - sizes], by).reset_index(drop=True), points)
    found: dict[str, Any] = {"replicates": sizes, "nonfinite": broken}
    for metric in SUMMARISED:
        values = rows.column(metric, own).to_numpy()
        statistics = np.empty((len(_STATISTICS), len(sizes)))
        for i, (end, size) in enumerate(zip(ends, sizes, strict=True)):
            own_summary = summary(values[end - size : end].tolist())
            statistics[:, i] = [getattr(own_summary, field) for field in _STATISTICS.values()]
        found |= {f"{metric}.{name}": column for name, column in zip(_STATISTICS, statistics, strict=True)}
    return pd.concat([places, pd.DataFrame(found, copy=False)], axis=1)


def summarise_by(rows: pd.DataFrame, by: Sequence[str], metrics: Sequence[str]) -> pd.DataFrame:
    """One row for each value of some columns: mean over replicates, its 95 % interval and the range of some figures."""
    if rows.empty:
        return rows.iloc[:0]
    found = []
    for place, group in rows.groupby(list(by), sort=False, dropna=False):
        row = dict(zip(by, place, strict=True)) | {"replicates": len(group)}
        for metric in metrics:
            own = summary(group[metric].astype(float).tolist())
            row |= {f"{metric}.{name}": getattr(own, field) for name, field in _STATISTICS.items()}
        found.append(row)
    return pd.DataFrame(found)


_STATISTICS = {"mean": "mean", "low": "low", "high": "high", "min": "least", "max": "most"}


def _with_settings(places: pd.DataFrame, points: pd.DataFrame) -> pd.DataFrame:
    """Places with settings of their points, which a key stands for."""
    words = words_of(points)
    told = ("format", "seeds", *words.told)
    names = [name for name in points.columns if name in told or (name.startswith(_VARYING) and _varies(name, points, words))]
    found = points.drop_duplicates("key").set_index("key")[names].loc[places["key"]].reset_index(drop=True)
    return pd.concat([places, found], axis=1)


def _varies(name: str, points: pd.DataFrame, words: Words) -> bool:
    """Whether points of one class differ in a setting. That classes have different settings does not count."""
    kind = words.problem_class if name.startswith("problem.") else f"{name.partition('.')[0]}.type"
    if name == kind or kind not in points:
        return points[name].nunique(dropna=False) > 1
    return bool((points[name].groupby(points[kind], dropna=False).nunique(dropna=False) > 1).any())


_CLAIM_COLUMNS = [
    *("claim", "text", "source", "study", SCENARIO, TITLE, ROLE, "verdict", "p_verdict", "questions", "figure"),
    *("verdict_rmse", "p_verdict_rmse", "figure_rmse", "over", "sentence", "overall"),
]


def claim_table(claims: list[ClaimResult]) -> pd.DataFrame:
    """One row per claim, study and scenario."""
    return pd.DataFrame(list(_claim_rows(claims)), columns=_CLAIM_COLUMNS)


def _claim_rows(claims: list[ClaimResult]) -> Iterator[dict[str, Any]]:
    for result in claims:
        head = {
            "claim": result.claim.name,
            "text": result.claim.text,
            "source": result.claim.source,
            "study": result.study,
        }
        for scenario, found in result.findings.items():
            place = {SCENARIO: scenario.name, TITLE: scenario.title, ROLE: scenario.role.value}
            judged = {"verdict": found.verdict.value, "p_verdict": found.p, "figure": found.figure, "over": found.over}
            if found.beside is not None:
                beside = found.beside
                judged |= {"verdict_rmse": beside.verdict.value, "p_verdict_rmse": beside.p, "figure_rmse": beside.figure}
            told = {"questions": result.questions, "sentence": found.sentence, "overall": result.overall}
            yield head | place | judged | told


def environments(results: Results) -> bytes:
    """Every environment of the results, and how many points of which study were measured in it."""
    found = []
    for number, facts in enumerate(results.environments):
        here = results.points[results.points["environment"] == number]
        counts = {str(study): int(count) for study, count in here.groupby("study", sort=False).size().items()}
        found.append({"environment": number, "points": counts, "facts": facts})
    return (json.dumps(found, indent=1) + "\n").encode()
