from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import stat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.errors import StoreError
from numdev.results.record import Column, Record, Status, Use
from numdev.results.store import LONG, Store
from numdev.results.study import Study, StudyPoint


def record(key: str = "a" * 32, seconds: float = 0.5, rows: int = 1) -> Record:
    figures = [{"seed": seed, "subject": "variant", "max_difference": 0.1 * seed} for seed in range(rows)]
    return with_tables({"deviation": figures}, key, config={"seeds": rows}, seconds=seconds)


def with_tables(
    tables: dict[str, list[dict[str, Any]]], key: str = "k", config: dict[str, Any] | None = None, seconds: float = 0.0
) -> Record:
    columns: dict[str, tuple[Column, ...]] = {name: (Column("seed", "", "the replicate", Use.PLACE),) for name in tables}
    fields = "deviation", "attention", ("out",), columns, config or {}, {"device": "cpu"}
    return Record(key, *fields, Status.OK, tables=tables, seconds=seconds)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_last_put_stands_and_can_be_read_by_those_whom_the_umask_lets(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "results")
    assert store.get("a" * 32) is None
    before = os.umask(0o022)
    try:
        store.put(record(seconds=1.0))
        store.put(record(rows=3))
    finally:
        os.umask(before)
    assert store.get("a" * 32) == record(rows=3)
    assert list(store.records()) == [record(rows=3)]
    (path,) = (store.path / "records").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


AWKWARD = [5e-324, 1.7976931348623157e308, 0.1, math.inf, -math.inf, -0.0, 1 / 3]


class TestLongTables:
    def rows(self, shift: int = 0) -> list[dict[str, Any]]:
        texts = ("out", "lse", "")
        return [
            {"step": i, "value": AWKWARD[i % 7] * (1 + shift), "text": texts[i % 3], "index": [i, i % 5], "even": i % 2 == 0}
            for i in range(LONG + 1)
        ]

    def test_stand_in_parquet_and_come_back_bit_by_bit(self, tmp_path: Path) -> None:
        store, short = Store(tmp_path), [{"seed": 0}]
        one = with_tables({"training": self.rows(), "counters": short})
        store.put(one)
        assert store.get("k") == one
        assert [row["value"].hex() for row in store.get("k").rows] == [row["value"].hex() for row in self.rows()]  # type: ignore[union-attr]
        fields = json.loads((tmp_path / "records" / "k.json").read_bytes())["tables"]
        assert fields["counters"] == short
        assert fields["training"]["rows"] == LONG + 1
        assert files(tmp_path) == ["records/k.json", f"records/{fields['training']['file']}"]

    def test_others_take_their_place(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        store.put(with_tables({"training": self.rows()}))
        store.put(with_tables({"training": self.rows(1)}))
        result = store.get("k")
        assert result is not None
        assert result.rows == self.rows(1)
        assert len(files(tmp_path)) == 2
        store.put(with_tables({"training": [{"step": 0}]}))
        assert files(tmp_path) == ["records/k.json"]

    @pytest.mark.parametrize("left", [b"", b"PAR1", None])
    def test_a_torn_or_lost_one_makes_its_record_torn(self, tmp_path: Path, left: bytes | None) -> None:
        store = Store(tmp_path)
        store.put(with_tables({"training": self.rows()}))
        (table,) = (tmp_path / "records").glob("k/*.parquet")
        if left is None:
            table.unlink()
        else:
            table.write_bytes(left)
        assert store.get("k") is None
        assert store.torn == [tmp_path / "records" / "k.json"]

    def test_rows_of_other_columns_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="table training: every row of a long table needs the same columns, step, value"):
            Store(tmp_path).put(with_tables({"training": [*self.rows(), {"step": 0}]}))
        assert files(tmp_path) == []


