"""Stored results as tables, one row per point, and one per replicate and comparison; and their scenarios."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from numdev.errors import BadInput
from numdev.measurement.deviation import COLUMNS as DEVIATION_COLUMNS
from numdev.measurement.deviation import COUNTERS
from numdev.measurement.deviation import KIND as DEVIATION
from numdev.measurement.metrics import NONFINITE
from numdev.measurement.speed import derived
from numdev.results.record import DONE, Column, Record, Use
from numdev.results.store import Role, Scenario, Store
from numdev.settings import flat

SCENARIO, TITLE, ROLE, STANDS_FOR = "scenario", "scenario.title", "scenario.role", "scenario.stands_for"
LABEL = "label."  # before the name of an axis: the point's place on it
ENTRY_ROLE = "role."  # before the name of an axis: what the point's entry there is to the claims
PRIMARY = "primary"  # whether a row is of the primary output
ROLES = {
    Role.PAPER: "as the source states it",
    Role.ASSUMED: "our assumption",
    Role.BEYOND: "",
    Role.CONTROL: "control",
}
"""Words for the role of a scenario."""
FORMATS = ("e5m2", "e4m3fn", "bf16", "fp16", "tf32", "fp32", "fp64")  # from few mantissa bits to many
PLACE = ["study", SCENARIO, "key"]
COMPARISON = ["seed", "subject", "output", "reference"]
COUNTER = "counter."
DEFAULTS = "defaults"  # the name of a point that states nothing
_NAMED = 6  # places whose points are missing, that a sentence names

SPEED, TRAINING = "speed", "training"
SHIPPED = (DEVIATION, SPEED, TRAINING)
"""The kinds of measurement that ship with numdev; of any other only the columns of its records tell."""
LOSS, RUN, WATCH = "loss", "run", "watch"  # tables of training beside that of weights; the last of runs that are watched
WHOLE = "model"  # the name under which all weights together stand beside the tensors

TEXT = pd.StringDtype("python", na_value=np.nan)
"""Text that rows share: a row is a pointer of eight bytes, where pandas' own `str` has the text once more."""

_ALWAYS = [*PLACE, TITLE, ROLE, "kind", "operation", "status", "reason", "environment", "kernel", "format"]
_KINDS = ("label.", "role.", "problem.", "variant.", "baseline.", "seeds", "counter.", "seconds")  # of columns, in their order

_REPEATED = (
    *(LABEL, ENTRY_ROLE, "kernel", "pairing", "problem.shape.", "problem.source.", "problem.mask."),
    *("variant.type", "variant.precision.name", "variant.precision.output", "variant.tiling."),
    *("variant.softmax.normalise", "variant.softmax.exp", "variant.recompute."),
    *("variant.forward.precision.values", "variant.forward.precision.accumulator", "baseline.precision.name"),
)
"""Prefixes of the columns of a point that its rows repeat, beside its place and facts; points.csv has all columns."""


def scenarios_of(manifest: Mapping[str, Any]) -> dict[str, Scenario]:
    """The scenarios of a stored study, by name.

    A study whose points the command line changed is not what its source describes: all its scenarios lie beyond that.
    """
    scenarios = [Scenario(**own | {"role": Role(own["role"])}) for own in manifest["scenarios"]]
    if manifest["overrides"]:
        scenarios = [replace(own, role=Role.BEYOND) for own in scenarios]
    return {own.name: own for own in scenarios}


def with_overrides(text: str, manifest: Mapping[str, Any]) -> str:
    """A title or a source of a study, and what the command line changed of its points."""
    return f"{text}, with overrides: {' '.join(manifest['overrides'])}" if manifest["overrides"] else text


def ordered(rows: pd.DataFrame) -> list[Scenario]:
    """The scenarios of some rows by role, in the order of the rows within a role."""
    different = rows[[SCENARIO, TITLE, ROLE]].drop_duplicates().itertuples(index=False)
    return by_role(Scenario(str(name), str(title), Role(role)) for name, title, role in different)


def by_role(scenarios: Iterable[Scenario]) -> list[Scenario]:
    """Sorts scenarios: first those that stand for the source, then those beyond it, then controls; the sort is stable."""
    places = {role: place for place, role in enumerate(Role)}
    return sorted(scenarios, key=lambda scenario: places[scenario.role])


