"""Two result sets side by side, A before and B after: which points changed, by what factor, and how surely.

Points match by study, scenario and labels; their keys hold the environment, which is what may differ. Replicates of one problem
and baseline are paired by seed; others are not tested. P-values are adjusted by Holm's method: of very many points that did not
change, not one is called worse or better, with a probability of 0.95.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from numdev.errors import BadInput
from numdev.measurement.metrics import METRICS
from numdev.report.document.export import to_csv
from numdev.report.document.tables import printed
from numdev.report.reading.frames import LABEL, SCENARIO, TITLE, Results
from numdev.report.statistics import Floats, Interval, holm, ratio, sign_test, significant, typical
from numdev.results.record import write_atomically

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
    NOT_SHOWN = "not shown"  # neither worse nor better is significant, and the interval exceeds the tolerance
    SAME = "same"  # the interval lies within the tolerance
    EQUAL_BITS = "equal bits"  # every metric of every replicate
    BETTER = "better"
    MENDED = "mended"
    NEITHER = "in neither"
    ONLY_B = "only in B"


REGRESSIONS = (Change.BROKEN.value, Change.ONLY_A.value, Change.WORSE.value)
_UNTESTED = (Change.UNKNOWN.value, Change.NEITHER.value, Change.ONLY_B.value)
_OF_SIDES = ("status", "kernel", "key")
COLUMNS = [
    *("study", SCENARIO, TITLE, "point", "output", "reference", "metric", "change", "note"),
    *("a", "b", "ratio", "ratio_low", "ratio_high", "replicates", "p", "p_adjusted"),
    *(f"{name}_{side}" for name in _OF_SIDES for side in "ab"),
]
_BAD = ["nan_count", "inf_count"]
_RANKS = {"ok": 0, "nonfinite": 1, "zero": 1}  # a whole result, a part of one; any other status has none
_NONE = 2
_MOST = 20  # rows of a table of changes
_Place = tuple[str, str, str, int]  # study, scenario, labels as text, and which of the points that these do not tell apart
_OTHER_MACHINE = 1e-12
"""Relative change that a metric's own FP64 arithmetic makes on another machine. A sum of N d terms in another order is off by
less than 100 u = 1e-14. Golden is off by a few u of r, say 2^-51 r: 2^-40 = 9e-13 of a deviation of 2^-11 r, which is u of fp16.
Finer formats deviate less and take more of golden's error, but of either sign, which the interval over seeds allows for."""


@dataclass(frozen=True)
class Criterion:
    """The metric and the points that are compared.

    Raises:
        BadInput: for another metric or tolerance.
    """

    metric: str = "rmse"  # one of `COMPARABLE`
    reference: str = "golden"  # what the metric is taken against: golden, golden_same_inputs or baseline
    # The ratio, at least 1, up to which a change does not matter; to count, a change must exceed it significantly
    tolerance: float = 1.0

    def __post_init__(self) -> None:
        if self.metric not in COMPARABLE:
            raise BadInput("metric", self.metric, f"use a metric of which larger is worse: {', '.join(COMPARABLE)}")
        if not 1 <= self.tolerance < math.inf:
            raise BadInput("tolerance", self.tolerance, "give the ratio up to which a change does not matter, at least 1")

    def test(self, a: Floats, b: Floats) -> dict[str, Any]:
        """The ratio of b to a by replicate, with its interval, and the p-value before any adjustment.

        The hypothesis tested is |log ratio| <= log tolerance, by Student's t on the logarithms: p < 0.05 exactly where the 95 %
        interval lies beyond the tolerance or below its inverse. Equal zeros are a ratio of 1. Where a pair has no finite ratio,
        such as a zero on one side alone, p is that of the sign test over all pairs. A single replicate has no p. The `change`
        is what is known before p is adjusted: unknown, not shown or the same.
        """
        with np.errstate(invalid="ignore"):
            b = np.where(np.abs(b - a) <= _OTHER_MACHINE * np.abs(a), a, b)
        times = ratio(b, a)
        if len(a) < 2:
            note = "one replicate alone has no interval; measure more seeds"
            return {"ratio": times.estimate, "change": Change.UNKNOWN.value, "note": note}
        is_within = not times.excluded and 1 / self.tolerance <= times.low and times.high <= self.tolerance
        row = {"ratio": times.estimate, "ratio_low": times.low, "ratio_high": times.high, "is_larger": times.estimate > 1}
        row |= {"change": (Change.SAME if is_within else Change.NOT_SHOWN).value}
        if not times.excluded:
            (share,) = times.shares
            return row | {"p": share.p(abs(share.mean) - math.log(self.tolerance)), "note": ""}
        larger, smaller = int((b > self.tolerance * a).sum()), int((a > self.tolerance * b).sum())
        note = f"{times.excluded} of {len(a)} pairs have no finite ratio; p is of the sign test"
        return row | {"p": sign_test(larger, smaller), "is_larger": larger > smaller, "note": note}


