"""Points that no study names: the jobs of a sweep from the command line, and single points; with what the user stated of them.

Jobs of one sweep may run in several processes, so each point has a file of its own, and a reader puts them together:
`sweeps/<name>/sweep.json` is what they have in common, `sweeps/<name>/points/<digest>.json` a point, named after its labels.
A point that is measured again, with other seeds or elsewhere, replaces the one with the same labels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numdev.results.files import write_atomically
from numdev.results.scenario import Scenario

FOLDER = "sweeps"
_MOST_COMMANDS = 4  # that are named in one line
Words = Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class Sweep:
    """What the points of a sweep have in common.

    Attributes:
        name: of the sweep, as a study has one.
        kind: of measurement.
        title: what was swept, in words.
        axes: the names of what was swept; none for single points.
        words: word and unit of settings by name, for the axes of figures.
        settings: unit and meaning of the settings of the records, by column.
    """

    name: str
    kind: str
    title: str
    axes: tuple[str, ...] = ()
    words: Words = field(default_factory=dict)
    settings: Mapping[str, list[str]] = field(default_factory=dict)

    def stated(self) -> dict[str, Any]:
        """As it is kept: a study's manifest without points."""
        return {
            "name": self.name,
            "kind": self.kind,
            "title": self.title,
            "overrides": [],
            "figure": None,
            "more": [],
            "claims": [],
            "scenarios": [Scenario("default", "").stated()],  # a title would say again what that of the sweep does
            "settings": dict(self.settings),
            "words": {name: list(said) for name, said in self.words.items()},
            "axes": list(self.axes),
        }


@dataclass(frozen=True)
class Place:
    """One point of a sweep.

    Attributes:
        key: of its record.
        labels: the values of what was swept; of a single point everything that the user stated.
        number: of the job, by which points are ordered.
        command: the command line that measured it.
        said: names of everything that the user stated of the point, that all points of the sweep have alike too.
        composed: every setting of the point by the name that the command line has for it, also those that nobody stated.
    """

    key: str
    labels: Mapping[str, Any]
    number: int
    command: str
    said: tuple[str, ...] = ()
    composed: Mapping[str, Any] = field(default_factory=dict)

    def stated(self) -> dict[str, Any]:
        """As it is kept: a point of a study's manifest, and what is known of it beside."""
        plain = {name: value for name, value in vars(self).items() if not isinstance(value, Mapping)}
        return {
            "scenario": "default",
            "roles": {},
            **plain,
            "labels": dict(self.labels),
            "said": list(self.said),
            "composed": dict(self.composed),
        }

    @property
    def file(self) -> str:
        labels = json.dumps(dict(self.labels), sort_keys=True, default=str)
        return f"{hashlib.sha256(labels.encode()).hexdigest()[:16]}.json"


def put(store: Path, sweep: Sweep, place: Place) -> None:
    """Write a point of a sweep, and what it has in common with the others; raises StoreError."""
    folder, head = store / FOLDER / sweep.name, json.dumps(sweep.stated(), indent=1).encode()
    path = folder / "sweep.json"
    if not path.is_file() or path.read_bytes() != head:
        write_atomically(path, head)
    write_atomically(folder / "points" / place.file, json.dumps(place.stated(), indent=1, default=str).encode())


def count(store: Path, name: str) -> int:
    """How many points a sweep has."""
    return sum(1 for _ in (store / FOLDER / name / "points").glob("*.json"))


def names(store: Path) -> list[str]:
    """The sweeps that are kept."""
    return sorted(path.parent.name for path in (store / FOLDER).glob("*/sweep.json"))


def manifest(store: Path, name: str, torn: Callable[[Path], None]) -> dict[str, Any] | None:
    """A sweep as the manifest of a study, with all of its points; `torn` is told of files that cannot be read.

    `composed` of a point has what its labels do not say.
    """
    head = _read(store / FOLDER / name / "sweep.json", torn)
    paths, shared = sorted((store / FOLDER / name / "points").glob("*.json")), _Shared()
    points = [shared.point(point) for path in paths if (point := _read(path, torn, shared.pairs)) is not None]
    if head is None or not points:
        return None
    points.sort(key=lambda point: int(point["number"]))
    commands = list(dict.fromkeys(str(point["command"]) for point in points))
    more = f" && ... {len(commands) - _MOST_COMMANDS} more" if len(commands) > _MOST_COMMANDS else ""
    return head | {"command": " && ".join(commands[:_MOST_COMMANDS]) + more, "points": points}


class _Shared:
    """What points have alike is one object: whole, 100,000 of them take more than a gigabyte. Nobody may change it."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._parts: dict[bytes, Any] = {}

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """A dictionary of JSON, its texts shared."""
        return {self._text(name): self._text(value) for name, value in pairs}

    def point(self, point: dict[str, Any]) -> dict[str, Any]:
        """A point whose settings are shared with points that differ in nothing but their labels."""
        labels = point["labels"]
        rest = {name: value for name, value in point.get("composed", {}).items() if name not in labels}
        return point | {"composed": self._part(rest), "said": self._part(point.get("said", []))}

    def _text(self, value: Any) -> Any:
        return self._texts.setdefault(value, value) if type(value) is str else value

    def _part(self, value: Any) -> Any:
        return self._parts.setdefault(hashlib.sha256(json.dumps(value).encode()).digest(), value)


_Pairs = Callable[[list[tuple[str, Any]]], dict[str, Any]]


def _read(path: Path, torn: Callable[[Path], None], pairs: _Pairs | None = None) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_bytes(), object_pairs_hook=pairs)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        torn(path)
        return None
    return found