def is_sources(scenario: Scenario) -> bool:
    """Whether a scenario stands for what the source of a claim measured: as the source states it, or as we assume."""
    return scenario.role in (Role.PAPER, Role.ASSUMED)


def of_scenario(rows: pd.DataFrame, scenario: Scenario) -> pd.DataFrame:
    """The rows of one scenario."""
    return rows[rows[SCENARIO] == scenario.name]


def formats(rows: pd.DataFrame) -> list[str]:
    """The formats that occur, from the fewest mantissa bits to the most; formats unknown here last."""
    names = map(str, rows["format"].unique())
    return sorted(names, key=lambda name: (FORMATS.index(name) if name in FORMATS else len(FORMATS), name))


def compared(rows: pd.DataFrame, subject: str = "variant", reference: str = "") -> pd.DataFrame:
    """The rows of the primary output of one subject, against one reference where it is named."""
    own = rows[rows[PRIMARY].astype(bool) & (rows["subject"] == subject)]
    return own[own["reference"] == reference] if reference else own


@dataclass(frozen=True)
class Rows:
    """The rows of one table of some records; the columns of their points are joined to the part of them that is read."""

    points: pd.DataFrame  # a row for each point
    own: pd.DataFrame  # what the records say
    point: NDArray[np.int32]  # for each row, the place of its point in `points`

    def __len__(self) -> int:
        return len(self.own)

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self.points

    @property
    def columns(self) -> list[str]:
        """The names of the columns, those of the points first."""
        return list(dict.fromkeys(map(str, [*self.points.columns, *self.own.columns])))

    def frame(self, chosen: NDArray[Any] | None = None, names: Sequence[str] | None = None) -> pd.DataFrame:
        """A table of rows, those of a mask or at some places, and columns; of a name that both have, what the record says."""
        own = self.own if chosen is None else self.own.iloc[chosen]
        point = self.point if chosen is None else self.point[chosen]
        every = self.columns if names is None else names
        made = {n: own[n] if n in own else self.points[n].take(point).set_axis(own.index) for n in every}  # type: ignore[arg-type]
        return pd.DataFrame(made, index=own.index, columns=list(every), copy=False)

    def where(self, **values: Any) -> NDArray[np.bool_]:
        """Which rows have these values in these columns."""
        chosen = np.ones(len(self), dtype=np.bool_)
        for name, value in values.items():
            table = self.own if name in self.own else self.points
            equal = (table[name] == value).to_numpy(dtype=bool, na_value=False)
            chosen &= equal if table is self.own else equal[self.point]
        return chosen

    def is_repeated(self) -> NDArray[np.bool_]:
        """Which rows say again, under another point, what stands there: in a scenario a baseline counts once per problem."""
        baseline = self.where(subject="baseline")
        problem = self.points.groupby(["study", SCENARIO, "pairing"], sort=False, dropna=False).ngroup().to_numpy()
        own = self.own.loc[baseline, [name for name in COMPARISON if name in self.own]]
        repeated = np.zeros(len(self), dtype=np.bool_)
        repeated[baseline] = own.assign(problem=problem[self.point[baseline]]).duplicated()
        return repeated


