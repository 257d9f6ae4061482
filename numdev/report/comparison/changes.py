"""Two result sets side by side, A before and B after: which points changed, by what factor, and how surely.

Points match by study, scenario and labels; their keys hold the environment, which is what may differ. Replicates of one problem
and baseline are paired by seed, others are not; see `numdev.report.statistics`.

Many points are tested at once, and of those that did not change one in twenty would look changed. So p-values are adjusted by
Holm's method, and not one such point is called worse or better, with a probability of 0.95.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pandas as pd

from numdev.errors import BadInput
from numdev.report.reading.frames import METRIC_NAMES, Results
from numdev.report.reading.scenarios import LABEL, SCENARIO, TITLE
from numdev.report.statistics import holm, paired, typical, unpaired

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
COLUMNS = [
    *("study", SCENARIO, TITLE, "point", "output", "reference", "metric", "change", "note"),
    *("a", "b", "ratio", "ratio_low", "ratio_high", "replicates", "paired", "p", "p_adjusted"),
    *("status_a", "status_b", "kernel_a", "kernel_b", "key_a", "key_b"),
]
_BAD = ["nan_count", "inf_count"]
_TEXTS = ("output", "note", *COLUMNS[-6:])


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


Place = tuple[str, str, str, int]  # study, scenario, labels, and which of several points that these do not tell apart


@dataclass(frozen=True)
class _Point:
    """A point of one side: its row of `Results.points`, and by output its replicates, by seed."""

    facts: dict[str, Any]
    outputs: dict[str, pd.DataFrame] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return {"ok": 0, "nonfinite": 1, "zero": 1}.get(self.facts["status"], 2)


def compare(a: Results, b: Results, criterion: Criterion) -> pd.DataFrame:
    """One row per point and output, with the columns `COLUMNS`; see `Change`. A point without a result has no output.

    Comparisons of equal bits are not tested and do not count in the adjustment: there is nothing random about them.

    Raises:
        BadInput: if A and B share no point, or one of them has results but not this metric or reference.
    """
    before, after = _measured(a, criterion), _measured(b, criterion)
    if not before.keys() & after.keys():
        hint = f"no point of it is one of A, which holds {', '.join(a.manifests)}"
        raise BadInput(
            "B", ", ".join(b.manifests), f"{hint}; measure the same points in both, a function of one's own under one name"
        )
    places = dict.fromkeys([*before, *after])
    rows = [row for place in places for row in _compared(place, before.get(place), after.get(place), criterion)]
    tests = [row["p"] for row in rows if "p" in row]
    adjusted = iter(holm(tests))
    judged = [row | _judged(row, next(adjusted), len(tests)) if "p" in row else row for row in rows]
    table = pd.DataFrame([dict.fromkeys(_TEXTS, "") | row for row in judged], columns=COLUMNS)
    return table.astype({"replicates": "Int64", "paired": "boolean"})


def _measured(results: Results, criterion: Criterion) -> dict[Place, _Point]:
    """The points of one side."""
    rows = results.primary.frame(results.primary.where(subject="variant"))
    chosen = rows[rows["reference"] == criterion.reference]
    if chosen.empty and not rows.empty:
        raise BadInput("reference", criterion.reference, f"both must have it; one has {', '.join(rows['reference'].unique())}")
    if not chosen.empty and (criterion.metric not in chosen or chosen[criterion.metric].isna().all()):
        held = ", ".join(name for name in COMPARABLE if name in chosen and chosen[name].notna().any())
        raise BadInput("metric", criterion.metric, f"both must have it; one has {held}")
    outputs: dict[tuple[str, ...], dict[str, pd.DataFrame]] = {}
    for names, group in chosen.assign(point=_labels(chosen)).groupby(["study", "scenario", "point", "key", "output"], sort=False):
        *where, output = map(str, names)
        outputs.setdefault(tuple(where), {})[output] = group.set_index("seed")
    seen: Counter[tuple[str, str, str]] = Counter()
    points: dict[Place, _Point] = {}
    for point, row in zip(_labels(results.points), results.points.to_dict("records"), strict=True):
        facts = {str(name): value for name, value in row.items()}
        place = (str(facts["study"]), str(facts["scenario"]), point)
        points[(*place, seen[place])] = _Point(facts, outputs.get((*place, str(facts["key"])), {}))
        seen[place] += 1
    return points


def _labels(table: pd.DataFrame) -> list[str]:
    """The labels of each row as text, whatever the types of columns: 4 and 4.0 are the same."""
    names = sorted(str(name) for name in table.columns if str(name).startswith(LABEL))
    rows = [[(name, row[name]) for name in names if not pd.isna(row[name])] for row in table.to_dict("records")]
    rows = [[(name, int(v) if isinstance(v, float) and v.is_integer() else v) for name, v in row] for row in rows]
    return [" ".join(f"{name.removeprefix(LABEL)}={value}" for name, value in row) for row in rows]


def _compared(place: Place, a: _Point | None, b: _Point | None, criterion: Criterion) -> Iterator[dict[str, Any]]:
    row: dict[str, Any] = {"metric": criterion.metric, "reference": criterion.reference}
    row["study"], row[SCENARIO], row["point"], _ = place
    for side, point in (("a", a), ("b", b)):
        if point is not None:
            row |= {f"{name}_{side}": point.facts[name] for name in ("status", "kernel", "key")}
            row[TITLE] = point.facts[TITLE]
    if a is None or b is None:
        yield row | {"change": (Change.ONLY_A if b is None else Change.ONLY_B).value}
    elif a.rank != b.rank or a.rank == 2:
        change = Change.NEITHER if a.rank == b.rank else Change.BROKEN if a.rank < b.rank else Change.MENDED
        yield row | {"change": change.value, "note": b.facts["reason"] or a.facts["reason"]}
    else:
        for output in dict.fromkeys([*a.outputs, *b.outputs]) or [""]:
            yield row | {"output": output} | _replicates(a, b, output, criterion)


def _replicates(a: _Point, b: _Point, output: str, criterion: Criterion) -> dict[str, Any]:
    """The result for the replicates of one output: a test that is yet to be adjusted, or a change that needs none."""
    if output not in a.outputs or output not in b.outputs:
        return {"change": Change.UNKNOWN.value, "note": f"no figure against {criterion.reference} on one side or both"}
    first, second = a.outputs[output], b.outputs[output]
    seeds = first.index.intersection(second.index)
    pairs = a.facts["pairing"] == b.facts["pairing"] and len(seeds) > 0
    if pairs:
        first, second = first.loc[seeds], second.loc[seeds]
    x, y = (rows[criterion.metric].to_numpy(dtype=float) for rows in (first, second))
    row = {"paired": pairs, "replicates": min(len(x), len(y))}
    row |= {"a": typical(x.tolist()).estimate, "b": typical(y.tolist()).estimate}
    if pairs and _is_equal(first, second, [*METRIC_NAMES, criterion.metric]):
        return row | {"ratio": 1.0, "change": Change.EQUAL_BITS.value}
    bad_a, bad_b = (int(rows.reindex(columns=_BAD).to_numpy(dtype=float, na_value=0).sum()) for rows in (first, second))
    if bad_a or bad_b:
        change = Change.BROKEN if bad_b > bad_a else Change.UNKNOWN
        return row | {"change": change.value, "note": f"elements that are NaN or Inf: {bad_b} in B, {bad_a} in A"}
    test = (paired if pairs else unpaired)(x, y, criterion.tolerance)
    row |= {"ratio": test.ratio.estimate, "note": test.note}
    if math.isnan(test.p):
        return row | {"change": Change.UNKNOWN.value}
    return row | {"ratio_low": test.ratio.low, "ratio_high": test.ratio.high, "p": test.p, "is_larger": test.is_larger}


def _is_equal(first: pd.DataFrame, second: pd.DataFrame, metrics: list[str]) -> bool:
    x, y = (rows.reindex(columns=metrics).to_numpy(dtype=float) for rows in (first, second))
    return np.array_equal(x, y, equal_nan=True)


def _judged(row: dict[str, Any], adjusted: float, tests: int) -> dict[str, Any]:
    if adjusted < SIGNIFICANT:
        return {"p_adjusted": adjusted, "change": (Change.WORSE if row["is_larger"] else Change.BETTER).value}
    alone = f"significant alone, not among {tests} tests" if row["p"] < SIGNIFICANT else ""
    return {"p_adjusted": adjusted, "change": Change.SAME.value, "note": "; ".join(filter(None, (row["note"], alone)))}
