"""Metrics of weights against NumPy and SciPy, and the tables of a rung beside its reference."""

from __future__ import annotations

import fcntl
import math
import os
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from scipy.spatial.distance import cosine
from scipy.stats import wasserstein_distance

from numdev.errors import BadInput
from numdev.measurement.runner import Context, Kept, Point, Runner
from numdev.results.record import Record, Status
from numdev.training.run import Run
from numdev.training.rung import Numerics, Rung
from numdev.training.runs import Runs, contact_sheet
from numdev.training.weights import (
    LOSS,
    METRICS,
    MODEL,
    RUN,
    WEIGHTS,
    WeightDeviation,
    Weights,
    WeightsOverTraining,
    deviations,
    shown,
)
from tests.training.toy import VANILLA, Toy

CPU = torch.device("cpu")


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 1000), st.integers(1, 300))
def test_each_metric_is_that_of_numpy_and_scipy(seed: int, count: int) -> None:
    tensors = w, w0, i, i0 = [drawn(seed + n, count) for n in range(4)]
    found = WeightDeviation.between(*tensors)
    x, y, a, b = (t.double().numpy() for t in (w, w0, i, i0))
    assert found.max_difference == np.abs(x - y).max()
    # FP64 sums of n terms in another order: n u of the sum of their sizes, and those are of order 1
    assert found.wasserstein == pytest.approx(wasserstein_distance(x, y), rel=1e-12, abs=1e-12)
    assert found.relative_frobenius == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(y), rel=1e-12)
    assert found.cosine == pytest.approx(1 - cosine(x, y), abs=1e-12)
    assert found.change_cosine == pytest.approx(1 - cosine(x - a, y - b), abs=1e-12)


@given(st.integers(0, 1000), st.integers(2, 300))
def test_the_same_weights_deviate_by_exactly_0(seed: int, count: int) -> None:
    w, i = drawn(seed, count), drawn(seed + 1, count)
    assert WeightDeviation.between(w, w, i, i) == WeightDeviation(0.0, 0.0, 0.0, 1.0, 1.0)


@given(st.integers(0, 1000), st.integers(2, 300))
def test_a_permutation_is_seen_by_all_but_wasserstein(seed: int, count: int) -> None:
    w = drawn(seed, count)
    found = WeightDeviation.between(w.roll(1), w, torch.zeros_like(w), torch.zeros_like(w))
    assert found.wasserstein == 0
    assert found.max_difference > 0
    assert found.relative_frobenius > 0
    assert found.cosine < 1


def test_weights_that_are_not_finite_have_no_metrics() -> None:
    w = drawn(0, 10)
    found = WeightDeviation.between(w / 0, w, w, w).metrics()
    assert set(found) == set(METRICS)
    assert all(map(math.isnan, found.values()))


def test_every_tensor_and_all_together() -> None:
    now, start = ({"a": drawn(n, 3, 4), "b": drawn(n + 1, 5)} for n in (0, 2))
    other = {"a": now["a"] + 0.25, "b": now["b"].clone()}
    found = deviations(Weights(other, start), Weights(now, start), CPU)
    assert list(found) == [MODEL, "a", "b"]
    assert found["b"].max_difference == 0 < found["a"].max_difference == found[MODEL].max_difference
    turned = [{name: part[name] for name in ("b", "a")} for part in (other, now, start)]
    again = deviations(Weights(turned[0], turned[2]), Weights(turned[1], turned[2]), CPU)
    assert list(again.items()) == list(found.items())  # a file of tensors has no order
    both = [torch.cat([part["a"].flatten(), part["b"]]) for part in (other, now, start, start)]
    assert found[MODEL] == WeightDeviation.between(*both)


