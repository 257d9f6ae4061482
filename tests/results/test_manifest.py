"""Manifests of sweeps, whose points are stored one by one."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.results.store import Store, manifest_of, stored_point

NAMES = ("problem.n", "tiling.bc", "precision", "seeds")
VALUES = st.sampled_from([1, True, 1.0, None, "1", "a", [1], "", 0, False])
SETTINGS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4)
POINTS = st.lists(st.tuples(SETTINGS, SETTINGS), min_size=1, max_size=6, unique_by=lambda point: repr(point[0]))


def typed(value: Any) -> tuple[type, Any]:
    """A value that does not equal its like of another type: 1 == True."""
    return type(value), value


def store_of(path: Path, points: list[tuple[dict[str, Any], dict[str, Any]]]) -> Store:
    store = Store(path)
    for number, (labels, composed) in enumerate(points):
        point = stored_point(f"k{number}", labels, number=number, command="numdev", composed=composed)
        store.put_point(manifest_of("s", "deviation", "a sweep", swept=["problem.n"]), point)
    return store


@settings(max_examples=30)
@given(POINTS)
def test_a_manifest_has_of_every_setting_what_its_point_had(points: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """The label where there is one, else what the point was composed of; the last point of some labels stands."""
    with TemporaryDirectory() as folder:
        manifest = store_of(Path(folder), points).study("s")
    assert manifest is not None
    by_key = {point["key"]: point for point in manifest["points"]}
    last = {tuple(sorted(labels)) + tuple(map(repr, labels.values())): number for number, (labels, _) in enumerate(points)}
    for number in last.values():
        labels, composed = points[number]
        stored = by_key[f"k{number}"]
        assert (stored["labels"], stored["explicit"], stored["number"]) == (labels, list(labels), number)
        for name in NAMES:
            expected = labels.get(name, composed.get(name))
            assert typed(stored["labels"].get(name, stored["composed"].get(name))) == typed(expected)


def test_a_torn_point_is_noted_and_the_command_is_of_all(tmp_path: Path) -> None:
    store = store_of(tmp_path, [({"problem.n": n}, {}) for n in (1, 2)])
    torn = sorted((tmp_path / "studies" / "s").iterdir())[0]
    torn.write_text('{"labels": {')
    manifest = store.study("s")
    assert manifest is not None
    assert (len(manifest["points"]), manifest["command"]) == (1, "numdev")
    assert store.torn == [torn]
    assert list(store.studies()) == ["s"]
    torn.unlink()
    assert store.count("s") == 1
