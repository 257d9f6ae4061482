from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from numdev.api import Bench
from numdev.arithmetic.formats import BF16, Format
from numdev.attention.base import Output
from numdev.attention.baseline import baseline_for
from numdev.attention.captured import Captured
from numdev.attention.distributions import Distribution, Kind
from numdev.attention.exact import Exact
from numdev.attention.mask import Mask
from numdev.attention.operation import ATTENTION
from numdev.attention.precision import Precision
from numdev.attention.problem import Problem, Shape
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Tiling
from numdev.errors import BadInput, Unsupported
from numdev.measurement import runner
from numdev.measurement.operation import Operation
from numdev.measurement.runner import Context, Findings, Point, Runner
from numdev.results.manifest import Role, Scenario, is_old, scenarios_of
from numdev.results.record import Column, Record, Status, Use
from numdev.results.store import Store, StoreError
from numdev.results.study import Replaced, Shard, Study, StudyPoint, replaced, run

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
class Faulty:
    """An attention that does not come to an end; `fault` says how."""

    fault: str

    @property
    def formats(self) -> dict[str, Format]:
        return {"out": BF16}

    @property
    def input_key(self) -> str:
        return "as they are"

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v

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


class TestRun:
    def test_measures_every_point(self, bench: Bench, store: Store) -> None:
        outcome = run(GRID, bench, store)
        assert (outcome.measured, outcome.skipped, outcome.failures) == (6, 0, [])
        keys = {bench.key(p.problem, p.variant, p.baseline, p.seeds) for p in GRID.points}
        assert {record.key for record in store.records()} == keys
        assert outcome.seconds == pytest.approx(sum(record.seconds for record in store.records()))

    def test_writes_the_scenarios_of_its_points(self, bench: Bench, store: Store) -> None:
        known = Scenario("one", "uniform inputs", Role.ASSUMED)
        points = tuple(replace(point(bc), scenario=name) for bc, name in ((2, "one"), (4, "two"), (8, "one")))
        run(replace(study(*points), scenarios=(known, Scenario("unused", "none"))), bench, store)
        manifest = store.studies()["toy"]
        assert [p["scenario"] for p in manifest["points"]] == ["one", "two", "one"]
        assert scenarios_of(manifest) == {"one": known, "two": Scenario("two", "two", Role.BEYOND)}
        changed = scenarios_of(manifest | {"overrides": ["tiling.bc=2", "seeds=3"]})
        assert changed["one"] == Scenario("one", "uniform inputs, with overrides: tiling.bc=2 seeds=3", Role.BEYOND)

    def test_replaces_what_an_older_numdev_stored(self, bench: Bench, store: Store) -> None:
        old = {"name": "toy", "claims": [], "points": [{"key": "k", "setting": "uniform_each", "labels": {}}]}
        store.put_study("toy", old)
        assert is_old(store.studies()["toy"])
        assert replaced(GRID, bench, store) == Replaced(1, 6, 0)
        run(GRID, bench, store)
        assert not is_old(store.studies()["toy"])
        assert replaced(GRID, bench, store) is None

    def test_writes_the_manifest_in_the_order_of_the_grid(self, bench: Bench, store: Store) -> None:
        run(GRID, bench, store)
        manifest = store.studies()["toy"]
        assert {name: manifest[name] for name in ("name", "title", "figure", "claims")} == {
            "name": "toy",
            "title": "A toy",
            "figure": "figure",
            "claims": ["claim"],
        }
        assert [p["labels"] for p in manifest["points"]] == [p.labels for p in GRID.points]
        for described, given in zip(manifest["points"], GRID.points, strict=True):
            assert described["key"] == bench.key(given.problem, given.variant, given.baseline, given.seeds)

    def test_measures_points_of_one_problem_together(self, bench: Bench, store: Store) -> None:
        order: list[Problem] = []
        run(GRID, bench, store, progress=lambda done, total, point: order.append(point.problem))
        assert [problem.source.kind for problem in order] == [Kind.UNIFORM] * 3 + [Kind.NORMAL] * 3  # type: ignore[attr-defined]

    def test_measures_one_configuration_once_under_all_its_labels(self, bench: Bench, store: Store) -> None:
        outcome = run(study(point(8, axis="a"), point(8, axis="b")), bench, store)
        assert outcome.measured == 1
        keys = {p["key"] for p in store.studies()["toy"]["points"]}
        assert len(keys) == 1
        assert len(store.studies()["toy"]["points"]) == 2


class Ahead(Bench):
    """Is told what comes."""

    def announce(self, points: Iterable[tuple[Any, Any]]) -> None:
        self.announced = list(points)


