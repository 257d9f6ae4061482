"""Stored results as tidy tables: one row per replicate and comparison, one row per point."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from numdev.errors import BadInput
from numdev.measurement.deviation.measurement import COLUMNS as DEVIATION
from numdev.measurement.deviation.measurement import COUNTERS
from numdev.measurement.deviation.measurement import KIND as DEVIATION_KIND
from numdev.measurement.deviation.metrics import METRICS, NONFINITE
from numdev.report.reading.scenarios import ENTRY_ROLE, ROLE, SCENARIO, STANDS_FOR, TITLE
from numdev.report.reading.typed import Growing, flatten, typed
from numdev.results.columns import Column
from numdev.results.record import Record
from numdev.results.scenario import Scenario, is_old, scenarios_of
from numdev.results.store import Store

PLACE = ["study", SCENARIO, "key"]
COMPARISON = ["seed", "subject", "output", "reference"]
METRIC_NAMES = list(METRICS)
LABEL, COUNTER = "label.", "counter."
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
        rows: every row of the primary table of each point's record, and the columns of the point that stand for it. Of
            deviations one per (study, scenario, point, seed, subject, output, reference), with every metric; rows of a baseline
            repeat under every point of its problem; see `distinct`.
        points: one row per point of a study: how it ended, its labels, its configuration with dotted names, its
            counters as means over seeds, the number of its environment, and the seconds that it took.
        manifests: the studies' manifests by name.
        environments: the different environments, in the order in which points need them.
        missing: how many points of a study have no record yet.
        notes: what the reader should know: points missing, torn files.
        columns: what the records say of the columns of their tables, by name; those of `counters` with `counter.` in front.
    """

    rows: pd.DataFrame
    points: pd.DataFrame
    manifests: dict[str, dict[str, Any]]
    environments: list[dict[str, str]] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    columns: dict[str, Column] = field(default_factory=dict)

    def study(self, name: str) -> pd.DataFrame:
        """The rows of one study, scenarios in the order of the manifest."""
        return self.rows[self.rows["study"] == name]

    def scenarios(self, name: str) -> dict[str, Scenario]:
        """The scenarios of one study by name, in the order of the manifest."""
        return scenarios_of(self.manifests[name])


def load(store: Store, studies: Sequence[str] | None = None, *, kind: str | None = None) -> Results:
    """Read the points of some studies, or of all, of one kind of measurement or of every kind.

    The manifest decides which records belong to a study; keys hold the environment, so another one does not mix in.

    Raises:
        BadInput: if the store holds no study, or not the one asked for, or one that an older numdev stored.
    """
    manifests = _chosen(store, studies, kind)
    points: list[dict[str, Any]] = []
    rows = Growing()
    environments: list[dict[str, str]] = []
    missing: dict[str, int] = {}
    columns = {column.name: column for column in DEVIATION if kind in (None, DEVIATION_KIND)}
    for name, manifest in manifests.items():
        scenarios = scenarios_of(manifest)
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
            place = {"point": len(points), "study": name, SCENARIO: scenario.name, "key": point["key"]}
            place |= {TITLE: scenario.title, ROLE: scenario.role.value}
            place |= {STANDS_FOR: scenario.stands_for} if scenario.stands_for else {}
            place |= {f"{ENTRY_ROLE}{axis}": role for axis, role in point.get("roles", {}).items()}
            points.append(place | _facts(record, point["labels"], environments.index(record.environment)))
            for row in record.rows:
                rows.add({"point": place["point"]} | _row(row))
    table = typed(points, ["point", *PLACE, *_ALWAYS])
    return Results(
        rows=_rows(rows, table, [name for name in columns if not name.startswith(COUNTER)]),
        points=table.drop(columns="point"),
        manifests=manifests,
        environments=environments,
        missing=missing,
        notes=list(_notes(store, manifests, missing)),
        columns=columns,
    )


_COMMANDS = {
    "deviation": ("numdev report", "numdev measure study=fig3"),
    "speed": ("numdev speed", "numdev speed study=speed_cpu"),
}
"""What reports on a kind of measurement, and what makes such a study."""


def _chosen(store: Store, studies: Sequence[str] | None, kind: str | None) -> dict[str, dict[str, Any]]:
    manifests = store.studies()
    for name in studies or manifests:
        if name in manifests and is_old(manifests[name]):
            mend = f"it holds {name} as an older numdev stored it; run the study again, or give another folder"
            raise BadInput("results", str(store.path), mend)
    kept = {name: manifest for name, manifest in manifests.items() if kind in (None, manifest["kind"])}
    if not kept:
        torn = f"; {', '.join(str(path) for path in store.torn)} is torn" if store.torn else ""
        other = f" but {', '.join(manifests)}, {_on_which(manifests.values())}" if manifests else ""
        _, command = _COMMANDS.get(kind or "deviation", ("", f"numdev measure, by the kind {kind}"))
        mend = f"it holds no study{f' of {kind}' if kind else ''}{other}{torn}; measure one first, for example with: {command}"
        raise BadInput("results", str(store.path), mend)
    for name in studies or ():
        if name not in kept:
            also = f"; {name} is of the other kind, {_on_which([manifests[name]])}" if name in manifests else ""
            raise BadInput("studies", name, f"{store.path} holds {', '.join(kept)}{also}")
    return {name: kept[name] for name in studies or kept}