def test_weights_of_other_models_are_refused() -> None:
    a, b = {"a": drawn(0, 3)}, {"a": drawn(0, 4)}
    with pytest.raises(BadInput, match="runs of the same task"):
        deviations(Weights(a, a), Weights(b, b), CPU)
    with pytest.raises(BadInput, match="holds something"):
        WeightDeviation.between(*[torch.zeros(0)] * 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_they_are_those_of_the_cpu() -> None:
    parts = [{"w": drawn(n, 10_000_000)} for n in range(4)]
    args = Weights(parts[0], parts[2]), Weights(parts[1], parts[3])
    cpu, gpu = deviations(*args, CPU), deviations(*args, torch.device("cuda"))
    for name in cpu:
        # FP64 sums of 1e7 terms: 1e7 u of the sum of sizes at the very most
        assert gpu[name].metrics() == pytest.approx(cpu[name].metrics(), rel=1e-9, abs=1e-9)
        assert gpu[name].max_difference == cpu[name].max_difference


REFERENCE = Rung(VANILLA, Numerics.FP32)
CPU = torch.device("cpu")


def measured(folder: Path, rung: Rung, task: Any = None, seeds: int = 1, **where: Any) -> Record:
    runner = Runner(WeightsOverTraining(), "cpu")
    return runner.measure(Toy() if task is None else task, rung, REFERENCE, seeds, shared=folder / "runs", **where)


def trained(folder: Path) -> list[Path]:
    return sorted((folder / "runs").glob("*/trained.json"))


def of_model(record: Record) -> list[dict[str, Any]]:
    return [row for row in record.table(WEIGHTS) if row["tensor"] == MODEL]


class TestTables:
    def test_rows_have_the_columns_that_are_stated(self, tmp_path: Path) -> None:
        record = measured(tmp_path, replace(REFERENCE, init=1), seeds=2)
        assert (record.kind, record.operation, record.status) == ("training", "training", Status.OK)
        assert list(record.tables) == [WEIGHTS, LOSS, RUN]
        for name, rows in record.tables.items():
            assert {tuple(row) for row in rows} == {tuple(column.name for column in record.columns[name])}
        assert [row["step"] for row in of_model(record)] == [0, 1, 2, 4, 8, 12] * 2
        assert [row["step"] for row in record.table(LOSS)] == [*range(1, 13)] * 2
        assert {row["tensor"] for row in record.table(WEIGHTS)} == {MODEL, *dict(Toy().model(0).named_parameters())}

    def test_the_sham_differs_by_nothing_and_is_really_run(self, tmp_path: Path) -> None:
        record = measured(tmp_path, replace(REFERENCE, repeat=1))
        assert len(trained(tmp_path)) == 2
        assert {row["max_difference"] for row in record.table(WEIGHTS)} == {0.0}
        (run,) = record.table(RUN)
        assert (run["same_bits"], run["checksum"]) == (1, run["baseline_checksum"])
        assert [row["loss"] for row in record.table(LOSS)] == [row["baseline_loss"] for row in record.table(LOSS)]

    def test_one_last_place_is_there_from_the_start(self, tmp_path: Path) -> None:
        record = measured(tmp_path, replace(REFERENCE, ulp=1))
        first = {row["tensor"]: row["max_difference"] for row in record.table(WEIGHTS) if row["step"] == 0}
        ((name, moved),) = [(name, value) for name, value in first.items() if value and name != MODEL]
        weight = dict(Toy().model(0).named_parameters())[name].detach().reshape(-1)[0]
        assert moved == first[MODEL] == float((weight.nextafter(weight.sign() * math.inf) - weight).abs())

    def test_held_out_losses_are_those_of_the_last_weights(self, tmp_path: Path) -> None:
        record = measured(tmp_path, replace(REFERENCE, order=1))
        (run,) = record.table(RUN)
        task = Toy()
        with torch.no_grad():
            assert run["untrained_loss"] == pytest.approx(float(task.loss(task.model(0), task.held_out())), rel=1e-6)
        assert run["held_out_loss"] != run["baseline_held_out_loss"]
        assert run["held_out_loss"] < run["untrained_loss"]
        assert (run["calls"], run["missed"], run["stopped"], run["samples"]) == (1, 0, "", "")

    @given(st.integers(0, 5000))
    def test_rows_of_losses_are_at_most_five_hundred(self, steps: int) -> None:
        rows = shown(steps)
        assert rows[:50] == [*range(1, min(steps, 50) + 1)]
        assert rows == sorted(set(rows))
        assert len(rows) <= 500
        assert steps == 0 or (rows[0], rows[-1]) == (1, steps)
        gaps = {after - before for before, after in pairwise(rows[50:])}
        assert len(gaps) <= 1


class TestRuns:
    def test_points_share_the_reference(self, tmp_path: Path) -> None:
        measured(tmp_path, replace(REFERENCE, ulp=1))
        before = {path: path.stat().st_mtime_ns for path in trained(tmp_path)}
        measured(tmp_path, replace(REFERENCE, ulp=2))
        measured(tmp_path, replace(REFERENCE, ulp=1))
        assert len(before) == 2
        assert len(trained(tmp_path)) == 3
        assert before.items() <= {path: path.stat().st_mtime_ns for path in trained(tmp_path)}.items()

    def test_progress_is_told_with_loss_and_rate(self, tmp_path: Path) -> None:
        reports: list[tuple[int, int, str]] = []
        replicates: list[tuple[int, int]] = []
        where: Any = {"within": lambda *at: reports.append(at), "told": lambda *at: replicates.append(at)}
        measured(tmp_path, replace(REFERENCE, init=1), seeds=2, **where)
        assert replicates == [(1, 2), (2, 2)]
        names = list(dict.fromkeys(text.partition(":")[0] for _, _, text in reports))
        assert names == ["replicate 0", "reference of replicate 0", "replicate 1", "reference of replicate 1"]
        assert all(total == 12 and "loss" in text and "steps/s" in text for _, total, text in reports)
        assert (12, 12) in {at[:2] for at in reports}

    def test_another_process_that_trains_the_same_is_waited_for(self, tmp_path: Path) -> None:
        run = Run(Toy(4), REFERENCE, 0)
        own = tmp_path / run.key(CPU)
        own.mkdir()
        other = os.open(own / ".lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(other, fcntl.LOCK_EX)
        waits = threading.Event()
        said: list[str] = []

        def within(step: int, total: int, text: str) -> None:
            said.append(text)
            waits.set()

        job = threading.Thread(target=Runs(tmp_path, CPU, within).finished, args=(run, "replicate 0"))
        job.start()
        assert waits.wait(30)
        assert said == ["replicate 0: waits for another process, which trains it"]
        assert not (own / "trained.json").exists()
        os.close(other)
        job.join(60)
        assert (own / "trained.json").is_file()

    def test_a_folder_that_cannot_be_made_is_one_sentence(self, tmp_path: Path) -> None:
        (tmp_path / "runs").write_text("a file")
        with pytest.raises(BadInput, match="results: .* no run can be kept there"):
            measured(tmp_path, REFERENCE)


class TestWhatGoesWrong:
    def test_a_loss_that_is_not_finite_ends_the_tables_there(self, tmp_path: Path) -> None:
        record = measured(tmp_path, replace(REFERENCE, init=1), Toy(poison=5))
        assert record.status is Status.NONFINITE
        assert "replicate 0: the run stopped after step 5 of 12" in record.reason
        assert [row["step"] for row in of_model(record)] == [0, 1, 2, 4]
        (run,) = record.table(RUN)
        assert (run["steps_done"], "step 5" in run["stopped"]) == (5, True)
        losses = [row["loss"] for row in record.table(LOSS)]
        assert len(losses) == 6
        assert all(map(math.isfinite, losses[:5]))
        assert not math.isfinite(losses[5])

    @pytest.mark.parametrize("parts", [(3, REFERENCE, REFERENCE), (Toy(), "x", REFERENCE), (Toy(), REFERENCE, None)])
    def test_only_rungs_of_tasks_are_measured(self, parts: tuple[Any, Any, Any]) -> None:
        kind, point = WeightsOverTraining(), Point(*parts, seeds=1)
        assert kind.config(point)["seeds"] == 1  # what a study refuses has a key too
        with pytest.raises(BadInput, match=r"problem: 'int'|variant: 'x'|baseline: 'NoneType'"):
            kind.run(point, Context(CPU, 1, Kept(0)))


class TestPictures:
    def test_pictures_stand_in_rows(self, tmp_path: Path) -> None:
        pictures = torch.linspace(-1, 1, 10).reshape(10, 1, 1, 1).expand(10, 3, 4, 4)
        (tmp_path / "a.png").write_bytes(contact_sheet(pictures))
        read = torch.from_numpy(imread(tmp_path / "a.png")[::3, ::3, 0])
        assert read.shape == (4 + 2 + 4, 8 * 6 - 2)
        shown = [float(read[6 * (place // 8), 6 * (place % 8)]) for place in range(10)]
        assert shown == pytest.approx([place / 9 for place in range(10)], abs=1 / 255)
        assert float(read[6, 12]) == 1.0, "what no picture covers is white"
