"""Metrics of weights against NumPy and SciPy, and the tables of a rung beside its reference."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cosine
from scipy.stats import wasserstein_distance

from numdev.errors import BadInput
from numdev.measurement.runner import Context, Kept, Point, Runner
from numdev.results.record import Record, Status
from numdev.training.run import Run
from numdev.training.rung import APART, Numerics, Rung
from numdev.training.weights import (
    LOSS,
    METRICS,
    MODEL,
    RUN,
    WEIGHTS,
    WeightsOverTraining,
    deviations,
    finished,
    shown,
    weight_deviation,
)
from tests.training.toy import CPU, VANILLA, Toy

REFERENCE = Rung(VANILLA, Numerics.FP32)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 1000), st.integers(1, 300))
def test_each_metric_is_that_of_numpy_and_scipy(seed: int, count: int) -> None:
    tensors = w, w0, i, i0 = [drawn(seed + n, count) for n in range(4)]
    x, y, a, b = (t.double().numpy() for t in (w, w0, i, i0))
    # FP64 sums of n terms in another order: n u of the sum of their sizes, and those are of order 1
    assert weight_deviation(*tensors) == pytest.approx(
        {
            "max_difference": np.abs(x - y).max(),
            "wasserstein": wasserstein_distance(x, y),
            "relative_frobenius": np.linalg.norm(x - y) / np.linalg.norm(y),
            "cosine": 1 - cosine(x, y),
            "change_cosine": 1 - cosine(x - a, y - b),
        },
        rel=1e-12,
        abs=1e-12,
    )
    assert weight_deviation(w, w, i, i) == dict(zip(METRICS, (0.0, 0.0, 0.0, 1.0, 1.0), strict=True))
    permuted = weight_deviation(w.roll(1), w, i, i)
    assert permuted["wasserstein"] == 0
    assert count == 1 or (permuted["max_difference"] > 0 and permuted["cosine"] < 1)
    assert all(map(math.isnan, weight_deviation(w / 0, w, i, i).values()))


def test_every_tensor_and_all_together() -> None:
    now, start = ({"a": drawn(n, 3, 4), "b": drawn(n + 1, 5)} for n in (0, 2))
    other = {"a": now["a"] + 0.25, "b": now["b"].clone()}
    metrics = deviations((other, now, start, start), CPU)
    assert list(metrics) == [MODEL, "a", "b"]
    assert metrics["b"]["max_difference"] == 0 < metrics["a"]["max_difference"] == metrics[MODEL]["max_difference"]
    turned = tuple({name: part[name] for name in ("b", "a")} for part in (other, now, start, start))
    assert list(deviations(turned, CPU).items()) == list(metrics.items())  # a file of tensors has no order
    assert metrics[MODEL] == weight_deviation(
        *(torch.cat([part["a"].flatten(), part["b"]]) for part in (other, now, start, start))
    )
    with pytest.raises(BadInput, match="holds something"):
        weight_deviation(*[torch.zeros(0)] * 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_they_are_those_of_the_cpu() -> None:
    parts = tuple({"w": drawn(n, 10_000_000)} for n in range(4))
    cpu, gpu = deviations(parts, CPU), deviations(parts, torch.device("cuda"))
    for name in cpu:
        # FP64 sums of 1e7 terms: 1e7 u of the sum of sizes at the very most
        assert gpu[name] == pytest.approx(cpu[name], rel=1e-9, abs=1e-9)
        assert gpu[name]["max_difference"] == cpu[name]["max_difference"]


def measured(folder: Path, rung: Rung, task: Any = None, seeds: int = 1, **where: Any) -> Record:
    runner = Runner(WeightsOverTraining(), "cpu")
    return runner.measure(Toy() if task is None else task, rung, REFERENCE, seeds, shared=folder / "runs", **where)


def trained(folder: Path) -> list[Path]:
    return sorted((folder / "runs").glob("*/trained.json"))


def of_model(record: Record) -> list[dict[str, Any]]:
    return [row for row in record.table(WEIGHTS) if row["tensor"] == MODEL]


class TestTables:
    def test_rows_have_the_columns_that_are_stated_and_progress_is_reported(self, tmp_path: Path) -> None:
        reports: list[tuple[int, int, str]] = []
        replicates: list[tuple[int, int]] = []
        where: Any = {"within": lambda *at: reports.append(at), "on_replicate": lambda *at: replicates.append(at)}
        record, task = measured(tmp_path, replace(REFERENCE, init=1), seeds=2, **where), Toy()
        assert (record.kind, record.operation, record.status) == ("training", "training", Status.OK)
        assert list(record.tables) == [WEIGHTS, LOSS, RUN]
        for name, rows in record.tables.items():
            assert {tuple(row) for row in rows} == {tuple(column.name for column in record.columns[name])}
        assert [row["step"] for row in of_model(record)] == [0, 1, 2, 4, 8, 12] * 2
        assert [row["step"] for row in record.table(LOSS)] == [*range(1, 13)] * 2
        assert {row["tensor"] for row in record.table(WEIGHTS)} == {MODEL, *dict(task.model(0).named_parameters())}
        run = record.table(RUN)[0]
        with torch.no_grad():
            untrained = float(task.loss(task.model(APART), task.held_out()))
        assert run["untrained_loss"] == pytest.approx(untrained, rel=1e-6)
        assert untrained > max(run["held_out_loss"], run["baseline_held_out_loss"])
        assert run["held_out_loss"] != run["baseline_held_out_loss"]
        assert (run["calls"], run["missed"], run["stopped"], run["samples"]) == (1, 0, "", "")
        assert replicates == [(1, 2), (2, 2)]
        names = list(dict.fromkeys(text.partition(":")[0] for _, _, text in reports))
        assert names == ["replicate 0", "reference of replicate 0", "replicate 1", "reference of replicate 1"]
        assert all(total == 12 and "loss" in text and "steps/s" in text for _, total, text in reports)

    def test_the_sham_differs_by_nothing_and_is_really_run_and_points_share_the_reference(self, tmp_path: Path) -> None:
        record = measured(tmp_path, replace(REFERENCE, repeat=1))
        before = {path: path.stat().st_mtime_ns for path in trained(tmp_path)}
        assert len(before) == 2
        assert {row["max_difference"] for row in record.table(WEIGHTS)} == {0.0}
        (run,) = record.table(RUN)
        assert (run["same_bits"], run["checksum"]) == (1, run["baseline_checksum"])
        assert [row["loss"] for row in record.table(LOSS)] == [row["baseline_loss"] for row in record.table(LOSS)]
        measured(tmp_path, replace(REFERENCE, ulp=2))
        measured(tmp_path, replace(REFERENCE, repeat=1))
        assert len(trained(tmp_path)) == 3
        assert before.items() <= {path: path.stat().st_mtime_ns for path in trained(tmp_path)}.items()

    @given(st.integers(0, 5000))
    def test_rows_of_losses_are_at_most_five_hundred(self, steps: int) -> None:
        rows = shown(steps)
        assert rows[:50] == [*range(1, min(steps, 50) + 1)]
        assert rows == sorted(set(rows))
        assert len(rows) <= 500
        assert steps == 0 or (rows[0], rows[-1]) == (1, steps)
        assert len({after - before for before, after in pairwise(rows[50:])}) <= 1


class TestRuns:
    def test_another_process_that_trains_the_same_is_waited_for(self, tmp_path: Path) -> None:
        run = Run(Toy(4), REFERENCE)
        own = tmp_path / run.key(CPU)
        own.mkdir()
        waits, texts = threading.Event(), list[str]()

        def within(step: int, total: int, text: str) -> None:
            texts.append(text)
            waits.set()

        context = Context(CPU, 1, Runner(WeightsOverTraining(), "cpu")._kept, within=within)
        job = threading.Thread(target=finished, args=(run, "replicate 0", tmp_path, context))
        with FileLock(own / ".lock"):
            job.start()
            assert waits.wait(30)
            assert texts == ["replicate 0: waits for another process, which trains it"]
            assert not (own / "trained.json").exists()
        job.join(60)
        assert (own / "trained.json").is_file()

    def test_a_folder_that_cannot_be_made_is_one_sentence(self, tmp_path: Path) -> None:
        (tmp_path / "runs").write_text("a file")
        with pytest.raises(BadInput, match="results: .* no run can be kept there"):
            measured(tmp_path, REFERENCE)

    def test_a_loss_that_is_not_finite_ends_the_tables_there(self, tmp_path: Path) -> None:
        record = measured(tmp_path, replace(REFERENCE, init=1), Toy(poison=5))
        assert record.status is Status.NONFINITE
        assert "replicate 0: the run stopped after step 5 of 12" in record.reason
        assert [row["step"] for row in of_model(record)] == [0, 1, 2, 4]
        (run,) = record.table(RUN)
        assert (run["steps_done"], "step 5" in run["stopped"]) == (5, True)
        assert [math.isfinite(row["loss"]) for row in record.table(LOSS)] == [True] * 5 + [False]

    @pytest.mark.parametrize("parts", [(3, REFERENCE, REFERENCE), (Toy(), "x", REFERENCE), (Toy(), REFERENCE, None)])
    def test_only_rungs_of_tasks_are_measured(self, parts: tuple[Any, Any, Any]) -> None:
        kind, point = WeightsOverTraining(), Point(*parts, seeds=1)
        assert kind.config(point)["seeds"] == 1  # what a study refuses has a key too
        with pytest.raises(BadInput, match=r"problem: 'int'|variant: 'x'|baseline: 'NoneType'"):
            kind.run(point, Context(CPU, 1, Kept(0)))