@dataclass(frozen=True)
class Results:
    """The rows, points and manifests that a report is made from."""

    # The rows of the primary table of each point's record. Of deviations one per (study, scenario, point, seed, subject, output,
    # reference), with every metric; rows of a baseline repeat under every point of its problem
    primary: Rows
    # One row per point of a study: how it ended, its labels, its configuration with dotted names and what follows from it, its
    # counters as means over seeds, the number of its environment, and the seconds that it took
    points: pd.DataFrame
    manifests: dict[str, dict[str, Any]]  # the studies' manifests by name
    # The different environments, in the order in which points need them
    environments: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what the reader should know: points missing, damaged files
    # What the records say of the columns of their tables, by name; those of `counters` with `counter.` in front
    columns: dict[str, Column] = field(default_factory=dict)
    # Rows of other tables of the records by the table's name; none of deviations and of speed
    further: dict[str, Rows] = field(default_factory=dict)
    facts: tuple[str, ...] = ()  # the columns that follow from configurations
    missing: dict[tuple[str, str], str] = field(default_factory=dict)  # what a study's scenario lacks, in words; none if complete

    @property
    def kind(self) -> str:
        """The kind of measurement, of results of one kind."""
        return str(next(iter(self.manifests.values()))["kind"])

    @property
    def rows(self) -> pd.DataFrame:
        """The primary rows as a table, made anew at each call."""
        return self.primary.frame()

    def study(self, name: str, table: str = "") -> pd.DataFrame:
        """The rows of one study, scenarios in the order of the manifest; of a further table where one is named."""
        rows = self.further[table] if table else self.primary
        return rows.frame(rows.where(study=name))

    def repeats(self, name: str) -> bool:
        """Whether a column of a point stands in the files of its rows; by the settings of training no row is told apart."""
        if self.kind == TRAINING:
            return name in PLACE or name.startswith((LABEL, ENTRY_ROLE))
        always = (*PLACE, TITLE, ROLE, STANDS_FOR, "format", *self.facts)
        return name in always or (name.startswith(_REPEATED) and not name.endswith(("shape.type", "mask.type", "tiling.type")))

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
    points, primary = _Table(), _Table()
    further = {name: _Table() for name in (LOSS, RUN, WATCH) if kind == TRAINING}
    environments: list[dict[str, str]] = []
    notes: list[str] = []
    facts: dict[str, None] = {}
    gaps: dict[tuple[str, str], str] = {}
    columns = {column.name: column for column in DEVIATION_COLUMNS if kind in (None, DEVIATION)}
    for name, manifest in manifests.items():
        scenarios, missing = scenarios_of(manifest), dict[str, list[dict[str, Any]]]()
        for own in _by_place(manifest["points"]):
            stored = [store.get(one["key"]) for one in own]
            for one, held in zip(own, stored, strict=True):
                if held is None or held.status not in DONE:
                    missing.setdefault(one["scenario"], []).append(one)
            point = own[0]
            if not (records := [held for held in stored if held is not None]):
                continue
            record = Record.joined(records)
            columns |= {column.name: column for column in record.primary}
            columns |= {f"{COUNTER}{column.name}": column for column in record.columns.get(COUNTERS, ())}
            facts |= dict.fromkeys(record.facts)
            for each in records:
                if each.environment not in environments:
                    environments.append(each.environment)
            scenario = scenarios[point["scenario"]]
            place = {"study": name, SCENARIO: scenario.name, "key": record.key, TITLE: scenario.title, ROLE: scenario.role.value}
            place |= {STANDS_FOR: scenario.stands_for} if scenario.stands_for else {}
            place |= {f"{ENTRY_ROLE}{axis}": role for axis, role in point.get("roles", {}).items()}
            place |= {f"{LABEL}{axis}": value for axis, value in point["labels"].items()}
            number = points.extend([place | _of_record(record) | {"environment": environments.index(record.environment)}])
            measured = record.rows
            if record.kind == SPEED:  # an operation need not say how many operations it takes
                measured = [derived(row) if row.get("operations") is not None else row for row in measured]
            primary.extend(measured, number)
            for table in list(record.columns)[1:] if record.kind not in (DEVIATION, SPEED) else ():
                rows = further.setdefault(table, _Table())
                rows.columns |= {column.name: column for column in record.columns[table]}
                rows.extend(record.table(table), number)
        counts = Counter(one["scenario"] for one in manifest["points"])
        gaps |= {(name, scenario): _missing(own, counts[scenario]) for scenario, own in missing.items()}
        if every := [one for own in missing.values() for one in own]:
            notes.append(f"{name}: {_missing(every, counts.total())}; run the study again to finish it")
    made = points.frame([*_ALWAYS, *facts, "pairing", "seconds"])
    return Results(
        primary=primary.rows([name for name in columns if not name.startswith(COUNTER)], made),
        points=made,
        manifests=manifests,
        environments=environments,
        notes=notes + [f"{path} is damaged and counts as not measured; run its study again" for path in store.torn],
        columns={name: column for each in further.values() for name, column in each.columns.items()} | columns,
        further={name: each.rows(list(each.columns), made) for name, each in further.items()},
        facts=tuple(facts),
        missing=gaps,
    )


