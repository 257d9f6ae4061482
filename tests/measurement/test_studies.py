"""Studies are measured once, resumed, and by as many processes as are worth it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from numdev.api import Bench
from numdev.arithmetic.formats import BF16
from numdev.attention.base import Output
from numdev.attention.captured import Captured
from numdev.attention.emulation import baseline_for
from numdev.attention.exact import Exact
from numdev.attention.mask import Mask
from numdev.attention.operation import ATTENTION
from numdev.attention.precision import Precision
from numdev.attention.problem import Distribution, Kind, Problem, Shape
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Tiling
from numdev.errors import BadInput, StoreError, Unsupported
from numdev.measurement import runner, studies
from numdev.measurement.deviation import Deviations
from numdev.measurement.operation import Operation
from numdev.measurement.runner import Context, Findings, Point, Runner
from numdev.measurement.speed import Speeds
from numdev.measurement.studies import Shard, keys_of, run
from numdev.report.reading.frames import scenarios_of
from numdev.results.record import Column, Record, Status, Use
from numdev.results.store import Role, Scenario, Store
from numdev.results.study import Study, StudyPoint

SMALL = Shape(queries=16, keys=16, head_dim=4)


def point(bc: int = 8, kind: Kind = Kind.UNIFORM, seeds: int = 1, **labels: Any) -> StudyPoint:
    variant = Tiled(Precision.parse("bf16"), Tiling(bc=bc))
    return StudyPoint(Problem(Distribution(kind), SMALL), variant, baseline_for(BF16), seeds, labels={"bc": bc} | labels)


def study(*points: StudyPoint) -> Study:
    return Study("toy", "A toy", "figure", ("claim",), points)


GRID = study(*(point(bc, kind) for bc in (2, 4, 8) for kind in (Kind.UNIFORM, Kind.NORMAL)))


@pytest.fixture
def bench() -> Bench:
    return Bench(Exact(), "cpu")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


@dataclass(frozen=True)
class Faulty(Exact):
    """An attention that does not come to an end; `fault` says how."""

    fault: str = ""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        if self.fault == "nan":
            return Output(torch.full_like(q, torch.nan), None)
        faults: dict[str, Exception] = {
            "unsupported": Unsupported("problem.causal", "only without"),
            "memory": MemoryError("no more"),
            "error": RuntimeError("deliberate\nsecond line"),
        }
        raise faults[self.fault]


def faulty(fault: str) -> StudyPoint:
    return replace(point(), variant=Faulty(fault), labels={"fault": fault})


def contents(store: Store) -> dict[str, Any]:
    """Everything but how long it took."""
    return {record.key: replace(record, seconds=0.0) for record in store.records()} | store.studies()


def test_a_study_is_measured_and_its_manifest_has_the_grid_and_its_scenarios(bench: Bench, store: Store) -> None:
    known = Scenario("one", "uniform inputs", Role.ASSUMED)
    points = tuple(replace(one, scenario=name) for one, name in zip(GRID.points, ("one", "two") * 3, strict=True))
    order: list[Problem] = []
    grid = replace(study(*points), scenarios=(known, Scenario("unused", "none")))
    outcome = run(grid, bench, store, progress=lambda done, total, point: order.append(point.problem))
    assert (outcome.measured, outcome.skipped, outcome.failures) == (6, 0, [])
    assert {record.key for record in store.records()} == set(keys_of(grid, bench))
    assert outcome.seconds >= sum(record.seconds for record in store.records())
    assert [problem.source.kind for problem in order] == [Kind.UNIFORM] * 3 + [Kind.NORMAL] * 3  # type: ignore[attr-defined]
    manifest = store.studies()["toy"]
    parts = [manifest[name] for name in ("name", "title", "figure", "claims")]
    assert parts == ["toy", "A toy", "figure", ["claim"]]
    places = [(point["key"], point["labels"], point["scenario"]) for point in manifest["points"]]
    assert places == [(bench.key(*point.parts), point.labels, point.scenario) for point in points]
    assert scenarios_of(manifest) == {"one": known, "two": Scenario("two", "two", Role.BEYOND)}
    changed = scenarios_of(manifest | {"overrides": ["tiling.bc=2", "seeds=3"]})
    assert changed["one"] == Scenario("one", "uniform inputs", Role.BEYOND)


def test_one_configuration_is_measured_once_under_all_its_labels(bench: Bench, store: Store) -> None:
    assert run(study(point(8, axis="a"), point(8, axis="b")), bench, store).measured == 1
    points = store.studies()["toy"]["points"]
    assert (len(points), len({point["key"] for point in points})) == (2, 1)


class TestResume:
    def test_measures_only_what_is_not_there(self, bench: Bench, store: Store) -> None:
        run(study(point(16), *GRID.points[:4]), bench, store)
        before = contents(store)
        outcome = run(GRID, bench, store)
        assert (outcome.measured, outcome.skipped) == (2, 4)
        assert all(contents(store)[key] == value for key, value in before.items() if key != "toy")
        seconds = {record.key: record.seconds for record in store.records()}
        assert run(GRID, bench, store, fresh=True).measured == 6
        assert {record.key: record.seconds for record in store.records()} != seconds

    def test_measures_torn_records_again(self, bench: Bench, store: Store) -> None:
        run(GRID, bench, store)
        whole = contents(store)
        torn = sorted((store.path / "records").iterdir())[0]
        torn.write_bytes(torn.read_bytes()[:50])
        outcome = run(GRID, bench, store)
        assert (outcome.measured, outcome.skipped) == (1, 5)
        assert store.torn == [torn]
        assert contents(store) == whole

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), StoreError("results: full")])
    def test_keeps_what_it_has_when_it_ends(
        self, bench: Bench, store: Store, monkeypatch: pytest.MonkeyPatch, error: BaseException
    ) -> None:
        put, done = Store.put, list[Record]()

        def ends(self: Store, record: Record) -> None:
            if len(done) == 2:
                raise error
            done.append(record)
            put(self, record)

        monkeypatch.setattr(Store, "put", ends)
        with pytest.raises(type(error)):
            run(GRID, bench, store)
        monkeypatch.undo()
        outcome = run(GRID, bench, store)
        assert (outcome.measured, outcome.skipped) == (4, 2)


@dataclass(frozen=True)
class Steps(runner.Kind):
    """A kind that counts to the number of its seeds, one at a time, and keeps how far it is."""

    operation: Operation = ATTENTION
    breaks_at: int = -1
    name: ClassVar[str] = "steps"

    @property
    def columns(self) -> dict[str, tuple[Column, ...]]:
        return {"steps": (Column("seed", "", "the step", Use.PLACE), Column("first", "", "that this process took"))}

    def run(self, point: Point, context: Context) -> Findings:
        assert context.folder is not None
        kept = context.folder / "step"
        first = int(kept.read_text()) if kept.is_file() else 0
        for seed in context.replicates():
            if seed == self.breaks_at:
                raise KeyboardInterrupt
            if seed >= first:
                context.folder.mkdir(parents=True, exist_ok=True)
                kept.write_text(str(seed + 1))
        return Findings({"steps": [{"seed": seed, "first": first} for seed in range(context.seeds)]})


class TestCheckpoints:
    def test_are_found_by_the_next_run_and_gone_when_the_record_is_stored(self, store: Store) -> None:
        grid = study(replace(point(), seeds=5))
        with pytest.raises(KeyboardInterrupt):
            run(grid, Runner(Steps(breaks_at=3), "cpu"), store)
        assert len(list((store.path / "work").glob("*/step"))) == 1
        run(grid, Runner(Steps(), "cpu"), store)
        (record,) = store.records()
        assert [row["first"] for row in record.rows] == [3] * 5
        assert not list((store.path / "work").iterdir())


class TestFailures:
    def test_are_listed_stop_no_other_point_and_some_are_tried_again(self, bench: Bench, store: Store) -> None:
        statuses = {"nan": "nonfinite", "unsupported": "unsupported", "memory": "out_of_memory", "error": "error"}
        grid = study(point(2), *map(faulty, statuses), point(4))
        outcome = run(grid, bench, store)
        assert (outcome.measured, Status.ERROR in outcome.statuses) == (6, True)
        failures = [(text, status.value) for text, status, _ in outcome.failures]
        assert failures == [(f"default fault={fault}", status) for fault, status in statuses.items()]
        reasons = [reason for _, _, reason in outcome.failures]
        for reason, words in zip(
            reasons, ("NaN", "problem.causal: only without", "fewer", "RuntimeError: deliberate"), strict=True
        ):
            assert words in reason
            assert "\n" not in reason
        again = run(grid, bench, store)
        assert (again.measured, len(again.failures)) == (2, 4), "memory and error alone are measured again, and all are said"
        assert Status.ERROR not in run(study(*map(faulty, list(statuses)[:3])), bench, store).statuses

    def test_a_request_that_cannot_be_measured_is_one(self, bench: Bench, store: Store) -> None:
        long = Problem(Captured(), Shape(queries=512, keys=512, head_dim=32))
        outcome = run(study(replace(point(), problem=long), point(4)), bench, store)
        ((_, status, reason),) = outcome.failures
        assert (outcome.measured, status) == (2, Status.ERROR)
        assert "256 tokens" in reason


class TestShards:
    def test_partition_the_points_and_make_the_whole(self, bench: Bench, store: Store, tmp_path: Path) -> None:
        assert [run(GRID, bench, store, shard=Shard(index, 4)).measured for index in reversed(range(4))] == [1, 1, 2, 2]
        whole = Store(tmp_path / "whole")
        run(GRID, bench, whole)
        assert contents(store) == contents(whole)

    @pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0)])
    def test_bad(self, index: int, count: int) -> None:
        with pytest.raises(BadInput, match="shard"):
            Shard(index, count)


class TestProcesses:
    """How many measure a study."""

    BENCH = Bench(device="cpu")
    MANY = tuple(point(bc, seeds=10) for bc in range(1, 11))

    @pytest.fixture(autouse=True)
    def _eight(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(studies, "usable_cores", lambda: 8)
        monkeypatch.setattr(studies, "available_bytes", lambda _: 1 << 40)

    @pytest.mark.parametrize(
        ("count", "points", "is_alone", "number"),
        [
            (None, MANY, True, 8),
            (None, MANY, False, 1),  # beside other shards
            (None, MANY[:2], True, 1),  # not worth it
            (None, [], True, 1),
            (3, MANY, False, 3),
            (3, MANY[:2], True, 2),
        ],
    )
    def test_is_that_of_the_cores_where_it_is_worth_it_or_as_set(
        self, count: int | None, points: Sequence[StudyPoint], is_alone: bool, number: int
    ) -> None:
        assert studies.processes(count, self.BENCH, points, is_alone=is_alone) == number

    def test_leaves_memory_for_the_largest_point_of_each(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Deviations, "needed_bytes", lambda *_: 1 << 30)
        monkeypatch.setattr(studies, "available_bytes", lambda _: 3 << 30)
        assert studies.processes(None, self.BENCH, self.MANY, is_alone=True) == 3
        assert studies.processes(8, self.BENCH, self.MANY, is_alone=True) == 3

    def test_is_one_for_times_and_where_torch_has_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(BadInput, match="^workers: 2 cannot be used; they measure deviations, on a CPU"):
            studies.processes(2, Runner(Speeds(ATTENTION), "cpu"), [], is_alone=True)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        assert studies.processes(None, self.BENCH, self.MANY, is_alone=True) == 1
        with pytest.raises(BadInput, match="^workers: 2 .* with one thread each; leave out workers, or OMP_NUM_THREADS"):
            studies.processes(2, self.BENCH, self.MANY, is_alone=True)


@pytest.mark.skipif("not hasattr(__import__('os'), 'fork')", reason="needs fork")
@pytest.mark.slow
def test_killed_at_any_moment_it_resumes_to_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "experiments")
    module = importlib.import_module("kill_and_resume")
    toy = (
        "title: A study to be killed\n"
        "base: {problem.n: 16, problem.head_dim: 4, seeds: 1}\n"
        "axes: {precision: [bf16, fp32], tiling.bc: [4, 8, 16], tiling.order: [forward, random]}\n"
    )
    trials = list(module.trials(tmp_path, 5, 0, toy, 12))
    assert len(trials) == 5
    assert all(not trial.different for trial in trials)
    assert any(trial.is_midway for trial in trials)