def compare(a: Results, b: Results, criterion: Criterion) -> pd.DataFrame:
    """One row per point and output, with the columns `COLUMNS`; see `Change`. A point without a result has no output.

    Comparisons of equal bits are not tested and do not count in the adjustment: there is nothing random about them.

    Raises:
        BadInput: if A and B share no point, or one of them has results but not this metric or reference.
    """
    before, after = _points(a, criterion), _points(b, criterion)
    if before.keys().isdisjoint(after):
        hint = f"no point of it is one of A, which holds {', '.join(a.manifests)}; measure the same points in both"
        raise BadInput("B", ", ".join(b.manifests), f"{hint}, a function of one's own under one name")
    rows: list[dict[str, Any]] = [
        {"study": place[0], SCENARIO: place[1], "point": place[2], **row}
        for place in dict.fromkeys([*before, *after])
        for row in _compared(before.get(place), after.get(place), criterion)
    ]
    tested = [row for row in rows if "p" in row]
    for row, adjusted in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p_adjusted"] = adjusted
        if adjusted < SIGNIFICANT:
            row["change"] = (Change.WORSE if row["is_larger"] else Change.BETTER).value
        elif row["p"] < SIGNIFICANT:
            row["note"] = "; ".join(filter(None, (row["note"], f"significant alone, not among {len(tested)} tests")))
    usual = dict.fromkeys(("output", "note", *COLUMNS[-6:]), "")
    usual |= {"metric": criterion.metric, "reference": criterion.reference}
    return pd.DataFrame([usual | row for row in rows], columns=COLUMNS).astype({"replicates": "Int64"})


def _points(results: Results, criterion: Criterion) -> dict[_Place, dict[str, Any]]:
    """The points of one side, each with its `figures`, which are rows of replicates by output.

    In the text of labels 4 and 4.0 are the same, whatever the types of columns.
    """
    rows = results.primary.frame(results.primary.where(subject="variant"))
    chosen = rows[rows["reference"] == criterion.reference]
    if chosen.empty and not rows.empty:
        raise BadInput("reference", criterion.reference, f"both must have it; one has {', '.join(rows['reference'].unique())}")
    if not chosen.empty and (criterion.metric not in chosen or chosen[criterion.metric].isna().all()):
        held = ", ".join(name for name in COMPARABLE if name in chosen and chosen[name].notna().any())
        raise BadInput("metric", criterion.metric, f"both must have it; one has {held}")
    figures: dict[Any, dict[str, pd.DataFrame]] = {}
    for (study, scenario, key, output), group in chosen.groupby(["study", SCENARIO, "key", "output"], sort=False):
        figures.setdefault((study, scenario, key), {})[str(output)] = group.drop_duplicates("seed").set_index("seed")
    labels = sorted(str(name) for name in results.points if str(name).startswith(LABEL))
    points, twins = dict[_Place, dict[str, Any]](), Counter[tuple[str, str, str]]()
    for cells in results.points[["study", SCENARIO, TITLE, "reason", "pairing", *_OF_SIDES, *labels]].to_dict("records"):
        point = {str(name): value for name, value in cells.items()}
        labelled = [(name.removeprefix(LABEL), point[name]) for name in labels if not pd.isna(point[name])]
        text = " ".join(f"{name}={int(v) if isinstance(v, float) and v.is_integer() else v}" for name, v in labelled)
        place = point["study"], point[SCENARIO], text
        points[*place, twins[place]] = {**point, "figures": figures.get((*place[:2], point["key"]), {})}
        twins[place] += 1
    return points


def _compared(a: dict[str, Any] | None, b: dict[str, Any] | None, criterion: Criterion) -> Iterator[dict[str, Any]]:
    """The comparisons of one point, a row for each output, before p-values are adjusted."""
    row: dict[str, Any] = {TITLE: (b or a or {})[TITLE]}
    row |= {f"{name}_{side}": own[name] for side, own in (("a", a), ("b", b)) if own for name in _OF_SIDES}
    if a is None or b is None:
        yield row | {"change": (Change.ONLY_A if b is None else Change.ONLY_B).value}
        return
    rank_a, rank_b = (_RANKS.get(own["status"], _NONE) for own in (a, b))
    if rank_a != rank_b or rank_a == _NONE:
        change = Change.NEITHER if rank_a == rank_b else Change.BROKEN if rank_a < rank_b else Change.MENDED
        yield row | {"change": change.value, "note": b["reason"] or a["reason"]}
        return
    for output in dict.fromkeys([*a["figures"], *b["figures"]]) or [""]:
        figures = a["figures"].get(output), b["figures"].get(output)
        yield row | {"output": output} | _replicates(*figures, criterion, is_pair=a["pairing"] == b["pairing"])


