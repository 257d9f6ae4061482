"""Stored results as tidy tables: one row per replicate and comparison, one row per point."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from numdev.errors import BadInput
from numdev.measurement.deviation.measurement import COLUMNS as DEVIATION
from numdev.measurement.deviation.measurement import COUNTERS
from numdev.measurement.deviation.measurement import KIND as DEVIATION_KIND
from numdev.measurement.deviation.metrics import METRICS, NONFINITE
from numdev.report.reading import loose
from numdev.report.reading.derived import absent, derived
from numdev.report.reading.rows import Reading, Rows
from numdev.report.reading.scenarios import ENTRY_ROLE, ROLE, SCENARIO, STANDS_FOR, TITLE
from numdev.report.reading.typed import Growing, flatten
from numdev.results.manifest import Scenario, is_old, scenarios_of
from numdev.results.record import Column, Record
from numdev.results.store import Store

PLACE = ["study", SCENARIO, "key"]
COMPARISON = ["seed", "subject", "output", "reference"]
METRIC_NAMES = list(METRICS)
LABEL, COUNTER = "label.", "counter."
DEFAULTS = "defaults"  # the name of a point that states nothing
PRIMARY = "primary"  # whether a row is of the primary output
_ALWAYS = [
    TITLE,
    ROLE,
    "kind",
    "operation",
    "status",
    "reason",
    "environment",
    "attention",
    "kernel",
    "format",
    "policy",
    "tiling.area",
    "pairing",
    "problem.shape.keys",
    "seconds",
]


@dataclass(frozen=True)
class Results:
    """What a report is made from.

    Attributes:
        stored: every row of the primary table of each point's record, and the columns of the point that stand for it. Of
            deviations one per (study, scenario, point, seed, subject, output, reference), with every metric; rows of a baseline
            repeat under every point of its problem; see `distinct`. `rows` is the same as a table.
        points: one row per point of a study: how it ended, its labels, its configuration with dotted names, its
            counters as means over seeds, the number of its environment, and the seconds that it took.
        manifests: the studies' manifests by name.
        environments: the different environments, in the order in which points need them.
        missing: how many points of a study have no record yet.
        notes: what the reader should know: points missing, damaged files.
        columns: what the records say of the columns of their tables, by name; those of `counters` with `counter.` in front.
        further: rows of other tables of the records, by the table's name, with the columns of their point as in `rows`.
    """

    stored: Rows
    points: pd.DataFrame
    manifests: dict[str, dict[str, Any]]
    environments: list[dict[str, str]] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    columns: dict[str, Column] = field(default_factory=dict)
    further: dict[str, Rows] = field(default_factory=dict)

    @property
    def rows(self) -> pd.DataFrame:
        """The rows as a table, made anew at each call; of a large study `stored` makes the part of it that is wanted."""
        return self.stored.frame()

    def study(self, name: str, table: str = "") -> pd.DataFrame:
        """The rows of one study, scenarios in the order of the manifest; of a further table where one is named."""
        rows = self.further[table] if table else self.stored
        chosen = self.of_study(name, table)
        return rows.frame(None if len(chosen) == len(rows) else chosen)

    def of_study(self, name: str, table: str = "", own: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        """The numbers of the rows of one study; `own` as `Rows.where` takes it."""
        rows = self.further[table] if table else self.stored
        if "study" in rows.own:
            mine = (rows.own["study"] == name).to_numpy(dtype=bool)
            return rows.where(own=mine if own is None else mine & own)
        return rows.where(own, (rows.points["study"] == name).to_numpy(dtype=bool))

    def with_axes(self, axes: tuple[str, ...]) -> Results:
        """The same, but what the columns of a point begin with that stand in its rows."""
        points = self.points[_repeated(self.points, axes)]
        further = {name: replace(rows, points=points) for name, rows in self.further.items()}
        return replace(self, stored=replace(self.stored, points=points), further=further)

    def scenarios(self, name: str) -> dict[str, Scenario]:
        """The scenarios of one study by name, in the order of the manifest."""
        return scenarios_of(self.manifests[name])


def load(
    store: Store,
    studies: Sequence[str] | None = None,
    *,
    kind: str | None = None,
    tables: Sequence[str] = (),
    axes: tuple[str, ...] | None = None,
) -> Results:
    """Read the points of some studies, or of all, of one kind of measurement or of every kind.

    The manifest decides which records belong to a study; keys hold the environment, so another one does not mix in. `tables` are
    further tables of the records that are read too, `axes` what the columns of a point begin with that are repeated in its rows.

    Raises:
        BadInput: if the store holds no study, or not the one asked for, or one that an older numdev stored.
    """
    manifests = _chosen(store, studies, kind)
    points, rows = Growing(), Reading()
    environments: list[dict[str, str]] = []
    missing: dict[str, int] = {}
    columns = {column.name: column for column in DEVIATION if kind in (None, DEVIATION_KIND)}
    further = {name: _Further() for name in tables}
    for name, manifest in manifests.items():
        scenarios, lacking = scenarios_of(manifest), _lacking(manifest)
        for point in _distinct_points(manifest):
            record = store.get(point["key"])
            if record is None:
                missing[name] = missing.get(name, 0) + 1
                continue
            columns |= {column.name: column for column in record.primary}
            columns |= {f"{COUNTER}{column.name}": column for column in record.columns.get(COUNTERS, ())}
            if record.environment not in environments:
                environments.append(record.environment)
            scenario = scenarios[point["scenario"]]
            place = {"study": name, SCENARIO: scenario.name, "key": point["key"]}
            place |= {TITLE: scenario.title, ROLE: scenario.role.value}
            place |= {STANDS_FOR: scenario.stands_for} if scenario.stands_for else {}
            place |= {f"{ENTRY_ROLE}{axis}": role for axis, role in point.get("roles", {}).items()}
            points.add(place | _facts(record, point["labels"], environments.index(record.environment), lacking))
            rows.add(record.rows)
            for table in tables:
                further[table].columns |= {column.name: column for column in record.columns.get(table, ())}
                further[table].rows.add(record.table(table))
    everywhere = frozenset.intersection(*(_lacking(manifest) for manifest in manifests.values()))
    made = points.typed([*PLACE, *(name for name in _ALWAYS if name not in everywhere)])
    return Results(
        stored=_rows(rows, made, [name for name in columns if not name.startswith(COUNTER)], axes),
        points=made,
        manifests=manifests,
        environments=environments,
        missing=missing,
        notes=list(_notes(store, manifests, missing)),
        columns={name: column for each in further.values() for name, column in each.columns.items()} | columns,
        further={name: _rows(each.rows, made, list(each.columns), axes) for name, each in further.items()},
    )


def _lacking(manifest: Mapping[str, Any]) -> frozenset[str]:
    return absent(manifest.get("settings"))


@dataclass
class _Further:
    """A further table while it is read."""

    rows: Reading = field(default_factory=Reading)
    columns: dict[str, Column] = field(default_factory=dict)


_COMMANDS = {
    "deviation": ("numdev report", "numdev measure study=fig3"),
    "speed": ("numdev speed", "numdev speed study=speed_cpu"),
    "training": ("numdev report", "numdev train study=fig7"),
}
"""What reports on a kind of measurement, and what makes such a study."""


def _chosen(store: Store, studies: Sequence[str] | None, kind: str | None) -> dict[str, dict[str, Any]]:
    manifests = store.studies() or loose.manifests(store)
    for name in studies or manifests:
        if name in manifests and is_old(manifests[name]):
            mend = f"it holds {name} as an older numdev stored it; run the study again, or give another folder"
            raise BadInput("results", str(store.path), mend)
    kept = {name: manifest for name, manifest in manifests.items() if kind in (None, manifest["kind"])}
    if not kept:
        torn = f"; {', '.join(str(path) for path in store.torn)} is damaged" if store.torn else ""
        other = f" but {', '.join(manifests)}, {_on_which(manifests.values())}" if manifests else ""
        _, command = _COMMANDS.get(kind or "deviation", ("", f"numdev measure, by the kind {kind}"))
        mend = f"it holds no results{f' of {kind}' if kind else ''}{other}{torn}; measure one first, for example with: {command}"
        raise BadInput("results", str(store.path), mend)
    for name in studies or ():
        if name not in kept:
            also = f"; {name} is of the other kind, {_on_which([manifests[name]])}" if name in manifests else ""
            raise BadInput("studies", name, f"{store.path} holds {', '.join(kept)}{also}")
    return {name: kept[name] for name in studies or kept}


def _on_which(manifests: Iterable[Mapping[str, Any]]) -> str:
    kinds = dict.fromkeys(manifest["kind"] for manifest in manifests)
    readers = dict.fromkeys(_COMMANDS.get(kind, ("numdev report", ""))[0] for kind in kinds)
    return f"on which {' and '.join(readers)} reports"


def _distinct_points(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The points of a manifest, each once, however often a grid meets it."""
    whole = ((json.dumps(point, sort_keys=True).encode(), point) for point in manifest["points"])
    return list({hashlib.sha256(text).digest(): point for text, point in whole}.values())  # the texts take more than the points


