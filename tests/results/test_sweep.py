from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from numdev.results.store import Store
from numdev.results.sweep import Place, Sweep, put

NAMES = ("problem.n", "tiling.bc", "precision", "seeds")
VALUES = st.sampled_from([1, True, 1.0, None, "1", "a", [1], "", 0, False])
SETTINGS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4)
POINTS = st.lists(st.tuples(SETTINGS, SETTINGS), min_size=1, max_size=6, unique_by=lambda point: repr(point[0]))


def typed(value: Any) -> tuple[type, Any]:
    """A value that does not equal its like of another type: 1 == True."""
    return type(value), value


def store_of(path: Path, points: list[tuple[dict[str, Any], dict[str, Any]]]) -> Store:
    for number, (labels, composed) in enumerate(points):
        put(path, Sweep("s", "deviation", "a sweep"), Place(f"k{number}", labels, number, "numdev", tuple(labels), composed))
    return Store(path)


@given(POINTS)
def test_a_manifest_says_of_every_setting_what_its_point_had(points: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """The label where there is one, else what the point was composed of: also of a name that another sweep states."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        manifest = store_of(Path(folder), points).study("s")
    assert manifest is not None
    by_file = {place["key"]: place for place in manifest["points"]}
    kept = {tuple(sorted(labels)) + tuple(map(repr, labels.values())): number for number, (labels, _) in enumerate(points)}
    for number in kept.values():
        labels, composed = points[number]
        found = by_file[f"k{number}"]
        assert (found["labels"], found["said"], found["number"]) == (labels, list(labels), number)
        for name in NAMES:
            expected = labels.get(name, composed.get(name))
            assert typed(found["labels"].get(name, found["composed"].get(name))) == typed(expected)


def test_what_points_have_alike_is_one_object(tmp_path: Path) -> None:
    composed = {f"setting.{i}": f"value {i}" for i in range(50)}
    points = [({"problem.n": n}, composed | {"problem.n": n}) for n in range(20)]
    manifest = store_of(tmp_path, points).study("s")
    assert manifest is not None
    assert len({id(point["composed"]) for point in manifest["points"]}) == 1
    assert len({id(point["command"]) for point in manifest["points"]}) == 1
    assert manifest["points"][0]["composed"] == composed


def test_a_torn_point_is_told(tmp_path: Path) -> None:
    store = store_of(tmp_path, [({"problem.n": n}, {}) for n in (1, 2)])
    torn = sorted((tmp_path / "sweeps/s/points").iterdir())[0]
    torn.write_text('{"labels": {')
    manifest = store.study("s")
    assert manifest is not None
    assert len(manifest["points"]) == 1
    assert store.torn == [torn]
