"""Studies measured by several processes: the same records, the same words, whatever happens to one of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numdev.api import Bench, speed_bench
from numdev.attention.distributions import Distribution
from numdev.attention.emulation import baseline_for
from numdev.attention.precision import Precision
from numdev.attention.problem import Problem, Shape
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Tiling
from numdev.cli import pooled
from numdev.cli.progress import Progress as Bar
from numdev.errors import BadInput, StoreError
from numdev.measurement.runner import Runner
from numdev.results.record import Record
from numdev.results.store import Store
from numdev.results.study import StudyPoint
from tests.cli.test_cli import Command, numdev, toy_configs

__all__ = ["numdev", "toy_configs"]  # the fixtures
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")

WHOLE = """\
title: Several problems
base: {problem.head_dim: 8, seeds: 1}
axes: {precision: [bf16, fp32], problem.n: [16, 24, 32], attention: [tiled, triton]}
"""
POINTS = 12  # of which triton cannot run half without a GPU


def kept(results: str) -> dict[str, bytes]:
    """Every file of a folder of results; records without their time."""
    found = {str(path.relative_to(results)): path.read_bytes() for path in Path(results).rglob("*.json")}
    for record in Store(Path(results)).records():
        found[f"records/{record.key}.json"] = replace(record, seconds=0.0).to_json()
    return found


@pytest.fixture
def several(toy_configs: Path) -> Path:
    (toy_configs / "study" / "several.yaml").write_text(WHOLE)
    return toy_configs


def test_no_byte_of_a_study_depends_on_the_number_of_workers(numdev: Command, several: Path) -> None:
    """Neither a record nor a manifest nor the summary, also of points that are unsupported."""
    said, found = [], []
    for workers in ("1", "2"):
        command = ("measure", "--config-dir", str(several), "study=several", "device=cpu")
        ran = numdev(*command, f"workers={workers}", f"results=r{workers}")
        assert ran.code == 0, ran.err
        said.append(ran.out.replace(ran.out.split(" measured in ")[1].split(" s")[0], "TIME", 1))
        found.append(kept(f"r{workers}"))
        assert {record.environment["threads"] for record in Store(Path(f"r{workers}")).records()} == {"1"}
    assert len(found[0]) == POINTS + 1
    assert said == [said[0]] * 2
    assert found == [found[0]] * 2


def test_points_that_are_there_are_left_and_studies_share_them(numdev: Command, several: Path) -> None:
    one = ("measure", "--config-dir", str(several), "study=several", "device=cpu", "workers=2")
    assert numdev(*one, "problem.n=16").code == 0
    first = next((Path("results") / "records").glob("*.json"))
    before = first.stat().st_mtime_ns
    assert "8 measured in" in (ran := numdev(*one)).out
    assert "4 already there" in ran.out
    assert first.stat().st_mtime_ns == before
    assert f"{POINTS} measured in" in numdev(*one, "fresh=true").out
    assert first.stat().st_mtime_ns > before


def test_a_mistake_of_a_worker_ends_the_command_as_its_own_would(
    numdev: Command, several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("measure", "--config-dir", str(several), "study=several", "device=cpu", "workers=2")
    whole = Store.put

    def full(self: Store, record: Record) -> None:
        raise StoreError("results: the disk is full")

    monkeypatch.setattr(Store, "put", full)
    ran = numdev(*command)
    assert (ran.code, ran.err.splitlines()[-1]) == (2, "results: the disk is full")
    monkeypatch.setattr(Store, "put", whole)
    monkeypatch.setattr(Runner, "measure", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    ran = numdev(*command)
    assert ran.code == 1
    assert ran.err.splitlines()[-1].startswith("workers: one of them was killed; ")


def test_ctrl_c_keeps_what_is_measured(numdev: Command, several: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Bar.point

    def interrupted(self: Bar, done: int, text: str = "") -> None:
        shown(self, done, text)
        if done >= 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Bar, "point", interrupted)
    command = ("measure", "--config-dir", str(several), "study=several", "device=cpu")
    ran = numdev(*command, "workers=2")
    assert ran.code == 130
    words = ran.err.splitlines()[-1]
    kept_points = int(words.removeprefix("interrupted; ").split()[0])
    assert words == f"interrupted; {kept_points} points kept, run the same command to continue"
    assert len(list(Store(Path("results")).records())) >= kept_points >= 5
    assert not list(Path("results").rglob("*.tmp"))
    assert not multiprocessing.active_children()
    monkeypatch.setattr(Bar, "point", shown)
    assert numdev(*command, "workers=2").code == numdev(*command, "workers=1", "results=whole").code == 0
    assert kept("results") == kept("whole")


def test_a_point_that_needs_much_memory_is_measured_alone(
    numdev: Command, several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("measure", "--config-dir", str(several), "study=several", "device=cpu")
    here, runs = os.getpid(), list[object]()
    whole = Runner.measure

    def counted(self: Runner, *given: Any, **where: Any) -> Record:
        if os.getpid() == here:
            runs.append(given)
        return whole(self, *given, **where)

    monkeypatch.setattr(Runner, "measure", counted)
    monkeypatch.setattr(pooled, "needed_bytes", lambda kind, problem, variant: problem.shape.keys)
    monkeypatch.setattr(pooled, "available_bytes", lambda _: 2 * 2 * 24)  # a worker's point may need half of its share
    assert numdev(*command, "workers=2").code == 0
    assert len(runs) == POINTS / 3
    assert len(list(Store(Path("results")).records())) == POINTS


def test_gradients_and_functions_of_the_user_are_measured_by_workers(numdev: Command, toy_configs: Path) -> None:
    """Torch computes gradients on threads of its own, and a function's file lies beside the configuration."""
    Path("mine.py").write_text("def attend(q, k, v, mask, scale):\n    return (q @ k.mT * (scale or 1)).softmax(-1) @ v\n")
    toy = "title: T\nbase: {problem.n: 16, problem.head_dim: 4, seeds: 1, BASE}\naxes: {precision: [bf16, fp16], AXIS}\n"
    own = toy.replace("BASE", "attention: custom, attention.function: 'mine:attend'").replace(
        "AXIS", "problem: [uniform, normal]"
    )
    (toy_configs / "study" / "own.yaml").write_text(own)
    gradients = toy.replace(", BASE", "").replace("AXIS", "backward: [tiled, naive]")
    (toy_configs / "study" / "backwards.yaml").write_text(gradients)
    for study, operation in (("own", "attention"), ("backwards", "attention_backward")):
        command = ("measure", "--config-dir", str(toy_configs), f"study={study}", f"operation={operation}", "device=cpu")
        ran = numdev(*command, "workers=2", f"results={study}2")
        assert ran.code == 0, ran.err
    assert numdev(*command, "workers=1", f"results={study}1").code == 0
    assert kept(f"{study}1") == kept(f"{study}2")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["study=toy", "workers=0"], "at least 1"),
        (["workers=2"], "give study= too"),
        (["study=toy", "workers=two"], "whole number"),
    ],
)
def test_workers_that_cannot_be_had_are_refused(numdev: Command, toy_configs: Path, settings: list[str], words: str) -> None:
    ran = numdev("measure", "--config-dir", str(toy_configs), *settings, "device=cpu")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("workers: ")
    assert words in ran.err


