"""A study: many points under one question, measured in one job, resumable."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from numdev.errors import BadInput
from numdev.results.claim import ClaimStatement, named
from numdev.results.record import BAD_OUTPUT, Column, Status, Where, describe, plain
from numdev.results.store import EntryRole, Scenario, Store, manifest_of, stored_point

DONE = (Status.OK, *BAD_OUTPUT, Status.UNSUPPORTED)  # what a resumed study does not measure again


@dataclass(frozen=True)
class Refused:
    """Replaces a variant of a `kind` that does not read what is said of it; `stated` has that, which tells points apart."""

    kind: str
    stated: str


@dataclass(frozen=True)
class StudyPoint:
    """One point of a study: what `Runner.measure` takes, and its place."""

    problem: Any
    variant: Any
    baseline: Any
    seeds: int
    scenario: str = "default"  # the name of the circumstances; a claim is judged once in each
    labels: dict[str, Any] = field(default_factory=dict)  # its place on the axes, for tables and figures
    refused: str = ""  # why it cannot be measured as stated: it is recorded as unsupported, and its variant never runs
    roles: Mapping[str, EntryRole] = field(default_factory=dict)  # of its entries in claims; of an axis not listed: subject

    @property
    def parts(self) -> tuple[Any, Any, Any, int]:
        """The arguments of `Runner.measure`."""
        return self.problem, self.variant, self.baseline, self.seeds

    def text(self) -> str:
        """Scenario and labels in one line."""
        return " ".join([self.scenario, *(f"{name}={value}" for name, value in self.labels.items())])


@dataclass(frozen=True)
class Study:
    """Named points under one question."""

    name: str  # of the study, and of its manifest in a store
    title: str  # what it shows, in one line
    figure: str | None = None  # the figure function that draws it
    claims: tuple[str | ClaimStatement, ...] = ()  # in the order of the table: names of claims that ship, and its own
    points: tuple[StudyPoint, ...] = ()  # in the order of the grid
    more: tuple[str, ...] = ()  # further figures of the same rows
    command: str = ""  # what measures it again, but for the device
    scenarios: tuple[Scenario, ...] = ()  # of the points; one not listed has its name for a title, and lies beyond the source
    overrides: tuple[str, ...] = ()  # what the command line stated that gave the study points which its file does not have
    words: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # word and unit of the axes by name, for figures
    question: str = ""  # what it asks, in words
    plot: Mapping[str, Any] | None = None  # what its figure shows by key, such as `x`; None where `figure` or nothing says it
    # Further parts of its section of the report, as its file has them: `place` among the sections, on what it was `measured`,
    # what the `source` says, and `figures` by name with the function that draws each.
    section: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # titles of the scenarios of its file that the command line left out

    def manifest(self, keys: Sequence[str], kind: str, settings: Iterable[Column] = ()) -> dict[str, Any]:
        """Which points belong to the study, how they are measured, and what their settings mean: what the report reads."""
        known = {scenario.name: scenario for scenario in self.scenarios}
        names = dict.fromkeys(point.scenario for point in self.points)
        claims = named(self.name, self.claims)
        points = [
            stored_point(key, describe(point.labels), scenario=point.scenario, roles=describe(point.roles))
            for key, point in zip(keys, self.points, strict=True)
        ]
        own = {name: getattr(self, name) for name in ("question", "command", "overrides", "figure", "more", "plot", "words")}
        own |= {"claims": list(claims), "scenarios": [plain(known.get(name, Scenario(name, name))) for name in names]}
        own["stated_claims"] = {name: plain(claim) for name, claim in claims.items() if claim is not None}
        own["settings"] = {column.name: [column.unit, column.meaning] for column in settings}
        return manifest_of(self.name, kind, self.title, points, **describe(own), **self.section)


@dataclass(frozen=True)
class Shard:
    """The part `index` of `count` of a study's distinct points."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise BadInput("shard", self.index, f"give a number from 0 to shards - 1, which is {self.count - 1}")


