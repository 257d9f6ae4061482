"""Records of which nothing says what they belong to, such as those that a program put into a folder by itself."""

from __future__ import annotations

from typing import Any

from numdev.measurement.deviation.measurement import KIND as DEVIATION
from numdev.report.reading.typed import flatten
from numdev.results.manifest import manifest_of, stored_point
from numdev.results.store import Store

_PARTS = ("problem", "variant", "baseline")


def manifests(store: Store) -> dict[str, dict[str, Any]]:
    """All records of a folder as single points, a manifest for each operation and kind; labels are the settings that differ."""
    configs: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for record in store.records():
        parts = {name: part for name in _PARTS if (part := record.config.get(name)) is not None}
        configs.setdefault((record.operation, record.kind), {})[record.key] = flatten(parts)
    return {manifest["name"]: manifest for manifest in map(_manifest, configs.items())}


def _manifest(group: tuple[tuple[str, str], dict[str, dict[str, Any]]]) -> dict[str, Any]:
    (operation, kind), configs = group
    names = dict.fromkeys(name for config in configs.values() for name in config)
    differ = _telling({name: tuple(repr(config.get(name)) for config in configs.values()) for name in names})
    points = []
    for number, (key, config) in enumerate(configs.items()):
        labels = {name: config[name] for name in differ if name in config}
        points.append(stored_point(key, labels, number=number, explicit=differ))
    name = operation if kind == DEVIATION else f"{operation}_{kind}"
    return manifest_of(f"points_{name}", kind, f"Single points of {name.replace('_', ' ')}", points, swept=[])


def _telling(values: dict[str, tuple[str, ...]]) -> list[str]:
    """The settings that differ; one of those that tell the same points apart: the name of a preset before what it states."""
    found: dict[tuple[int, ...], str] = {}
    for name in sorted(values, key=lambda each: not each.endswith((".name", ".kind", ".type"))):
        first: dict[str, int] = {}
        same = tuple(first.setdefault(value, len(first)) for value in values[name])  # equal for two that differ alike
        if len(first) > 1:
            found.setdefault(same, name)
    return [name for name in values if name in found.values()]
