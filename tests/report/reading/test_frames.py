from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

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
from numdev.report.reading.frames import COMPARISON, Results, load
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
