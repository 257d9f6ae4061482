"""The manifest of a study, of a sweep or of single points, plain data of one form: its points, scenarios and claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from numdev.results.record import describe


class EntryRole(Enum):
    """Role of an entry of an axis in the claims that compare the entries."""

    SUBJECT = "subject"  # what the claims speak of
    EXPECTED = "expected"  # what the claims say the subjects are like
    CONTROL = "control"  # what the subjects have to differ from for the comparison to mean anything
    ASIDE = "aside"  # measured beside the others and not judged


class Role(Enum):
    """Role of a scenario for the source of a study's claims."""

    PAPER = "paper"  # the source states these circumstances
    ASSUMED = "assumed"  # the source leaves them open, and they are our assumption about it
    BEYOND = "beyond"  # where else we look
    CONTROL = "control"  # what the others are held against


@dataclass(frozen=True)
class Scenario:
    """Circumstances under which a study repeats its question."""

    name: str  # in the study's file
    title: str  # what they are, for a reader: "uniform inputs, every step in F, FlashAttention-1"
    role: Role = Role.BEYOND
    stands_for: str = ""  # the row of the source's table that this scenario repeats, where the claim is on a table


def scenarios_of(manifest: Mapping[str, Any]) -> dict[str, Scenario]:
    """The scenarios of a stored study, by name.

    A study whose points the command line changed is not what its source describes: all its scenarios lie beyond that, and
    their titles say what was changed.
    """
    scenarios = [Scenario(**own | {"role": Role(own["role"])}) for own in manifest["scenarios"]]
    if manifest["overrides"]:
        text = f", with overrides: {' '.join(manifest['overrides'])}"
        scenarios = [replace(own, title=f"{own.title}{text}", role=Role.BEYOND) for own in scenarios]
    return {own.name: own for own in scenarios}


def plain(value: object) -> dict[str, Any]:
    """The fields of a scenario or claim as a manifest keeps them."""
    described: dict[str, Any] = describe(value)
    return {name: value for name, value in described.items() if name != "type"}


def stored_point(key: str, labels: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """A point of a manifest: the key of its record, its labels, and of these facts those that are not as in a plain study.

    `labels` are the values of what was swept, or of a single point everything that the user gave. `scenario` and `roles` are as
    those of `numdev.results.study.StudyPoint`; `number` is that of the job of a sweep, `command` its command line; `explicit`
    names everything that the user gave, that all points of the sweep have alike too; `composed` has every setting of the point
    by the name of the command line, also those that nobody gave.
    """
    plain_study = {"scenario": "default", "roles": {}, "number": 0, "command": "", "explicit": list(labels), "composed": {}}
    return {"key": key, "labels": dict(labels)} | plain_study | facts


def manifest_of(name: str, kind: str, title: str, points: Sequence[Mapping[str, Any]] = (), **parts: Any) -> dict[str, Any]:
    """A manifest: the name of a study or sweep, its kind of measurement, its title, each `stored_point`, and of its parts some.

    These are the fields of `numdev.results.study.Study`, and `stated_claims`, the claims of its file by name; `settings`, unit
    and meaning of the settings of the records by column; `swept`, the names of what a sweep from the command line swept, none
    for single points, None for a study. A store adds the points of a sweep one by one.
    """
    empty: dict[str, Any] = {"question": "", "command": "", "overrides": [], "figure": None, "more": [], "plot": None}
    empty |= {"claims": [], "stated_claims": {}, "scenarios": [plain(Scenario("default", ""))]}
    empty |= {"settings": {}, "words": {}, "swept": None}
    return {"name": name, "kind": kind, "title": title} | empty | parts | {"points": list(points)}


def is_old(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest is of a numdev whose manifests had another form, so that its points cannot be read."""
    return not {"scenarios", "overrides", "kind", "swept"} <= manifest.keys()
