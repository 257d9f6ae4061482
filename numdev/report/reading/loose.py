"""Records of which nothing says what they belong to, such as those that a program put into a folder by itself."""

from __future__ import annotations

from typing import Any

from numdev.measurement.deviation.measurement import KIND as DEVIATION
from numdev.report.reading.typed import flatten
from numdev.results.store import Store
from numdev.results.sweep import Place, Sweep

_PARTS = ("problem", "variant", "baseline")


def manifests(store: Store) -> dict[str, dict[str, Any]]:
    """All records of a folder as single points, a manifest for each operation and kind; labels are the settings that differ."""
    configs: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for record in store.records():
        parts = {name: part for name in _PARTS if (part := record.config.get(name)) is not None}
        configs.setdefault((record.operation, record.kind), {})[record.key] = flatten(parts)
    return {sweep.name: sweep.stated() | {"command": "", "points": points} for sweep, points in map(_points, configs.items())}


def _points(of: tuple[tuple[str, str], dict[str, dict[str, Any]]]) -> tuple[Sweep, list[dict[str, Any]]]:
    (operation, kind), configs = of
    names = dict.fromkeys(name for config in configs.values() for name in config)
    differ = _telling({name: tuple(repr(config.get(name)) for config in configs.values()) for name in names})
    places = []
    for number, (key, config) in enumerate(configs.items()):
        labels = {name: config[name] for name in differ if name in config}
        places.append(Place(key, labels, number, "", tuple(differ)).stated())
    name = operation if kind == DEVIATION else f"{operation}_{kind}"
    return Sweep(f"points_{name}", kind, f"Single points of {name.replace('_', ' ')}"), places


def _telling(values: dict[str, tuple[str, ...]]) -> list[str]:
    """The settings that differ; one of those that tell the same points apart: the name of a preset before what it states."""
    found: dict[tuple[int, ...], str] = {}
    for name in sorted(values, key=lambda each: not each.endswith((".name", ".kind", ".type"))):
        first: dict[str, int] = {}
        same = tuple(first.setdefault(value, len(first)) for value in values[name])  # equal for two that differ alike
        if len(first) > 1:
            found.setdefault(same, name)
    return [name for name in values if name in found.values()]