class TestTornFiles:
    @pytest.mark.parametrize(
        "left",
        [b"", b"{", b"[1]", b"\xff\xfe", b"\0" * 9, b'{"key": "old", "status": "ok", "tables": {}, "columns": {}}'],
    )
    def test_count_as_not_measured_and_are_noted(self, tmp_path: Path, left: bytes) -> None:
        store = Store(tmp_path)
        store.put(record("good"))
        (tmp_path / "records" / ".other.json.abc.tmp").write_bytes(record("other").to_json()[:20])  # of a kill: no record
        torn = tmp_path / "records" / "torn.json"
        torn.write_bytes(left)
        assert store.get("torn") is None
        assert store.get("other") is None
        assert [one.key for one in store.records()] == ["good"]
        assert store.torn == [torn]

    def test_a_torn_study_hides_no_other(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        store.put_study("good", {"points": []})
        (tmp_path / "studies" / "torn.json").write_text('{"points"')
        assert store.studies() == {"good": {"points": []}}
        assert [path.name for path in store.torn] == ["torn.json"]


def fail(number: int) -> Any:
    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return failing


class TestFullDisk:
    @pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
    def test_leaves_what_was_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        store = Store(tmp_path)
        store.put(record(seconds=1.0))
        before = files(tmp_path)
        monkeypatch.setattr(os, call, fail(errno.ENOSPC))
        with pytest.raises(StoreError, match=r"results: .*No space left on device.*free some space"):
            store.put(record(seconds=2.0))
        with pytest.raises(StoreError):
            store.put(record("b" * 32))
        assert files(tmp_path) == before
        monkeypatch.undo()
        assert [result.seconds for result in store.records()] == [1.0]

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "results").write_text("a file")
        with pytest.raises(StoreError, match="check that the folder exists and may be written"):
            Store(tmp_path / "results").put(record())


def test_a_record_that_is_written_just_after_it_was_looked_for_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)

    def missing(_: Path) -> bytes:
        monkeypatch.undo()
        store.put(record("a"))
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_bytes", missing)
    assert store.get("a") is None
    assert store.torn == []
    assert store.get("a") == record("a")


def test_a_record_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, table = Store(tmp_path), Store._table

    def late(own: Store, apart: dict[str, Any]) -> Any:
        monkeypatch.undo()
        own.put(record("a", rows=LONG + 2))
        return table(own, apart)

    store.put(record("a", rows=LONG + 1))
    monkeypatch.setattr(Store, "_table", late)
    assert store.get("a") == record("a", rows=LONG + 2)
    assert store.torn == []


def write_many(folder: str, writer: int, count: int) -> None:
    store = Store(Path(folder))
    for i in range(count):
        store.put(record("shared", seconds=float(writer), rows=LONG + 1))
        store.put(record(f"own-{writer}-{i}"))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
class TestTwoWriters:
    def test_lose_nothing_and_tear_nothing(self, tmp_path: Path) -> None:
        context = multiprocessing.get_context("fork")
        writers = [context.Process(target=write_many, args=(str(tmp_path), writer, 20)) for writer in range(2)]
        for process in writers:
            process.start()
        store, seen = Store(tmp_path), 0
        while any(process.is_alive() for process in writers):
            result = store.get("shared")
            seen += result is not None
            assert result is None or len(result.rows) == LONG + 1
        for process in writers:
            process.join()
            assert process.exitcode == 0
        keys = {result.key for result in store.records()}
        assert keys == {"shared"} | {f"own-{writer}-{i}" for writer in range(2) for i in range(20)}
        assert store.torn == []
        assert seen
        assert not list((tmp_path / "records").glob(".*"))


NAMES = ("problem.n", "tiling.bc", "precision", "seeds")
VALUES = st.sampled_from([1, True, 1.0, None, "1", "a", [1], "", 0, False])
SETTINGS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4)
POINTS = st.lists(st.tuples(SETTINGS, SETTINGS), min_size=1, max_size=6, unique_by=lambda point: repr(point[0]))


def store_of(path: Path, points: list[tuple[dict[str, Any], dict[str, Any]]]) -> Store:
    store = Store(path)
    for number, (labels, composed) in enumerate(points):
        point = StudyPoint(None, None, None, 1, labels=labels).stored(
            f"k{number}", number=number, command="numdev", composed=composed
        )
        store.put_point(Study("s", "a sweep", swept=("problem.n",)).manifest((), "deviation"), point)
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
            assert repr(stored["labels"].get(name, stored["composed"].get(name))) == repr(expected)  # 1 == True


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