def _by_place(points: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The points of a manifest, each once though a grid may meet it again; single replicates of one place stand together."""
    places: dict[str, dict[Any, dict[str, Any]]] = {}
    for one in points:
        place = {name: value for name, value in one.items() if "replicate" not in one or name not in ("key", "replicate")}
        places.setdefault(json.dumps(place, sort_keys=True), {})[one.get("replicate")] = one
    return [[*own.values()] for own in places.values()]


def _missing(points: Sequence[dict[str, Any]], count: int) -> str:
    """The sentence on points that are not measured, of `count`, without its end."""
    places: dict[str, list[str]] = {}
    for one in points:
        own = places.setdefault(", ".join(map(str, one["labels"].values())) or DEFAULTS, [])
        own += [str(one["replicate"])] if "replicate" in one else []
    listed = [f"{name} (seed{'s' * (len(own) > 1)} {', '.join(own)})" if own else name for name, own in places.items()]
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return f"{len(points)} of {count} points are not measured yet: {'; '.join(listed[:_NAMED])}{more}"


_COMMANDS = {DEVIATION: "numdev measure study=fig3", SPEED: "numdev speed study=speed_cpu", TRAINING: "numdev train study=fig7"}
"""A command that makes a study of a kind of measurement."""


def _chosen(store: Store, studies: Sequence[str] | None, kind: str | None) -> dict[str, dict[str, Any]]:
    manifests = store.studies()
    for name in studies or manifests:
        if name in manifests and not {"scenarios", "overrides", "kind", "swept"} <= manifests[name].keys():
            hint = f"it holds {name} as an older numdev stored it; run the study again, or give another folder"
            raise BadInput("results", str(store.path), hint)
    kept = {name: manifest for name, manifest in manifests.items() if kind in (None, manifest["kind"])}
    if not kept:
        torn = f"; {', '.join(map(str, store.torn))} is damaged" if store.torn else ""
        of = f" of {kind}" if kind else ""
        kinds = " and ".join(dict.fromkeys(str(manifest["kind"]) for manifest in manifests.values()))
        other = f" but {', '.join(manifests)} of {kinds}" if manifests else ""
        command = _COMMANDS.get(kind or DEVIATION, f"numdev measure, by the kind {kind}")
        hint = f"it holds no results{of}{other}{torn}; measure one first, for example with: {command}"
        raise BadInput("results", str(store.path), hint)
    for name in studies or ():
        if name not in kept:
            also = f"; {name} is of the kind {manifests[name]['kind']}" if name in manifests else ""
            raise BadInput("study", name, f"{store.path} holds {', '.join(kept)}{also}")
    return {name: kept[name] for name in studies or kept}


def _of_record(record: Record) -> dict[str, Any]:
    """The columns of a point that its record states; `pairing` is equal where problem and baseline are."""
    facts: dict[str, Any] = {"kind": record.kind, "operation": record.operation, "status": record.status.value}
    pair = json.dumps({name: record.config.get(name) for name in ("problem", "baseline")}, sort_keys=True)
    facts |= {"reason": record.reason, "kernel": record.kernel, "format": "", **record.facts}
    facts |= {"pairing": hashlib.sha256(pair.encode()).hexdigest()[:12]}
    facts |= flatten({name: part for name, part in record.config.items() if part is not None})
    counters = record.table(COUNTERS)
    names = [name for name in counters[0] if name != "seed" and all(name in seed for seed in counters)] if counters else []
    facts |= {f"{COUNTER}{name}": math.fsum(seed[name] for seed in counters) / len(counters) for name in names}
    return facts | {"seconds": record.seconds}


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a configuration by their dotted names; a list is JSON text."""
    return {name: json.dumps(value) if isinstance(value, list) else value for name, value in flat(config)}


_CHUNK = 1 << 12


class _Table:
    """A table that grows by rows. Chunks of them are packed: a million dictionaries take gigabytes."""

    def __init__(self) -> None:
        self.columns: dict[str, Column] = {}
        self._last: list[Mapping[str, Any]] = []
        self._chunks: list[pd.DataFrame] = []
        self._points: list[int] = []

    def extend(self, rows: Iterable[Mapping[str, Any]], point: int = 0) -> int:
        """Append rows of a point; a list in a cell becomes the text of its items. Returns the number of the last row."""
        made = [{name: " ".join(map(str, v)) if type(v) is list else v for name, v in row.items()} for row in rows]
        self._last += made
        self._points += [point] * len(made)
        if len(self._last) >= _CHUNK:
            self._pack()
        return len(self._points) - 1

    def _pack(self) -> None:
        if not self._last:
            return
        names = dict.fromkeys(name for row in self._last for name in row)
        columns = {name: column_of_values([row.get(name) for row in self._last]) for name in names}
        self._chunks.append(pd.DataFrame(columns, index=range(len(self._last))))
        self._last = []

    def frame(self, columns: Iterable[str]) -> pd.DataFrame:
        """Makes the table. It has at least these columns; they come first among those of their kind, and each has one type."""
        self._pack()
        names = list(dict.fromkeys([*columns, *(str(name) for chunk in self._chunks for name in chunk)]))
        kind = {name: next((i for i, start in enumerate(_KINDS, 1) if name.startswith(start)), 0) for name in names}
        columns = sorted(names, key=kind.__getitem__)
        return pd.DataFrame({name: self._whole(name) for name in columns}, range(len(self._points)), columns, copy=False)

    def _whole(self, name: str) -> pd.Series[Any]:
        """A column from its chunks, which are dropped; those that lack it are missing."""
        parts = [chunk.pop(name) if name in chunk else pd.Series(None, chunk.index, dtype=object) for chunk in self._chunks]
        kinds = {part.dtype for part in parts}
        if len(kinds) == 1 and np.dtype(object) not in kinds:
            return pd.concat(parts, ignore_index=True)
        values: list[Any] = []
        for part in parts:
            cells = part.tolist()
            values += cells if part.dtype == np.float64 else [None if pd.isna(cell) else cell for cell in cells]
        return column_of_values(values)

    def rows(self, columns: Iterable[str], points: pd.DataFrame) -> Rows:
        own = self.frame(columns)
        if PRIMARY in own:  # a mask, also where there are no rows; the rows of a kind that has no outputs are primary
            own[PRIMARY] = own[PRIMARY].ne(other=False).fillna(value=True).astype(bool)
        return Rows(points, own, np.array(self._points, dtype=np.int32))


def column_of_values(values: Sequence[Any]) -> pd.Series[Any]:
    """Makes a column: numbers stay numbers, integers with gaps become nullable integers, mixed values become text."""
    kinds = {type(value) for value in values}
    kinds.discard(NoneType)
    if kinds and kinds <= {bool, int, float}:
        integers = "Int64" if None in values else "int64"
        dtype: Any = "boolean" if kinds == {bool} else "float64" if float in kinds else integers
        return pd.Series(values, dtype=dtype)
    shared: dict[str, str] = {}
    texts = [None if value is None else shared.setdefault(text := str(value), text) for value in values]
    return pd.Series(np.array(texts, dtype=object), dtype=TEXT)


def is_broken(rows: pd.DataFrame) -> pd.Series[bool]:
    """Whether a comparison holds NaN, or Inf where the other side has none."""
    return (rows[[name for name in NONFINITE if name in rows]].astype(float) > 0).any(axis=1)  # a missing count is not above 0


def is_own(manifests: Iterable[Mapping[str, Any]]) -> bool:
    """Whether all of some studies are of kinds of the user's own."""
    return all(manifest["kind"] not in SHIPPED for manifest in manifests)


def places_of(columns: Mapping[str, Column], rows: pd.DataFrame) -> list[str]:
    """The columns that tell the rows of one replicate apart; of deviations but those of the comparison."""
    names = [column.name for column in _present(columns, rows, Use.PLACE)]
    others = {"seed", "cluster", *(COMPARISON if "subject" in names else ())}
    return [name for name in names if name not in others]


def figures_of(columns: Mapping[str, Column], rows: pd.DataFrame) -> list[Column]:
    """The columns of figures, the chief ones first."""
    declared = [*_present(columns, rows, Use.CHIEF), *_present(columns, rows, Use.FIGURE)]
    return [column for column in declared if pd.api.types.is_numeric_dtype(rows[column.name])]


def _present(columns: Mapping[str, Column], rows: pd.DataFrame, use: Use) -> list[Column]:
    own = [column for column in columns.values() if column.use is use and column.name in rows]
    return [column for column in own if rows[column.name].notna().any()]
