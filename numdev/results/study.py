"""A study: many points under one question, measured in one job, resumable."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, Unpack, runtime_checkable

from numdev.errors import BadInput
from numdev.results.canonical import describe
from numdev.results.claim import StatedClaim, named
from numdev.results.columns import Column
from numdev.results.record import BAD_OUTPUT, Record, Status
from numdev.results.scenario import EntryRole, Scenario
from numdev.results.store import Store
from numdev.results.where import Where

DONE = (Status.OK, *BAD_OUTPUT, Status.UNSUPPORTED)  # what a resumed study does not measure again


@dataclass(frozen=True)
class Refused:
    """Replaces a variant that does not read what is stated about it.

    Attributes:
        kind: of the variant.
        stated: everything that is stated, which distinguishes the points of a grid.
    """

    kind: str
    stated: str


@dataclass(frozen=True)
class StudyPoint:
    """One point of a study.

    Attributes:
        problem, variant, baseline, seeds: what `Runner.measure` takes.
        scenario: the name of the circumstances; a claim is judged once in each.
        labels: the point's place on the study's axes, for tables and figures.
        refused: why it cannot be measured as it is stated; such a point is recorded as unsupported and its variant never runs.
        roles: what the point's entries are to the claims, by axis; an axis that is not listed has a subject there.
    """

    problem: Any
    variant: Any
    baseline: Any
    seeds: int
    scenario: str = "default"
    labels: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    roles: Mapping[str, EntryRole] = field(default_factory=dict)

    def text(self) -> str:
        """Scenario and labels in one line."""
        return " ".join([self.scenario, *(f"{name}={value}" for name, value in self.labels.items())])


@dataclass(frozen=True)
class Study:
    """Named points.

    Attributes:
        name: of the study, and of its manifest in a store.
        title: what it shows, in one line.
        figure: the figure function that draws it, or None.
        claims: that it serves, in the order of the table: names of claims that ship with numdev, and claims of its own.
        points: in the order of the grid.
        more: further figures of the same rows.
        command: what measures it again, but for the device.
        scenarios: those of the points; one that is not listed has its name for a title, and lies beyond the source.
        overrides: what the command line stated that gave the study points which its file does not have.
        words: word and unit of the axes by name, for figures.
        question: what it asks, in words.
        plot: what its figure shows by key, such as `x` and `y`; None where `figure` says it, or nothing does.
        left_out: titles of the scenarios of its file that the command line left out.
    """

    name: str
    title: str
    figure: str | None = None
    claims: tuple[str | StatedClaim, ...] = ()
    points: tuple[StudyPoint, ...] = ()
    more: tuple[str, ...] = ()
    command: str = ""
    scenarios: tuple[Scenario, ...] = ()
    overrides: tuple[str, ...] = ()
    words: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    question: str = ""
    plot: Mapping[str, Any] | None = None
    left_out: tuple[str, ...] = ()

    def manifest(self, keys: Sequence[str], kind: str, settings: Iterable[Column] = ()) -> dict[str, Any]:
        """Which points belong to the study, how they are measured, and what their settings mean: what the report reads."""
        points = [
            {
                "key": key,
                "scenario": point.scenario,
                "labels": describe(point.labels),
                "roles": {axis: role.value for axis, role in point.roles.items()},
            }
            for key, point in zip(keys, self.points, strict=True)
        ]
        known = {scenario.name: scenario for scenario in self.scenarios}
        found = [known.get(name, Scenario(name, name)) for name in dict.fromkeys(point.scenario for point in self.points)]
        claims = named(self.name, self.claims)
        return {
            "name": self.name,
            "kind": kind,
            "title": self.title,
            "question": self.question,
            "command": self.command,
            "overrides": list(self.overrides),
            "figure": self.figure,
            "more": list(self.more),
            "plot": None if self.plot is None else dict(self.plot),
            "claims": list(claims),
            "stated_claims": {name: claim.stated() for name, claim in claims.items() if claim is not None},
            "scenarios": [one.stated() for one in found],
            "settings": {column.name: [column.unit, column.meaning] for column in settings},
            "words": {name: list(said) for name, said in self.words.items()},
            "points": points,
        }


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
    """How a point ended, by which kernel, and how long that took now: not at all if its record `was_there`."""

    status: Status
    reason: str
    seconds: float = 0.0
    was_there: bool = True
    kernel: str = ""


@dataclass
class Outcome:
    """What a run of a study did."""

    measured: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: list[tuple[str, Status, str]] = field(default_factory=list)  # the point's text, how it ended, why
    kernels: list[str] = field(default_factory=list)  # of each point, as its record has it

    def add(self, point: StudyPoint, ended: PointEnded) -> None:
        """Count one more point."""
        self.skipped += ended.was_there
        self.measured += not ended.was_there
        self.seconds += ended.seconds
        self.kernels.append(ended.kernel)
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


@runtime_checkable
class Measures(Protocol):
    """What measures the points of a study and names their records; see `numdev.measurement.runner.Runner`."""

    @property
    def kind_name(self) -> str: ...
    @property
    def settings(self) -> tuple[Column, ...]: ...
    def key(self, problem: Any, variant: Any, baseline: Any, seeds: int) -> str: ...
    def config(self, problem: Any, variant: Any, baseline: Any, seeds: int) -> dict[str, Any]: ...
    def measure(self, problem: Any, variant: Any, baseline: Any, seeds: int, **where: Unpack[Where]) -> Record: ...
    def without_figures(self, point: tuple[Any, Any, Any, int], status: Status, reason: str) -> Record: ...
    def announce(self, points: Iterable[tuple[Any, Any]]) -> None:
        """Problem and variant of what will be measured, in this order."""
        ...


def keys_of(study: Study, bench: Measures) -> list[str]:
    """The key of each point of a study, in their order: what `run` and `replaced` take, so that a command computes them once."""
    return [bench.key(point.problem, point.variant, point.baseline, point.seeds) for point in study.points]


Progress = Callable[[int, int, StudyPoint], None]  # points done, points in all, the point that comes next


def run(
    study: Study,
    bench: Measures,
    store: Store,
    *,
    fresh: bool = False,
    shard: Shard | None = None,
    progress: Progress | None = None,
    keys: Sequence[str] | None = None,
    **where: Unpack[Where],
) -> Outcome:
    """Measure the points of a study that the store does not have yet; of `where` the caller may give `told` and `within`.

    Points of one problem are measured together, so that golden and inputs are computed once for them. A point that fails is
    listed in the outcome and stops no other; one that ended in `error` or `out_of_memory` is tried again by the next run.
    `keys` are those of the points, where they are at hand.
    """
    work, outcome, seen = begin(study, bench, store, shard, keys), Outcome(), dict[str, PointEnded]()

    def ended(key: str) -> PointEnded | None:
        """How a point ended, from one reading of its record; one that lacks may come from another process in the meantime."""
        if not fresh and key not in seen and (found := stored(store, key)) is not None:
            seen[key] = found
        return seen.get(key)

    wanted = ((key, point) for key, point in work if not point.refused)
    bench.announce((point.problem, point.variant) for key, point in wanted if ended(key) is None)
    for done, (key, point) in enumerate(work):
        if progress is not None:
            progress(done, len(work), point)
        outcome.add(point, ended(key) or measured(point, bench, store, key, where))
        seen.pop(key, None)
    return outcome


def begin(
    study: Study, bench: Measures, store: Store, shard: Shard | None = None, keys: Sequence[str] | None = None
) -> list[tuple[str, StudyPoint]]:
    """Write the manifest of a study; returns its distinct points of a shard, those of one problem together."""
    shard, keys = shard or Shard(), keys_of(study, bench) if keys is None else keys
    store.put_study(study.name, study.manifest(keys, bench.kind_name, bench.settings))
    return _by_problem(dict(zip(keys, study.points, strict=True)))[shard.index :: shard.count]


def stored(store: Store, key: str) -> PointEnded | None:
    """How a point of the store ended; None for one that is to be measured."""
    record = store.get(key)
    return PointEnded(record.status, record.reason, kernel=record.kernel) if _is_done(record) else None


def measured(point: StudyPoint, bench: Measures, store: Store, key: str, where: Where) -> PointEnded:
    """Measure a point and store its record."""
    record = _measure(bench, point, {**where, "folder": store.work(key), "shared": store.shared})
    store.put(record)
    shutil.rmtree(store.work(key), ignore_errors=True)
    return PointEnded(record.status, record.reason, record.seconds, was_there=False, kernel=record.kernel)


def _is_done(record: Record | None) -> TypeGuard[Record]:
    return record is not None and record.status in DONE


def _measure(bench: Measures, point: StudyPoint, where: Where) -> Record:
    """A point's record; a request that cannot be measured is a failed point here, and the others go on."""
    parts = point.problem, point.variant, point.baseline, point.seeds
    if point.refused:
        return bench.without_figures(parts, Status.UNSUPPORTED, point.refused)
    try:
        return bench.measure(*parts, **where)
    except BadInput as error:
        return bench.without_figures(parts, Status.ERROR, str(error))


def _by_problem(points: dict[str, StudyPoint]) -> list[tuple[str, StudyPoint]]:
    """Distinct points, those of one problem together, in the order in which problems and points first appear."""
    first: dict[Any, int] = {}
    for point in points.values():
        first.setdefault(point.problem, len(first))
    return sorted(points.items(), key=lambda item: first[item[1].problem])
