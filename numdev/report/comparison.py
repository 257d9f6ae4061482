"""Two result sets side by side, A before and B after: which points changed, by what factor, and how surely.

Points match by study, scenario and labels; their keys hold the environment, which is what may differ. Replicates of one problem
and baseline are paired by seed, others are not; see `numdev.report.statistics`. P-values are adjusted by Holm's method: of very
many points that did not change, not one is called worse or better, with a probability of 0.95.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from numdev.errors import BadInput
from numdev.report.document.export import to_csv
from numdev.report.document.tables import printed
from numdev.report.reading.frames import METRIC_NAMES, Results
from numdev.report.reading.scenarios import LABEL, SCENARIO, TITLE
from numdev.report.statistics import Interval, holm, paired, significant, typical, unpaired
from numdev.results.files import write_atomically

COMPARABLE = (
    *("max_difference", "rmse", "mean_absolute", "std", "relative_frobenius", "relative_l1", "wasserstein"),
    *("p50", "p90", "p99", "p99_9", "max_ulp", "max_u", "latency", "host", "peak_bytes"),
)
"""Metrics that are never negative and the worse the larger; the ratio of another says nothing of better or worse."""
SIGNIFICANT = 0.05  # adjusted p-values below it


class Change(Enum):
    """The result of a comparison of B with A, worst first."""

    BROKEN = "broken"  # a result in A; in B none, or zeros, or more NaN and Inf
    ONLY_A = "only in A"  # B lacks the point
    WORSE = "worse"
    UNKNOWN = "unknown"  # both are measured, and it cannot be tested
    SAME = "same"
    EQUAL_BITS = "equal bits"  # every metric of every replicate
    BETTER = "better"
    MENDED = "mended"
    NEITHER = "in neither"
    ONLY_B = "only in B"


REGRESSIONS = (Change.BROKEN.value, Change.ONLY_A.value, Change.WORSE.value)
_OF_SIDES = ("status", "kernel", "key")
COLUMNS = [
    *("study", SCENARIO, TITLE, "point", "output", "reference", "metric", "change", "note"),
    *("a", "b", "ratio", "ratio_low", "ratio_high", "replicates", "paired", "p", "p_adjusted"),
    *(f"{name}_{side}" for name in _OF_SIDES for side in "ab"),
]
_BAD = ["nan_count", "inf_count"]
_RANKS = {"ok": 0, "nonfinite": 1, "zero": 1}  # a whole result, a part of one; any other status has none
_NONE = 2
_MOST = 20  # rows of a table of changes
_Place = tuple[str, str, str, int]  # study, scenario, labels as text, and which of the points that these do not tell apart
_Point = dict[str, Any]
_Figures = dict[tuple[str, str, str], dict[str, pd.DataFrame]]  # by study, scenario and key, then by output; seeds are the index


@dataclass(frozen=True)
class Criterion:
    """The metric and the points that are compared.

    Attributes:
        metric: one of `COMPARABLE`.
        reference: what the metric is taken against: golden, golden_same_inputs or baseline.
        tolerance: the ratio, at least 1, up to which a change does not matter; to count, a change must exceed it significantly.

    Raises:
        BadInput: for another metric or tolerance.
    """

    metric: str = "rmse"
    reference: str = "golden"
    tolerance: float = 1.0

    def __post_init__(self) -> None:
        if self.metric not in COMPARABLE:
            raise BadInput("metric", self.metric, f"use a metric of which larger is worse: {', '.join(COMPARABLE)}")
        if not 1 <= self.tolerance < math.inf:
            raise BadInput("tolerance", self.tolerance, "give the ratio up to which a change does not matter, at least 1")


def compare(a: Results, b: Results, criterion: Criterion) -> pd.DataFrame:
    """One row per point and output, with the columns `COLUMNS`; see `Change`. A point without a result has no output.

    Comparisons of equal bits are not tested and do not count in the adjustment: there is nothing random about them.

    Raises:
        BadInput: if A and B share no point, or one of them has results but not this metric or reference.
    """
    before, after = _points(a), _points(b)
    if before.keys().isdisjoint(after):
        hint = f"no point of it is one of A, which holds {', '.join(a.manifests)}; measure the same points in both"
        raise BadInput("B", ", ".join(b.manifests), f"{hint}, a function of one's own under one name")
    figures = _figures(a, criterion), _figures(b, criterion)
    places = dict.fromkeys([*before, *after])
    rows = [row for at in places for row in _compared(at, before.get(at), after.get(at), figures, criterion)]
    tested = [row for row in rows if "p" in row]
    for row, adjusted in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p_adjusted"] = adjusted
        if adjusted < SIGNIFICANT:
            row["change"] = (Change.WORSE if row["is_larger"] else Change.BETTER).value
        elif row["p"] < SIGNIFICANT:
            row["note"] = "; ".join(filter(None, (row["note"], f"significant alone, not among {len(tested)} tests")))
    texts = dict.fromkeys(("output", "note", *COLUMNS[-6:]), "")
    return pd.DataFrame([texts | row for row in rows], columns=COLUMNS).astype({"replicates": "Int64", "paired": "boolean"})


def _points(results: Results) -> dict[_Place, _Point]:
    """The points of one side; in the text of their labels 4 and 4.0 are the same, whatever the types of columns."""
    labels = sorted(str(name) for name in results.points if str(name).startswith(LABEL))
    points: dict[_Place, _Point] = {}
    twins: Counter[tuple[str, str, str]] = Counter()
    for point in results.points[["study", SCENARIO, TITLE, "reason", "pairing", *_OF_SIDES, *labels]].to_dict("records"):
        labelled = [(name.removeprefix(LABEL), point[name]) for name in labels if not pd.isna(point[name])]
        text = " ".join(f"{name}={int(v) if isinstance(v, float) and v.is_integer() else v}" for name, v in labelled)
        place = (point["study"], point[SCENARIO], text)
        points[*place, twins[place]] = {str(name): value for name, value in point.items()}
        twins[place] += 1
    return points


def _figures(results: Results, criterion: Criterion) -> _Figures:
    """The replicates of one side."""
    rows = results.primary.frame(results.primary.where(subject="variant"))
    chosen = rows[rows["reference"] == criterion.reference]
    if chosen.empty and not rows.empty:
        raise BadInput("reference", criterion.reference, f"both must have it; one has {', '.join(rows['reference'].unique())}")
    if not chosen.empty and (criterion.metric not in chosen or chosen[criterion.metric].isna().all()):
        held = ", ".join(name for name in COMPARABLE if name in chosen and chosen[name].notna().any())
        raise BadInput("metric", criterion.metric, f"both must have it; one has {held}")
    figures: _Figures = {}
    for names, group in chosen.groupby(["study", SCENARIO, "key", "output"], sort=False):
        study, scenario, key, output = map(str, names)
        figures.setdefault((study, scenario, key), {})[output] = group.drop_duplicates("seed").set_index("seed")
    return figures


def _compared(
    place: _Place, a: _Point | None, b: _Point | None, figures: tuple[_Figures, _Figures], criterion: Criterion
) -> Iterator[dict[str, Any]]:
    """The comparisons of one point, a row for each output; those that are tested are the same until p-values are adjusted."""
    study, scenario, labels, _ = place
    row = {"study": study, SCENARIO: scenario, "point": labels, "metric": criterion.metric, "reference": criterion.reference}
    row[TITLE] = (b or a or {})[TITLE]
    row |= {f"{name}_{side}": own[name] for side, own in (("a", a), ("b", b)) if own for name in _OF_SIDES}
    if a is None or b is None:
        yield row | {"change": (Change.ONLY_A if b is None else Change.ONLY_B).value}
        return
    rank_a, rank_b = (_RANKS.get(own["status"], _NONE) for own in (a, b))
    if rank_a != rank_b or rank_a == _NONE:
        change = Change.NEITHER if rank_a == rank_b else Change.BROKEN if rank_a < rank_b else Change.MENDED
        yield row | {"change": change.value, "note": b["reason"] or a["reason"]}
        return
    of_a, of_b = (own.get((study, scenario, point["key"]), {}) for own, point in zip(figures, (a, b), strict=True))
    for output in dict.fromkeys([*of_a, *of_b]) or [""]:
        is_pair = a["pairing"] == b["pairing"]
        yield row | {"output": output} | _replicates(of_a.get(output), of_b.get(output), criterion, is_pair=is_pair)


def _replicates(a: pd.DataFrame | None, b: pd.DataFrame | None, criterion: Criterion, *, is_pair: bool) -> dict[str, Any]:
    """The result for the replicates of one output."""
    if a is None or b is None:
        return {"change": Change.UNKNOWN.value, "note": f"no figure against {criterion.reference} on one side or both"}
    seeds = a.index.intersection(b.index)
    pairs = is_pair and len(seeds) > 0
    a, b = (a.loc[seeds], b.loc[seeds]) if pairs else (a, b)
    x, y = (rows[criterion.metric].to_numpy(dtype=float) for rows in (a, b))
    row: dict[str, Any] = {"paired": pairs, "replicates": min(len(x), len(y))}
    row |= {"a": typical(x.tolist()).estimate, "b": typical(y.tolist()).estimate}
    first, second = (rows.reindex(columns=[*METRIC_NAMES, criterion.metric]).to_numpy(dtype=float) for rows in (a, b))
    if pairs and np.array_equal(first, second, equal_nan=True):
        return row | {"ratio": 1.0, "change": Change.EQUAL_BITS.value}
    bad_a, bad_b = (int(rows.reindex(columns=_BAD).to_numpy(dtype=float, na_value=0).sum()) for rows in (a, b))
    if bad_a or bad_b:
        change = Change.BROKEN if bad_b > bad_a else Change.UNKNOWN
        return row | {"change": change.value, "note": f"elements that are NaN or Inf: {bad_b} in B, {bad_a} in A"}
    test = (paired if pairs else unpaired)(x, y, criterion.tolerance)
    row |= {"ratio": test.ratio.estimate, "note": test.note}
    if math.isnan(test.p):
        return row | {"change": Change.UNKNOWN.value}
    row |= {"ratio_low": test.ratio.low, "ratio_high": test.ratio.high, "p": test.p, "is_larger": test.is_larger}
    return row | {"change": Change.SAME.value}


def write(changes: pd.DataFrame, out: Path) -> None:
    """Write compare.csv into `out`, or raise StoreError."""
    write_atomically(out / "compare.csv", to_csv(changes))


def show(changes: pd.DataFrame, a: Results, b: Results, console: Console) -> None:
    """Print how the environments differ, how many comparisons changed how, what is worse, what may be, and what A lacks.

    Broken points come first, then those that B lacks, then worse ones by ratio. Ratios above 1 that cannot be tested stand apart,
    where nothing is worse with those that are not called a change.
    """
    names = dict.fromkeys(name for side in (a, b) for facts in side.environments for name in facts)
    sides = [{name: ", ".join(dict.fromkeys(own.get(name, "none") for own in s.environments)) for name in names} for s in (a, b)]
    differ = [(name, *(facts[name] for facts in sides)) for name in names if sides[0][name] != sides[1][name]]
    counts = pd.crosstab(changes["study"], changes["change"])
    counts = counts.reindex(changes["study"].unique(), columns=[one.value for one in Change if one.value in counts])
    worse = changes[changes["change"].isin(REGRESSIONS)]
    worse = worse.assign(order=worse["change"].map(REGRESSIONS.index))
    is_open = changes["change"].isin([Change.UNKNOWN.value, *([] if len(worse) else [Change.SAME.value])])
    largest = changes[is_open & (changes["ratio"] > 1)].sort_values("ratio", ascending=False, kind="stable")
    tables = {
        "Environments differ": pd.DataFrame(differ, columns=["fact", "A", "B"]),
        "Comparisons": counts.astype(str).reset_index(),
        "Changes for the worse": _shown(worse.sort_values(["order", "ratio"], ascending=[True, False], kind="stable")),
        "Largest ratios B / A, none of them judged worse": _shown(largest),
        "Points that A lacks": _shown(changes[changes["change"] == Change.ONLY_B.value]),
    }
    for title, rows in tables.items():
        if (table := printed(rows, title)) is not None:
            console.print(table)


def _shown(changes: pd.DataFrame) -> pd.DataFrame:
    """The first changes as text."""
    lines = []
    for row in changes.head(_MOST).to_dict("records"):
        ratio = Interval(row["ratio"], row["ratio_low"], row["ratio_high"], 0).text()
        figures = [significant(row["a"], 3), significant(row["b"], 3), ratio, significant(row["p_adjusted"])]
        known = ["" if figure == "unknown" else figure for figure in figures]
        lines.append([row["study"], f"{row[TITLE]} {row['point']}".strip(), row["output"], *known, row["change"], row["note"]])
    if len(changes) > _MOST:
        lines.append(["", f"and {len(changes) - _MOST} more, which out=FOLDER writes to compare.csv", *[""] * 7])
    return pd.DataFrame(lines, columns=["study", "point", "output", "A", "B", "B / A", "adjusted p", "change", "note"])
