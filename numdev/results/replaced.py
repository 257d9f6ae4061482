"""What happens to the points of a stored study when a run replaces its manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numdev.results.canonical import describe
from numdev.results.scenario import is_old
from numdev.results.store import Store
from numdev.results.study import Measures, Study, StudyPoint, keys_of


@dataclass(frozen=True)
class Replaced:
    """What happens to a stored study's points when its manifest is replaced.

    Attributes:
        stored: points of the stored manifest.
        ours: points of the study that replaces it.
        shared: of the stored points, those that the study has.
    """

    stored: int
    ours: int
    shared: int


def replaced(study: Study, bench: Measures, store: Store, keys: Sequence[str] | None = None) -> Replaced | None:
    """How a run narrows or changes the stored study of the same name; None where it keeps every point.

    A point is kept if scenario, labels and configuration are the same: in another environment it is measured again, as it
    should be. Of a point without a record the configuration is not known, and scenario and labels tell. `keys` as in `run`.
    """
    manifest = store.study(study.name)
    if manifest is None:
        return None
    points: dict[str, dict[str, StudyPoint]] = {}  # by place and key: labels need not tell points apart
    for key, point in zip(keys_of(study, bench) if keys is None else keys, study.points, strict=True):
        points.setdefault(_place(point.scenario, describe(point.labels)), {})[key] = point
    ours = sum(map(len, points.values()))
    if is_old(manifest):
        return Replaced(len(manifest["points"]), ours, 0)
    stored = {(_place(old["scenario"], old["labels"]), old["key"]) for old in manifest["points"]}
    shared = sum(_is_kept(key, points.get(place, {}), bench, store) for place, key in stored)
    return Replaced(len(stored), ours, shared) if shared < len(stored) else None


def _place(scenario: str, labels: dict[str, Any]) -> str:
    return json.dumps([scenario, labels], sort_keys=True)


def _is_kept(key: str, points: dict[str, StudyPoint], bench: Measures, store: Store) -> bool:
    """Whether a stored point is one of those at its place."""
    record = None if key in points else store.get(key)
    if record is None:
        return bool(points)
    return any(record.config == bench.config(p.problem, p.variant, p.baseline, p.seeds) for p in points.values())