class TestAnnounced:
    def test_what_will_be_measured_in_its_order(self, store: Store) -> None:
        bench, measured = Ahead(Exact(), "cpu"), []
        run(GRID, bench, store, progress=lambda done, total, point: measured.append(point))
        assert bench.announced == [(point.problem, point.variant) for point in measured]
        assert len(measured) == 6

    def test_only_what_the_store_lacks_and_the_shard_has(self, store: Store) -> None:
        bench = Ahead(Exact(), "cpu")
        run(GRID, bench, store, shard=Shard(0, 2))
        assert len(bench.announced) == 3
        first = bench.announced
        run(GRID, bench, store)
        assert len(bench.announced) == 3
        assert not [point for point in bench.announced if point in first]
        run(GRID, bench, store, fresh=True)
        assert len(bench.announced) == 6


class CountingStore(Store):
    """A store that keeps which records were read from it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read: list[str] = []

    def get(self, key: str) -> Record | None:
        found = super().get(key)
        if found is not None:
            self.read.append(key)
        return found


class TestResume:
    def test_skips_what_is_there(self, bench: Bench, store: Store) -> None:
        run(study(*GRID.points[:4]), bench, store)
        before = contents(store)
        outcome = run(GRID, bench, store)
        assert (outcome.measured, outcome.skipped) == (2, 4)
        assert all(contents(store)[key] == value for key, value in before.items() if key != "toy")
        assert run(GRID, bench, store).skipped == 6

    def test_reads_each_record_once(self, store: Store) -> None:
        bench, counting = Ahead(Exact(), "cpu"), CountingStore(store.path)
        run(study(*GRID.points[:4]), bench, store)
        assert run(GRID, bench, counting).skipped == 4
        assert len(bench.announced) == 2
        assert len(counting.read) == len(set(counting.read)) == 4
        assert run(GRID, bench, counting, fresh=True).skipped == 0
        assert (len(bench.announced), len(counting.read)) == (6, 4)

    def test_measures_again_where_it_is_told_to(self, bench: Bench, store: Store) -> None:
        run(GRID, bench, store)
        before = {record.key: record.seconds for record in store.records()}
        assert run(GRID, bench, store, fresh=True).measured == 6
        assert {record.key: record.seconds for record in store.records()} != before

    def test_measures_torn_records_again(self, bench: Bench, store: Store) -> None:
        run(GRID, bench, store)
        whole = contents(store)
        torn = sorted((store.path / "records").iterdir())[0]
        torn.write_bytes(torn.read_bytes()[:50])
        outcome = run(GRID, bench, store)
        assert (outcome.measured, outcome.skipped) == (1, 5)
        assert store.torn == [torn]
        assert contents(store) == whole

    def test_ignores_the_records_of_other_studies(self, bench: Bench, store: Store) -> None:
        run(study(point(16)), bench, store)
        assert run(GRID, bench, store).measured == 6

    def test_keeps_what_it_has_when_interrupted(self, bench: Bench, store: Store) -> None:
        def interrupt(done: int, total: int, point: StudyPoint) -> None:
            if done == 4:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(GRID, bench, store, progress=interrupt)
        assert len(list(store.records())) == 4
        assert run(GRID, bench, store).measured == 2

    def test_keeps_what_it_has_when_the_disk_is_full(self, bench: Bench, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        put = Store.put
        done: list[Any] = []

        def fills_up(self: Store, record: Any) -> None:
            if len(done) == 2:
                raise StoreError("results: full")
            done.append(record)
            put(self, record)

        monkeypatch.setattr(Store, "put", fills_up)
        with pytest.raises(StoreError):
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
    def test_are_listed_and_stop_no_other_point(self, bench: Bench, store: Store) -> None:
        faults = ("nan", "unsupported", "memory", "error")
        outcome = run(study(point(2), *(faulty(fault) for fault in faults), point(4)), bench, store)
        assert outcome.measured == 6
        expected = (Status.NONFINITE, Status.UNSUPPORTED, Status.OUT_OF_MEMORY, Status.ERROR)
        assert [(text, status) for text, status, _ in outcome.failures] == [
            (f"default fault={fault}", status) for fault, status in zip(faults, expected, strict=True)
        ]
        reasons = [reason for _, _, reason in outcome.failures]
        assert "NaN" in reasons[0]
        assert reasons[1] == "problem.causal: only without"
        assert "fewer" in reasons[2]
        assert reasons[3].startswith("RuntimeError: deliberate")
        assert all("\n" not in reason for reason in reasons)

    def test_only_an_error_makes_the_run_fail(self, bench: Bench, store: Store) -> None:
        assert not run(study(*(faulty(fault) for fault in ("nan", "unsupported", "memory"))), bench, store).has_errors
        assert run(study(faulty("error")), bench, store).has_errors

    def test_a_request_that_cannot_be_measured_is_one(self, bench: Bench, store: Store) -> None:
        long = Problem(Captured(), Shape(queries=512, keys=512, head_dim=32))
        outcome = run(study(replace(point(), problem=long), point(4)), bench, store)
        assert outcome.measured == 2
        ((_, status, reason),) = outcome.failures
        assert status is Status.ERROR
        assert "256 tokens" in reason

    @pytest.mark.parametrize(("fault", "again"), [("nan", False), ("unsupported", False), ("memory", True), ("error", True)])
    def test_some_are_tried_again(self, bench: Bench, store: Store, fault: str, again: bool) -> None:
        run(study(faulty(fault)), bench, store)
        outcome = run(study(faulty(fault)), bench, store)
        assert outcome.measured == int(again)
        assert len(outcome.failures) == 1  # said again, measured or not


class TestShards:
    @pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 9])
    def test_partition_the_points(self, bench: Bench, tmp_path: Path, count: int) -> None:
        keys: list[set[str]] = []
        for index in range(count):
            part = Store(tmp_path / str(index))
            run(GRID, bench, part, shard=Shard(index, count))
            keys.append({record.key for record in part.records()})
        assert sum(map(len, keys)) == len(set().union(*keys)) == 6
        assert max(map(len, keys)) - min(map(len, keys)) <= 1

    def test_into_one_store_make_the_whole(self, bench: Bench, store: Store, tmp_path: Path) -> None:
        for index in (2, 0, 1):
            run(GRID, bench, store, shard=Shard(index, 3))
        whole = Store(tmp_path / "whole")
        run(GRID, bench, whole)
        assert contents(store) == contents(whole)

    @pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0)])
    def test_bad(self, index: int, count: int) -> None:
        with pytest.raises(BadInput, match="shard"):
            Shard(index, count)


class TestReplaced:
    def test_nothing_where_every_point_is_kept(self, bench: Bench, store: Store) -> None:
        few, own = study(*GRID.points[:2]), Store(store.path / "few")
        assert replaced(GRID, bench, store) is None
        run(few, bench, own)
        assert replaced(few, bench, own) is None
        assert replaced(GRID, bench, own) is None

    def test_fewer_points(self, bench: Bench, store: Store) -> None:
        run(GRID, bench, store)
        assert replaced(study(*GRID.points[:2]), bench, store) == Replaced(stored=6, ours=2, shared=2)

    def test_points_of_another_configuration_under_the_same_labels(self, bench: Bench, store: Store) -> None:
        run(GRID, bench, store)
        changed = study(*(replace(p, seeds=2 if i else 1) for i, p in enumerate(GRID.points)))
        assert replaced(changed, bench, store) == Replaced(stored=6, ours=6, shared=1)

    def test_nothing_in_another_environment(self, bench: Bench, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        run(GRID, bench, store)
        monkeypatch.setattr(Bench, "environment", lambda self: {"device": "another"})
        assert bench.key(*what(GRID.points[0])) != store.studies()["toy"]["points"][0]["key"]
        assert replaced(GRID, bench, store) is None


def what(given: StudyPoint) -> tuple[Any, Any, Any, int]:
    return given.problem, given.variant, given.baseline, given.seeds


def experiment(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "experiments" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where its dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif("not hasattr(__import__('os'), 'fork')", reason="needs fork")
@pytest.mark.slow
def test_killed_at_any_moment_it_resumes_to_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = experiment("kill_and_resume", monkeypatch)
    toy = (
        "title: A study to be killed\n"
        "base: {problem.n: 16, problem.head_dim: 4, seeds: 1}\n"
        "axes: {precision: [bf16, fp32], tiling.bc: [4, 8, 16], tiling.order: [forward, random]}\n"
    )
    trials = list(module.trials(tmp_path, 5, 0, toy, 12))
    assert len(trials) == 5
    assert all(not trial.different for trial in trials)
    assert any(trial.is_midway for trial in trials)
    record = next((tmp_path / "trial0" / "untimed" / "records").glob("*.json"))
    record.write_bytes(record.read_bytes().replace(b'"seed":0', b'"seed":7'))
    different: Callable[[Path, Path], Any] = module._different  # the comparison sees a single changed number
    assert list(different(tmp_path / "whole", tmp_path / "trial0")) == [f"untimed/records/{record.name}"]