def _on_which(manifests: Iterable[Mapping[str, Any]]) -> str:
    kinds = dict.fromkeys(manifest["kind"] for manifest in manifests)
    readers = [_COMMANDS.get(kind, (f"a report of {kind}", ""))[0] for kind in kinds]
    return f"on which {' and '.join(readers)} reports"


def _distinct_points(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The points of a manifest, each once, however often a grid meets it."""
    return list({json.dumps(point, sort_keys=True): point for point in manifest["points"]}.values())


def _notes(store: Store, manifests: Mapping[str, Any], missing: Mapping[str, int]) -> Iterator[str]:
    for name, count in missing.items():
        of = len(manifests[name]["points"])
        yield f"{name}: {count} of {of} points are not measured yet; run the study again to finish it"
    for path in store.torn:
        yield f"{path} is torn and counts as not measured; run its study again"


def _facts(record: Record, labels: Mapping[str, Any], environment: int) -> dict[str, Any]:
    """The columns of a point."""
    config = flatten({name: part for name, part in record.config.items() if part is not None})
    facts: dict[str, Any] = {"kind": record.kind, "operation": record.operation, "environment": environment}
    facts |= {"status": record.status.value, "reason": record.reason}
    facts |= {f"{LABEL}{name}": value for name, value in labels.items()}
    facts |= {"attention": _attention(config), "kernel": record.kernel}
    facts |= {"format": _format(config), "policy": _policy(config), "tiling.area": _area(config)}
    facts |= {"pairing": _digest({name: record.config.get(name) for name in ("problem", "baseline")})}
    facts |= config
    return facts | _counters(record.table(COUNTERS)) | {"seconds": record.seconds}


def _counters(counters: list[dict[str, Any]]) -> dict[str, float]:
    """The mean over seeds of everything that the variant's runs counted."""
    names = [name for name in counters[0] if name != "seed"] if counters else []
    return {f"{COUNTER}{name}": math.fsum(seed[name] for seed in counters) / len(counters) for name in names}


def _format(config: Mapping[str, Any]) -> str:
    """The format of the output, `bf16` for `bf16:toward_zero`; that of the baseline where the variant does not say."""
    kernels = config.get("variant.fmt")
    output = config.get("variant.precision.output") or kernels or config.get("baseline.precision.output") or ""
    return str(output).partition(":")[0]


def _policy(config: Mapping[str, Any]) -> str:
    """`uniform` or `kernel` where the precision is such a preset, else its own name; compiled kernels are what they are."""
    if _attention(config) == "vanilla":
        return "eager"
    if config.get("variant.type") in ("Triton", "Sdpa", "Flex"):
        return "kernel"
    name = str(config.get("variant.precision.name") or "")
    if (name and name == _format(config)) or name.startswith("uniform_"):
        return "uniform"
    return "kernel" if name.startswith("kernel_") else name


def _attention(config: Mapping[str, Any]) -> str:
    """What was measured: `tiled`, `triton`, `sdpa flash`, or the kernel of ours that was asked for, `triton hopper`."""
    which = config.get("variant.backend") or config.get("variant.kernel")
    name = str(config.get("variant.kind") or config.get("variant.type", "")).lower()
    return f"{name} {which}" if which and which != "auto" else name


def _area(config: Mapping[str, Any]) -> int | None:
    """`Br * Bc`."""
    if "variant.tiling.br" not in config:
        return None
    return int(config["variant.tiling.br"]) * int(config["variant.tiling.bc"])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Of a table of plain cells: a list is its items."""
    return {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in row.items()}


def _rows(rows: Growing, points: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Rows with the columns of their point in front: labels, format, shapes, tiles and recurrence."""
    found = rows.typed(["point", *columns])
    if PRIMARY in found:  # a mask, also where there are no rows
        found[PRIMARY] = found[PRIMARY].astype(bool)
    kept = [name for name in points.columns if name in (*PLACE, TITLE, ROLE, STANDS_FOR) or _is_axis(name)]
    places = found.pop("point").to_numpy(dtype="int64")  # the points are numbered as they stand
    return pd.concat([points[kept].take(places).reset_index(drop=True), found], axis=1)


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


def _is_axis(name: str) -> bool:
    """Whether a column of a point is repeated in its rows; the others are found by the point's key."""
    return name.startswith(_AXES) and not name.endswith(("shape.type", "mask.type", "tiling.type"))


def is_broken(rows: pd.DataFrame) -> pd.Series[bool]:
    """Whether a comparison holds NaN, or Inf where the other side has none."""
    return rows[list(NONFINITE)].sum(axis=1) > 0


def distinct(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows without a baseline's repetitions: in a scenario it stands once per problem, under its first point."""
    same = ["study", SCENARIO, "pairing", *(name for name in COMPARISON if name in rows.columns)]
    repeated = (rows["subject"] == "baseline") & rows.duplicated(subset=same)
    return rows[~repeated]
