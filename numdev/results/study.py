"""A study: many points under one question, and its manifest, which lists them; a sweep and single points have one too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numdev.results.claim import ClaimStatement, named
from numdev.results.record import Column, describe, plain
from numdev.results.store import EntryRole, Scenario


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
    replicate: int | None = None  # the only one that it has, where each of its place on the axes is a point; a report joins them

    @property
    def parts(self) -> tuple[Any, Any, Any, int]:
        """The arguments of `Runner.measure`."""
        return self.problem, self.variant, self.baseline, self.seeds

    def text(self) -> str:
        """Scenario and labels in one line."""
        seed = [] if self.replicate is None else [f"seed {self.replicate}"]
        return " ".join([self.scenario, *(f"{name}={value}" for name, value in self.labels.items()), *seed])

    def stored(self, key: str, **of_sweep: Any) -> dict[str, Any]:
        """Its entry in a manifest, with the key of its record.

        The labels of a sweep are the values of what was swept, those of a single point everything that the user set. Such points
        have further facts: `number` is that of the job, `command` its command line; `explicit` names everything that the user
        set, that all points of the sweep have alike too; `composed` has every setting by the name of the command line, also
        those that nobody set.
        """
        of_study = {"number": 0, "command": "", "explicit": list(self.labels), "composed": {}}
        own: dict[str, Any] = {"labels": self.labels, "scenario": self.scenario, "roles": self.roles}
        own |= {} if self.replicate is None else {"replicate": self.replicate}
        return {"key": key, **describe(own), **of_study, **of_sweep}


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
    swept: tuple[str, ...] | None = None  # what a sweep from the command line sweeps, nothing for single points; None for a study

    def manifest(self, keys: Sequence[str], kind: str, settings: Iterable[Column] = ()) -> dict[str, Any]:
        """The facts that the report reads, with its points and the keys of their records, and the meanings of their settings.

        A store adds the points of a sweep one by one; its manifest has none.
        """
        known = {scenario.name: scenario for scenario in self.scenarios}
        names = dict.fromkeys(point.scenario for point in self.points) or known
        claims, as_they_are = named(self.name, self.claims), ("name", "title", "question", "command", "overrides", "swept")
        own = {name: getattr(self, name) for name in (*as_they_are, "figure", "more", "plot", "words")}
        own |= {"claims": list(claims), "scenarios": [plain(known.get(name, Scenario(name, name))) for name in names]}
        own["stated_claims"] = {name: plain(claim) for name, claim in claims.items() if claim is not None}
        own["settings"] = {column.name: [column.unit, column.meaning] for column in settings}
        points = [point.stored(key) for key, point in zip(keys, self.points, strict=True)]
        return {"kind": kind, **describe(own), **self.section, "points": points}
