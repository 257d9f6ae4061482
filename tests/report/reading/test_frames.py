"""Tables of stored results: every figure, every column, every type and every bit, of whole results and of others."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from numdev.api import Bench
from numdev.attention.exact import Exact
from numdev.attention.naive import Naive
from numdev.attention.operation import ATTENTION
from numdev.attention.precision import Precision
from numdev.attention.problem import Distribution, Kind, Problem, Shape
from numdev.errors import BadInput
from numdev.measurement.deviation import COLUMNS as DEVIATION
from numdev.measurement.invariance import Invariances
from numdev.measurement.metrics import METRICS, NONFINITE
from numdev.measurement.runner import Runner
from numdev.measurement.studies import Shard, run
from numdev.report.document.export import SUMMARISED, environments, summarise, write_tables
from numdev.report.document.tables import points_table
from numdev.report.reading import frames
from numdev.report.reading.frames import COMPARISON, TEXT, Results, Rows, column_of_values, is_broken, load
from numdev.report.reading.view import numbered
from numdev.results.record import Column, Record, Status
from numdev.results.store import Scenario, Store
from numdev.results.study import Study, StudyPoint
from tests.toy_studies import TILES, toy

SMALL = {"problem.n": 32, "seeds": 2}


@pytest.fixture(scope="module")
def results(toy_results: Store) -> Results:
    return load(toy_results)


def record(key: str, **changes: Any) -> Record:
    row: dict[str, Any] = {"seed": 0, "cluster": "", "subject": "variant", "output": "out", "primary": True}
    row |= {"reference": "golden", "max_index": [0, 1, 2, 3]}
    row |= dict.fromkeys(METRICS, 1.0) | dict.fromkeys(NONFINITE, 0)
    config = {"problem": {"shape": {"keys": 8}}, "variant": {"tiling": {"br": 2, "bc": 4}}, "baseline": None, "seeds": 1}
    tables = {"deviation": [row], "counters": [{"seed": 0, "tied_rows": 0.5}]}
    columns = {"deviation": DEVIATION, "counters": (Column("seed"), *ATTENTION.counters)}
    stated = "deviation", "attention", ("out", "lse"), columns, config, {"device": "cpu"}
    return dataclasses.replace(Record(key, *stated, Status.OK, "", tables, 1.0), **changes)


def store_of(path: Path, *records: Record, names: tuple[str, ...] = ()) -> Store:
    store = Store(path)
    for made in records:
        store.put(made)
    names = names or ("default",) * len(records)
    points = tuple(StudyPoint(None, None, None, 1, name) for name in names)
    scenarios = tuple(Scenario(name, f"the {name} one") for name in dict.fromkeys(names))
    keys = [made.key for made in records]
    store.put_study("s", Study("s", "t", points=points, scenarios=scenarios).manifest(keys, records[0].kind))
    return store


def test_rows_keep_the_figures_of_the_records(results: Results, toy_results: Store) -> None:
    row = results.study("fig4").iloc[17]
    found = toy_results.get(row["key"])
    assert found is not None
    (expected,) = [r for r in found.rows if all(r[name] == row[name] for name in COMPARISON)]
    assert all(row[name] == expected[name] for name in METRICS)
    assert row["max_index"] == " ".join(map(str, expected["max_index"]))


@pytest.mark.parametrize(("last", "mean"), [({"tied_rows": 0.75}, [0.5]), ({}, None)])
def test_points_have_counters_of_every_replicate_as_means(
    last: dict[str, float], mean: list[float] | None, tmp_path: Path
) -> None:
    counters = [{"seed": 0, "tied_rows": 0.25}, {"seed": 1} | last]
    points = load(store_of(tmp_path, record("a", tables={"deviation": record("a").rows, "counters": counters}))).points
    assert (points["counter.tied_rows"].tolist() if "counter.tied_rows" in points else None) == mean


def test_a_baseline_stands_once_per_problem_and_scenario(results: Results) -> None:
    rows = results.primary.frame(~results.primary.is_repeated())
    baseline = rows[rows["subject"] == "baseline"]
    assert not baseline.duplicated(["study", "scenario", "pairing", *COMPARISON]).any()
    whole = results.rows[results.rows["subject"] == "baseline"]
    lost = set(map(tuple, whole[["study", "scenario", "pairing", "seed"]].to_numpy()))
    assert lost == set(map(tuple, baseline[["study", "scenario", "pairing", "seed"]].to_numpy()))
    assert (rows["subject"] == "variant").sum() == (results.rows["subject"] == "variant").sum()


def test_results_of_several_kinds_are_one_table(tmp_path: Path) -> None:
    """The rows of a kind that has no outputs are all primary, so that its figures are drawn."""
    own: dict[str, Any] = {"kind": "mine", "columns": {"mine": (Column("seed"), Column("size"))}}
    found = load(store_of(tmp_path, record("a"), record("b", tables={"mine": [{"seed": 0, "size": 2.0}]}, **own)))
    assert found.rows["primary"].tolist() == [True, True]
    assert found.rows["size"].isna().tolist() == [True, False]


def test_nothing_measured_still_loads(tmp_path: Path) -> None:
    store = store_of(tmp_path, record("a"))
    (tmp_path / "records" / "a.json").unlink()
    found = load(store)
    assert found.rows.empty
    write_tables(found, [], tmp_path / "out")
    assert list(pd.read_parquet(tmp_path / "out" / "results.parquet"))[:3] == ["study", "scenario", "key"]


def test_a_store_without_the_studies_says_what_it_has(toy_results: Store, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"results: .* holds no results; .*numdev measure study=fig3"):
        load(Store(tmp_path))
    torn = tmp_path / "studies" / "fig3.json"
    torn.parent.mkdir()
    torn.write_text('{"name": "fi')
    with pytest.raises(BadInput, match=r"fig3\.json is damaged"):
        load(Store(tmp_path))
    with pytest.raises(BadInput, match=r"study: 'fig9' cannot be used; .* holds .*fig3"):
        load(toy_results, ["fig3", "fig9"])
    assert list(load(toy_results, ["sign"]).manifests) == ["sign"]


def test_records_of_another_environment_do_not_mix_in(tmp_path: Path) -> None:
    store = store_of(tmp_path, record("new", environment={"device": "gpu"}))
    store.put(record("old"))
    found = load(store)
    assert found.points["key"].tolist() == ["new"]
    assert json.loads(environments(found)) == [{"environment": 0, "points": {"s": 1}, "facts": {"device": "gpu"}}]


def test_an_interrupted_study_gives_the_same_tables(tmp_path: Path) -> None:
    studies = [toy("fig3", ("uniform_end",), base=SMALL), toy("sign", ("uniform",), base=SMALL)]
    studies += [toy("fig6c", ("uniform_end",), {"tiling.sram": [1024, 2048], "precision": ["bf16"]}, SMALL | TILES)]
    for name, shards in (("whole", (Shard(),)), ("resumed", (Shard(1, 3), Shard()))):
        store, bench = Store(tmp_path / name), Bench(Exact(), "cpu")
        for shard in shards:
            for study in studies:
                run(study, bench, store, shard=shard)
        write_tables(load(store), [], tmp_path / f"{name}-out")
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole-out").iterdir()}
    resumed = {path.name: path.read_bytes() for path in (tmp_path / "resumed-out").iterdir()}
    assert whole.pop("timings.csv") != resumed.pop("timings.csv")
    assert whole == resumed


def test_a_summary_is_that_of_the_record(results: Results, toy_results: Store) -> None:
    row = summarise(results).query("study == 'fig3'").iloc[5]
    found = toy_results.get(row["key"])
    assert found is not None
    for metric in SUMMARISED:
        (expected,) = [
            one
            for one in found.summaries(metric)
            if (one["subject"], one["output"], one["reference"]) == (row["subject"], row["output"], row["reference"])
        ]
        assert row[f"{metric}.mean"] == expected["mean"]
        assert (row[f"{metric}.low"], row[f"{metric}.high"]) == (expected["low"], expected["high"])
        assert (row[f"{metric}.min"], row[f"{metric}.max"]) == (expected["least"], expected["most"])
    assert row["replicates"] == 3


def test_a_summary_counts_replicates_with_nan(tmp_path: Path) -> None:
    rows = [record("a").rows[0] | {"seed": seed, "nan_count": seed} for seed in range(3)]
    found = load(store_of(tmp_path, record("a", tables={"deviation": rows, "counters": []})))
    summaries = summarise(found)
    assert (summaries["replicates"].tolist(), summaries["nonfinite"].tolist()) == ([3], [2])


def test_outputs_of_an_invariance_are_not_averaged(tmp_path: Path) -> None:
    problem = Problem(Distribution(Kind.NORMAL), Shape(batch=2, queries=8, keys=8, head_dim=4))
    made = Runner(Invariances(ATTENTION), "cpu").measure(problem, Naive(Precision.parse("bf16")), None, 2)
    found = load(store_of(tmp_path, made))
    expected = {(row["output"], row["surroundings"]) for row in made.rows}
    summaries = summarise(found)
    assert {*zip(summaries["output"], summaries["surroundings"], strict=True)} == expected
    assert len(summaries) == len(expected) == len(points_table(found, "s"))


NUMBERS = (0.0, -0.0, 1.5, 1 / 3, 1e-310, math.nan, math.inf, -math.inf)
CELLS: dict[str, st.SearchStrategy[Any]] = {
    "text": st.sampled_from(["", "a", "b", "\x00", None]),
    "no text": st.none(),
    "number": st.sampled_from(NUMBERS),
    "count": st.integers(0, 2),
    "gaps": st.sampled_from([1, 2, None]),
    "flag": st.sampled_from([True, False, None]),
    "mixed": st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.floats(0, 1)),
    "list": st.lists(st.integers(0, 9), max_size=2),
}
DECLARED = ["subject", *CELLS]
ROW = st.fixed_dictionaries({"subject": st.sampled_from(["variant", "baseline"])}, optional=CELLS)
LABELS = st.fixed_dictionaries({"label.n": st.integers(0, 2), "label.text": st.sampled_from(["x", "y"])})
STUDY = st.lists(st.tuples(LABELS, st.lists(ROW, max_size=4)), max_size=6)
Recorded = list[tuple[dict[str, Any], list[dict[str, Any]]]]


def kept(study: Recorded, chunk: int = 1 << 14) -> Rows:
    """The rows of the records of some points, of which `chunk` are packed at a time."""
    reading = frames._Table()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "_CHUNK", chunk)
        for number, (_, record) in enumerate(study):
            reading.extend(record, number)
        return reading.rows(DECLARED, pd.DataFrame([labels for labels, _ in study], columns=["label.n", "label.text"]))


TABLES = st.lists(ROW, max_size=12).map(lambda rows: kept([({}, rows)]).frame(names=DECLARED))


def one_by_one(study: Recorded) -> dict[str, list[Any]]:
    """The oracle: every row as a dictionary of its own."""
    rows = [labels | dict.fromkeys(DECLARED) | row for labels, record in study for row in record]
    for row in rows:
        row["list"] = None if row["list"] is None else " ".join(map(str, row["list"]))
    return {name: [row[name] for row in rows] for name in ("label.n", "label.text", *DECLARED)}


def bits(values: pd.Series[Any]) -> list[str]:
    """Zeros of both signs are two values, and everything that is missing is one."""
    return ["missing" if pd.isna(value) else repr(value) for value in values.tolist()]


@settings(max_examples=40)
@given(STUDY, st.integers(1, 5))
def test_the_columns_are_those_of_rows_read_one_by_one(study: Recorded, chunk: int) -> None:
    """However rows are packed, the type of a column is that which all of its values allow."""
    table, expected = kept(study, chunk).frame(), one_by_one(study)
    assert sorted(map(str, table)) == sorted(expected)
    for name, values in expected.items():
        column = column_of_values(values)
        assert bits(table[name]) == bits(column), name
        if name in DECLARED:
            assert table[name].dtype == column.dtype, name


@settings(max_examples=25)
@given(STUDY, st.data())
def test_a_part_is_that_of_the_whole(study: Recorded, data: st.DataObject) -> None:
    rows = kept(study)
    whole = rows.frame()
    at = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5) if len(rows) else st.just([])), dtype=np.int64)
    names = data.draw(st.lists(st.sampled_from(rows.columns), min_size=1, unique=True))
    pd.testing.assert_frame_equal(rows.frame(at, names), whole[names].iloc[at], check_exact=True)
    chosen = rows.where(**{"subject": "variant", "label.n": 1})
    expected = (whole["subject"] == "variant") & (whole["label.n"] == 1)
    assert chosen.tolist() == expected.tolist()
    pd.testing.assert_frame_equal(rows.frame(chosen, names), whole[names][expected], check_exact=True)


@settings(max_examples=30)
@given(TABLES, st.lists(st.sampled_from(["text", "count", "gaps", "flag"]), min_size=1, unique=True))
def test_numbers_are_those_of_groups(table: pd.DataFrame, names: list[str]) -> None:
    expected = table.groupby(names, sort=False, dropna=False).ngroup()
    assert numbered(table, names).tolist() == expected.tolist()


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-(2**62), 2**62), st.floats(), st.text(max_size=3))


@given(st.lists(VALUES, max_size=9))
@example(["\x00", ""])
def test_a_column_has_every_value_or_its_text(values: list[Any]) -> None:
    column = column_of_values(values)
    kinds = {type(value) for value in values if value is not None}
    if column.dtype == TEXT:
        assert column.isna().tolist() == [value is None for value in values]
        assert column.dropna().tolist() == [str(value) for value in values if value is not None]
    else:
        number = float if float in kinds else bool if kinds == {bool} else int
        numbers = [None if value is None else number(value) for value in values]
        assert bits(column) == bits(pd.Series(numbers, dtype=object))


def test_a_row_is_broken_by_nan_or_by_inf_where_the_other_side_has_none() -> None:
    rows = pd.DataFrame({"nan_count": [0, 1, 0, None], "inf_count": [0, 0, 2, None]})
    assert is_broken(rows).tolist() == [False, True, True, False]
    assert is_broken(pd.DataFrame({"a": [1.0]})).tolist() == [False]