@dataclass(frozen=True)
class PointEnded:
    """How a point ended, and how long that took now: not at all if its record `was_there`."""

    status: Status
    reason: str
    seconds: float = 0.0
    was_there: bool = True


@dataclass
class Outcome:
    """Counts of what a run of a study did."""

    measured: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: list[tuple[str, Status, str]] = field(default_factory=list)  # the point's text, how it ended, why

    def add(self, point: StudyPoint, ended: PointEnded) -> None:
        """Count one more point."""
        self.skipped += ended.was_there
        self.measured += not ended.was_there
        self.seconds += ended.seconds
        if ended.status is not Status.OK:
            self.failures.append((point.text(), ended.status, ended.reason))

    @property
    def has_errors(self) -> bool:
        return Status.ERROR in self.statuses

    @property
    def statuses(self) -> list[Status]:
        """How each point ended."""
        ended = [status for _, status, _ in self.failures]
        return [Status.OK] * (self.measured + self.skipped - len(ended)) + ended


def keys_of(study: Study, bench: Any) -> list[str]:
    """The key of each point of a study, in their order; `bench` is a `numdev.measurement.runner.Runner`, which measures them."""
    return [bench.key(*point.parts) for point in study.points]


Progress = Callable[[int, int, StudyPoint], None]  # points done, points in all, the point that comes next


def run(
    study: Study,
    bench: Any,
    store: Store,
    *,
    fresh: bool = False,
    shard: Shard | None = None,
    progress: Progress | None = None,
    keys: Sequence[str] | None = None,
    **where: Unpack[Where],
) -> Outcome:
    """Measure the points of a study that the store does not have yet; of `where` the caller may give `on_replicate` and `within`.

    Points of one problem are measured together, so that golden and inputs are computed once for them. A point that fails is
    listed in the outcome and stops no other; one that ended in `error` or `out_of_memory` is tried again by the next run.
    `keys` are those of the points, where they are at hand.
    """
    outcome, work = Outcome(), begin(study, bench, store, shard, keys)
    for done, (key, point) in enumerate(work):
        if progress is not None:
            progress(done, len(work), point)
        outcome.add(point, (None if fresh else stored(store, key)) or measured(point, bench, store, key, where))
    return outcome


def begin(
    study: Study, bench: Any, store: Store, shard: Shard | None = None, keys: Sequence[str] | None = None
) -> list[tuple[str, StudyPoint]]:
    """Write the manifest of a study; returns its distinct points of a shard, those of one problem together."""
    keys = keys_of(study, bench) if keys is None else keys
    store.put_study(study.name, study.manifest(keys, bench.kind_name, bench.settings))
    return points_of(study, keys, shard or Shard())


def points_of(study: Study, keys: Sequence[str], shard: Shard) -> list[tuple[str, StudyPoint]]:
    """The distinct points of a shard with their keys, those of one problem together."""
    points = dict(zip(keys, study.points, strict=True))
    first: dict[Any, int] = {}
    for point in points.values():
        first.setdefault(point.problem, len(first))
    return sorted(points.items(), key=lambda item: first[item[1].problem])[shard.index :: shard.count]


def stored(store: Store, key: str) -> PointEnded | None:
    """How a point of the store ended; None for one that is to be measured."""
    record = store.get(key)
    if record is None or record.status not in DONE:
        return None
    return PointEnded(record.status, record.reason)


def measured(point: StudyPoint, bench: Any, store: Store, key: str, where: Where) -> PointEnded:
    """Measure a point and store its record; a request that cannot be measured is a failed point, and the others go on."""
    if point.refused:
        record = bench.without_figures(point.parts, Status.UNSUPPORTED, point.refused)
    else:
        try:
            folders: Where = {"folder": store.work(key), "shared": store.shared}
            record = bench.measure(*point.parts, **(where | folders))
        except BadInput as error:
            record = bench.without_figures(point.parts, Status.ERROR, str(error))
    store.put(record)
    shutil.rmtree(store.work(key), ignore_errors=True)
    return PointEnded(record.status, record.reason, record.seconds, was_there=False)
