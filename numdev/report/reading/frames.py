"""Stored results as tidy tables: one row per replicate and comparison, one row per point."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from numdev.errors import BadInput
from numdev.measurement.deviation import METRICS, NONFINITE
from numdev.report.reading.scenarios import ENTRY_ROLE, ROLE, SCENARIO, STANDS_FOR, TITLE
from numdev.report.reading.typed import flatten, typed
from numdev.results.record import Record
from numdev.results.scenario import Scenario, is_old, scenarios_of
from numdev.results.store import Store

PLACE = ["study", SCENARIO, "key"]
COMPARISON = ["seed", "subject", "output", "reference"]
METRIC_NAMES = list(METRICS)
LABEL = "label."
CLUSTER = "cluster"  # of a replicate: see `numdev.attention.problem.Source.cluster`
_ALWAYS = [
    TITLE,
    ROLE,
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
        rows: one row per (study, scenario, point, seed, subject, output, reference), with every metric, and the columns
            of the point that stand for it. Rows of a baseline repeat under every point of its problem; see `distinct`.
        points: one row per point of a study: how it ended, its labels, its configuration with dotted names, its
            counters as means over seeds, the number of its environment, and the seconds that it took.
        manifests: the studies' manifests by name.
        environments: the different environments, in the order in which points need them.
        missing: how many points of a study have no record yet.
        notes: what the reader should know: points missing, torn files.
    """

    rows: pd.DataFrame
    points: pd.DataFrame
    manifests: dict[str, dict[str, Any]]
    environments: list[dict[str, str]] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def study(self, name: str) -> pd.DataFrame:
        """The rows of one study, scenarios in the order of the manifest."""
        return self.rows[self.rows["study"] == name]

    def scenarios(self, name: str) -> dict[str, Scenario]:
        """The scenarios of one study by name, in the order of the manifest."""
        return scenarios_of(self.manifests[name])


def load(store: Store, studies: Sequence[str] | None = None, *, timed: bool | None = None) -> Results:
    """Read the points of some studies, or of all.

    With `timed` those that `numdev speed` has timed, without it (False) those of deviations; None takes both.

    The manifest decides which records belong to a study; keys hold the environment, so another one does not mix in.

    Raises:
        BadInput: if the store holds no study, or not the one asked for, or one that an older numdev stored.
    """
    manifests = _chosen(store, studies, timed)
    points: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    environments: list[dict[str, str]] = []
    missing: dict[str, int] = {}
    for name, manifest in manifests.items():
        scenarios = scenarios_of(manifest)
        for point in _distinct_points(manifest):
            record = store.get(point["key"])
            if record is None:
                missing[name] = missing.get(name, 0) + 1
                continue
            if record.environment not in environments:
                environments.append(record.environment)
            scenario = scenarios[point["scenario"]]
            place = {"point": len(points), "study": name, SCENARIO: scenario.name, "key": point["key"]}
            place |= {TITLE: scenario.title, ROLE: scenario.role.value}
            place |= {STANDS_FOR: scenario.stands_for} if scenario.stands_for else {}
            place |= {f"{ENTRY_ROLE}{axis}": role for axis, role in point.get("roles", {}).items()}
            points.append(place | _facts(record, point["labels"], environments.index(record.environment)))
            rows += [{"point": place["point"]} | _row(row) for row in record.rows]
    table = typed(points, ["point", *PLACE, *_ALWAYS])
    return Results(
        rows=_rows(rows, table),
        points=table.drop(columns="point"),
        manifests=manifests,
        environments=environments,
        missing=missing,
        notes=list(_notes(store, manifests, missing)),
    )


def _chosen(store: Store, studies: Sequence[str] | None, timed: bool | None) -> dict[str, dict[str, Any]]:
    manifests = store.studies()
    kept = {name: manifest for name, manifest in manifests.items() if timed is None or is_timed(store, manifest) in (timed, None)}
    if not kept:
        torn = f"; {', '.join(str(path) for path in store.torn)} is torn" if store.torn else ""
        command = "numdev speed study=speed_cpu" if timed else "numdev measure study=fig3"
        other = f" but {', '.join(manifests)}, on which numdev {'report' if timed else 'speed'} reports" if manifests else ""
        mend = f"it holds no study{' of speed' if timed else ''}{other}{torn}; measure one first, for example with: {command}"
        raise BadInput("results", str(store.path), mend)
    for name in studies or ():
        if name not in kept:
            also = (
                f"; {name} is of the other kind: numdev speed reports on speed, numdev report on deviations"
                if name in manifests
                else ""
            )
            raise BadInput("studies", name, f"{store.path} holds {', '.join(kept)}{also}")
    chosen = {name: kept[name] for name in studies or kept}
    for name, manifest in chosen.items():
        if is_old(manifest):
            mend = f"it holds {name} as an older numdev stored it, without scenarios; run the study again, or give another folder"
            raise BadInput("results", str(store.path), mend)
    return chosen


def is_timed(store: Store, manifest: Mapping[str, Any]) -> bool | None:
    """Whether a study is one of speed; None where nothing of it is measured."""
    records = (store.get(point["key"]) for point in manifest["points"])
    return next(("timing" in record.config for record in records if record is not None), None)


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
    facts: dict[str, Any] = {"status": record.status.value, "reason": record.reason, "environment": environment}
    facts |= {f"{LABEL}{name}": value for name, value in labels.items()}
    facts |= {"attention": _attention(config), "kernel": record.kernel}
    facts |= {"format": _format(config), "policy": _policy(config), "tiling.area": _area(config)}
    facts |= {"pairing": _digest({name: record.config.get(name) for name in ("problem", "baseline")})}
    facts |= config
    return facts | _counters(record.counters) | {"seconds": record.seconds}


def _counters(counters: list[dict[str, Any]]) -> dict[str, float]:
    """The mean over seeds of everything that the variant's runs counted."""
    names = [name for name in counters[0] if name != "seed"] if counters else []
    return {f"counter.{name}": math.fsum(seed[name] for seed in counters) / len(counters) for name in names}


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
    return {**row, "max_index": " ".join(map(str, row.get("max_index", ())))}


def _rows(rows: list[dict[str, Any]], points: pd.DataFrame) -> pd.DataFrame:
    """Rows with the columns of their point in front: labels, format, shapes, tiles and recurrence."""
    found = typed(rows, ["point", "seed", CLUSTER, *COMPARISON[1:], *METRIC_NAMES, "max_index"])
    kept = [name for name in points.columns if name in (*PLACE, TITLE, ROLE, STANDS_FOR, "point") or _is_axis(name)]
    found[CLUSTER] = found[CLUSTER].fillna("")
    merged = points[kept].merge(found, on="point", how="inner", sort=False)
    return merged.drop(columns="point")


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
    "baseline.precision.name",
    "tiling.area",
)


def _is_axis(name: str) -> bool:
    """Whether a column of a point is repeated in its rows; the others are found by the point's key."""
    return name.startswith(_AXES) and not name.endswith(("shape.type", "mask.type", "tiling.type"))


def is_broken(rows: pd.DataFrame) -> pd.Series[bool]:
    """Whether a comparison holds NaN, or Inf where the other side has none."""
    held = [name for name in NONFINITE if name in rows]  # records of an older version count fewer kinds
    return rows[held].sum(axis=1) > 0


def distinct(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows without a baseline's repetitions: in a scenario it stands once per problem, under its first point."""
    same = ["study", SCENARIO, "pairing", *(name for name in COMPARISON if name in rows.columns)]
    repeated = (rows["subject"] == "baseline") & rows.duplicated(subset=same)
    return rows[~repeated]