def _notes(store: Store, manifests: Mapping[str, Any], missing: Mapping[str, int]) -> Iterator[str]:
    for name, count in missing.items():
        of = len(manifests[name]["points"])
        yield f"{name}: {count} of {of} points are not measured yet; run the study again to finish it"
    for path in store.torn:
        yield f"{path} is damaged and counts as not measured; run its study again"


def _facts(record: Record, labels: Mapping[str, Any], environment: int, lacking: frozenset[str]) -> dict[str, Any]:
    """The columns of a point, without those that its operation lacks."""
    config = flatten({name: part for name, part in record.config.items() if part is not None})
    facts: dict[str, Any] = {"kind": record.kind, "operation": record.operation, "environment": environment}
    facts |= {"status": record.status.value, "reason": record.reason}
    facts |= {f"{LABEL}{name}": value for name, value in labels.items()}
    facts |= derived(record.config, config, record.kernel, lacking) | config
    return facts | _counters(record.table(COUNTERS)) | {"seconds": record.seconds}


def _counters(counters: list[dict[str, Any]]) -> dict[str, float]:
    """The mean over seeds of everything that the variant's run counted on every one of them; a kernel counts nothing."""
    names = [name for name in counters[0] if name != "seed" and all(name in seed for seed in counters)] if counters else []
    return {f"{COUNTER}{name}": math.fsum(seed[name] for seed in counters) / len(counters) for name in names}