def test_speed_takes_none() -> None:
    with pytest.raises(BadInput, match="^workers: 2 cannot be used; they measure deviations, on a CPU"):
        pooled.number(2, speed_bench("cpu"), [], alone=True)


def point(n: int, bc: int = 8, seeds: int = 1) -> StudyPoint:
    variant = Tiled(Precision.parse("bf16"), Tiling(bc=bc))
    return StudyPoint(Problem(Distribution(), Shape(queries=n, keys=n, head_dim=4)), variant, baseline_for(variant.format), seeds)


class TestNumber:
    BENCH = Bench(device="cpu")
    MANY = tuple(point(1024, bc) for bc in range(1, 41))

    @pytest.fixture(autouse=True)
    def _eight(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pooled, "usable_cores", lambda: 8)
        monkeypatch.setattr(pooled, "available_bytes", lambda _: 1 << 40)

    def test_is_that_of_the_cores_where_it_is_worth_it(self) -> None:
        assert pooled.number(None, self.BENCH, self.MANY, alone=True) == 8
        assert pooled.number(None, self.BENCH, [point(16, bc) for bc in range(1, 41)], alone=True) == 1
        assert pooled.number(None, self.BENCH, [point(16, bc, seeds=10) for bc in range(1, 41)], alone=True) == 8
        assert pooled.number(None, self.BENCH, [point(16384), point(8192)], alone=True) == 2
        assert pooled.number(None, self.BENCH, [], alone=True) == 1

    def test_is_one_beside_other_shards_and_where_torch_has_threads(self) -> None:
        assert pooled.number(None, self.BENCH, self.MANY, alone=False) == 1
        torch.set_num_threads(2)
        try:
            assert pooled.number(None, self.BENCH, self.MANY, alone=True) == 1
            with pytest.raises(BadInput, match="^workers: 2 .* with one thread each; leave out workers, or OMP_NUM_THREADS"):
                pooled.number(2, self.BENCH, self.MANY, alone=True)
        finally:
            torch.set_num_threads(1)

    def test_leaves_memory_for_each(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pooled, "available_bytes", lambda _: 3 << 30)
        assert pooled.number(None, self.BENCH, self.MANY, alone=True) == 3

    def test_is_as_stated(self) -> None:
        assert pooled.number(3, self.BENCH, self.MANY, alone=False) == 3
        assert pooled.number(3, self.BENCH, self.MANY[:2], alone=True) == 2


def test_torch_has_one_thread_unless_the_user_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(device="cpu")
    torch.set_num_threads(2)
    try:
        for stated, threads in (("", 1), ("2", 2)):
            monkeypatch.setenv(pooled.THREADS, stated)
            with pooled.one_thread(bench):
                assert torch.get_num_threads() == threads
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@given(st.lists(st.tuples(st.sampled_from([16, 32, 64]), st.integers(1, 3)), min_size=1, max_size=20), st.integers(1, 5))
def test_each_point_is_in_one_task_with_others_of_its_problem(drawn: list[tuple[int, int]], count: int) -> None:
    """And no task has more than a half of what each worker has in all, unless a point alone has more."""
    points = [(f"key {bc}", point(n, bc, seeds)) for bc, (n, seeds) in enumerate(sorted(drawn), 1)]
    bench = Bench(device="cpu")
    sizes = {key: one.seeds * bench.kind.operation.workload.size(one.problem)[-1] for key, one in points}
    tasks = pooled.tasks(points, bench, count)
    of_tasks = [sum(sizes[key] for key, _ in task) for task in tasks]
    assert sorted(item[0] for task in tasks for item in task) == sorted(sizes)
    assert of_tasks == sorted(of_tasks, reverse=True)
    for task, size in zip(tasks, of_tasks, strict=True):
        assert len({one.problem for _, one in task}) == 1
        assert len(task) == 1 or size <= sum(sizes.values()) / (2 * count) * (1 + 1e-9)