def _replicates(a: pd.DataFrame | None, b: pd.DataFrame | None, criterion: Criterion, *, is_pair: bool) -> dict[str, Any]:
    """The result for the replicates of one output, those of seeds that both sides have where their problem is one."""
    unknown = {"change": Change.UNKNOWN.value}
    if a is None or b is None:
        return unknown | {"note": f"no figure against {criterion.reference} on one side or both"}
    seeds = a.index.intersection(b.index)
    if pairs := is_pair and len(seeds) > 0:
        a, b = a.loc[seeds], b.loc[seeds]
    x, y = (rows[criterion.metric].to_numpy(dtype=float) for rows in (a, b))
    size_a, size_b = (typical(values.tolist()).estimate for values in (x, y))
    row: dict[str, Any] = {"replicates": min(len(x), len(y)), "a": size_a, "b": size_b}
    first, second = (rows.reindex(columns=[*METRICS, criterion.metric]).to_numpy(dtype=float) for rows in (a, b))
    if pairs and np.array_equal(first, second, equal_nan=True):
        return row | {"ratio": 1.0, "change": Change.EQUAL_BITS.value}
    bad_a, bad_b = (int(rows.reindex(columns=_BAD).to_numpy(dtype=float, na_value=0).sum()) for rows in (a, b))
    if bad_a or bad_b:
        change, mend = (Change.BROKEN, "") if bad_b > bad_a else (Change.UNKNOWN, "; measure inputs that lead to none in A")
        return row | {"change": change.value, "note": f"elements that are NaN or Inf: {bad_b} in B, {bad_a} in A{mend}"}
    if not pairs:
        times = size_b / size_a if size_a > 0 else math.nan
        note = "problem, baseline or seeds differ, so that replicates are no pairs; measure both with the same"
        return row | unknown | {"ratio": times, "note": f"{note} (baseline=none if formats differ)"}
    return row | criterion.test(x, y)


def untested(changes: pd.DataFrame) -> str:
    """Why no comparison says anything of B, the most frequent reason; empty where one does."""
    if not changes["change"].isin(_UNTESTED).all():
        return ""
    return str(changes.loc[changes["change"] != Change.ONLY_B.value, "note"].mode()[0]) or "no point has a result"


def write(changes: pd.DataFrame, out: Path) -> None:
    """Write compare.csv into `out`, or raise StoreError."""
    write_atomically(out / "compare.csv", to_csv(changes))


def show(changes: pd.DataFrame, a: Results, b: Results, console: Console) -> None:
    """Print how the environments differ, how many comparisons changed how, what is worse, and what cannot be tested.

    Broken points come first, then those that B lacks, then worse ones by ratio.
    """
    names = dict.fromkeys(name for side in (a, b) for facts in side.environments for name in facts)
    facts = [{name: ", ".join(dict.fromkeys(own.get(name, "none") for own in s.environments)) for name in names} for s in (a, b)]
    differ = [(name, facts[0][name], facts[1][name]) for name in names if facts[0][name] != facts[1][name]]
    counts = pd.crosstab(changes["study"], changes["change"])
    counts = counts.reindex(changes["study"].unique(), columns=[one.value for one in Change if one.value in counts])
    tables = {
        "Environments differ": pd.DataFrame(differ, columns=["fact", "A", "B"]),
        "Comparisons": counts.astype(str).reset_index(),
        "Changes for the worse": _shown(changes, REGRESSIONS),
        "Changes that cannot be tested": _shown(changes, (Change.UNKNOWN.value,)),
    }
    for title, rows in tables.items():
        if (table := printed(rows, title)) is not None:
            console.print(table)


def _shown(changes: pd.DataFrame, kinds: Sequence[str]) -> pd.DataFrame:
    """The first changes of some kinds, in their order, as text."""
    own = changes[changes["change"].isin(kinds)]
    own = own.assign(order=own["change"].map(kinds.index)).sort_values(["order", "ratio"], ascending=[True, False], kind="stable")
    lines = []
    for row in own.head(_MOST).to_dict("records"):
        times = Interval(row["ratio"], row["ratio_low"], row["ratio_high"], 0)
        has_ends = math.isfinite(times.low) and math.isfinite(times.high)
        figures = [significant(row["a"], 3), significant(row["b"], 3), times.text() if has_ends else significant(times.estimate)]
        figures.append(significant(row["p_adjusted"]))
        known = ["" if figure == "unknown" else figure for figure in figures]
        lines.append([row["study"], f"{row[TITLE]} {row['point']}".strip(), row["output"], *known, row["change"], row["note"]])
    if len(own) > _MOST:
        lines.append(["", f"and {len(own) - _MOST} more, which out=FOLDER writes to compare.csv", *[""] * 7])
    return pd.DataFrame(lines, columns=["study", "point", "output", "A", "B", "B / A", "adjusted p", "change", "note"])