def _rows(rows: Reading, points: pd.DataFrame, columns: list[str], axes: tuple[str, ...] | None) -> Rows:
    """Rows with the columns of their point in front: labels, format, shapes, tiles and recurrence, unless `axes` names others."""
    found = rows.typed(columns, points[_repeated(points, axes or _AXES)])
    if PRIMARY in found.own:  # a mask, also where there are no rows
        found.own[PRIMARY] = found.own[PRIMARY].astype(bool)
    return found


def _repeated(points: pd.DataFrame, axes: tuple[str, ...]) -> list[str]:
    return [name for name in points.columns if name in (*PLACE, TITLE, ROLE, STANDS_FOR) or _is_axis(name, axes)]


_AXES = (
    LABEL,
    ENTRY_ROLE,
    "attention",
    "kernel",
    "format",
    "policy",
    "pairing",
    "problem.shape.",
    "problem.source.",
    "problem.mask.",
    "variant.type",
    "variant.precision.name",
    "variant.precision.output",
    "variant.tiling.",
    "variant.softmax.normalise",
    "variant.softmax.exp",
    "variant.recompute.",
    "variant.forward.precision.values",
    "variant.forward.precision.accumulator",
    "baseline.precision.name",
    "tiling.area",
)


def _is_axis(name: str, axes: tuple[str, ...]) -> bool:
    """Whether a column of a point is repeated in its rows; the others are found by the point's key."""
    return name.startswith(axes) and not name.endswith(("shape.type", "mask.type", "tiling.type"))


def is_broken(rows: pd.DataFrame) -> pd.Series[bool]:
    """Whether a comparison holds NaN, or Inf where the other side has none."""
    found = pd.Series(0.0, rows.index)
    for name in NONFINITE:  # one at a time: together they would be copied
        found = found + rows[name].fillna(0).astype(float) if name in rows else found
    return found > 0
