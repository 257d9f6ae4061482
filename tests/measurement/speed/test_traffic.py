"""Bytes that calls move: which points share a process, what a record holds, and how it goes on where nothing is counted."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from numdev.api import speed_bench
from numdev.arithmetic.formats import FP32
from numdev.attention.distributions import Distribution
from numdev.attention.operation import ATTENTION
from numdev.attention.problem import Problem, Shape
from numdev.attention.triton import Triton
from numdev.attention.vendor.sdpa import Backend, Sdpa
from numdev.attention.vendor.vanilla import Vanilla
from numdev.cli import runners
from numdev.errors import BadInput
from numdev.measurement.deviation.measurement import COMPARISON
from numdev.measurement.runner import Runner
from numdev.measurement.speed import measurement as module
from numdev.measurement.speed.columns import COUNTED, MEASURED, OF_COUNTED, derived
from numdev.measurement.speed.measurement import DEVIATIONS, Speeds
from numdev.measurement.speed.timing import Budget
from numdev.measurement.speed.traffic import METRICS, Traffic
from numdev.results.record import Record, Status
from numdev.results.store import Store
from numdev.results.study import Study, StudyPoint, run
from tests.cli.test_cli import Command, numdev
from tests.fake_ncu import FakeNcu

__all__ = ["numdev"]  # the fixture

VARIANT = Vanilla(FP32)
QUICK = Budget(1e-4, 3, 3)
REFUSED = (
    "lines[1:] = ['==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters']"
)


def problem(n: int) -> Problem:
    return Problem(Distribution(), Shape(queries=n, keys=n, head_dim=8))


def pairs(*of: StudyPoint) -> list[tuple[Any, Any]]:
    return [(point.problem, point.variant) for point in of]


def points(*lengths: int, variant: Any = VARIANT, seeds: int = 1) -> tuple[StudyPoint, ...]:
    return tuple(StudyPoint(problem(n), variant, None, seeds, "normal", {"kernel": "k", "problem.n": n}) for n in lengths)


@pytest.fixture(autouse=True)
def _no_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "matmul_flops", lambda dtype, device, tf32: 1e9)


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNcu:
    return FakeNcu(tmp_path, monkeypatch)


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def bench(ncu: FakeNcu, notes: list[str]) -> Runner:
    """On a CPU, which has no counters, with those that `ncu` makes up."""
    return Runner(Speeds(ATTENTION, QUICK, Traffic(ATTENTION, torch.device("cuda"), notes.append)), "cpu")


def test_a_record_has_what_was_counted(bench: Runner, notes: list[str]) -> None:
    record = bench.measure(problem(16), VARIANT, seeds=2)
    assert record.status is Status.OK
    for row in record.rows:
        assert set(row) == {*(column.name for column in COMPARISON), *MEASURED, *COUNTED, *DEVIATIONS}
        assert [row[name] for name in COUNTED] == [1000.0, 500.0, 4000.0, ""]
    assert Record.from_json(record.to_json()) == record
    assert notes == []


def test_one_process_counts_sixteen_points_of_a_study(bench: Runner, ncu: FakeNcu, tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    grid = points(*range(4, 24), seeds=2)
    run(Study("toy", "A toy", None, (), grid), bench, store)
    assert ncu.chunks == [16, 4]
    rows = [record.rows[0] for record in store.records()]
    assert sorted(row["dram_read_bytes"] for row in rows) == sorted([1000.0 * (n % 16 + 1) for n in range(20)])


def uncounted(record: Record) -> str:
    """Why there are no figures, of a record that has everything else."""
    assert record.status is Status.OK
    row = record.rows[0]
    assert row["latency"] > 0
    assert all(math.isnan(row[name]) for name in METRICS)
    assert all(math.isnan(derived(row)[name]) for name in OF_COUNTED)
    return str(row["not_counted"])


def test_without_permission_the_rest_is_measured_and_it_is_said_once(bench: Runner, ncu: FakeNcu, notes: list[str]) -> None:
    ncu.behaves(REFUSED)
    for n in (4, 5, 6):
        assert uncounted(bench.measure(problem(n), VARIANT)).startswith("ncu: ERR_NVGPUCTRPERM - The user does not have")
    assert ncu.chunks == [1]  # it would say the same of every other
    assert [text.split(": ERR")[0] for text in notes] == ["counters: traffic is not counted: ncu"]


def test_a_failed_chunk_is_not_the_end(bench: Runner, ncu: FakeNcu, notes: list[str]) -> None:
    ncu.behaves("code, lines = 11, []")
    bench.announce(pairs(*points(4, 5)))
    for n in (4, 5):
        assert uncounted(bench.measure(problem(n), VARIANT)) == "ncu: ended with 11"
    ncu.behaves("")
    assert bench.measure(problem(6), VARIANT).rows[0]["l2_bytes"] == 4000
    assert ncu.chunks == [2, 1, 1, 1]  # each alone after both together, then the third
    assert len(notes) == 1


def test_one_that_fails_takes_no_other_with_it(bench: Runner, ncu: FakeNcu) -> None:
    """As a GPU does that gives every later call of the process an error."""
    ncu.behaves("if len(points) > 1: code, lines = 1, lines[:-1]; print('numdev:1 AcceleratorError: illegal address')")
    bench.announce(pairs(*points(4, 5, 6)))
    rows = [bench.measure(problem(n), VARIANT).rows[0] for n in (4, 5, 6)]
    assert [row["not_counted"] for row in rows] == ["", "", ""]
    assert ncu.chunks == [3, 1, 1]


def test_what_the_call_said_goes_before(bench: Runner, ncu: FakeNcu) -> None:
    """Its range may have been closed half way."""
    ncu.behaves("print('numdev:0 OutOfMemoryError: no more')")
    assert uncounted(bench.measure(problem(4), VARIANT)) == "OutOfMemoryError: no more"


def test_what_cannot_be_sent_is_not_counted(bench: Runner, ncu: FakeNcu) -> None:
    class Local(Vanilla):
        pass

    bench.announce(pairs(*points(4, variant=Local(FP32)), *points(5)))
    assert uncounted(bench.measure(problem(4), Local(FP32))).startswith("it cannot be sent to another process")
    bench.measure(problem(5), VARIANT)
    assert ncu.chunks == [1]


def test_without_a_gpu_or_ncu_counters_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"counters: True cannot be used; .*the device is cpu; use counters=false"):
        speed_bench("cpu", counters=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match=r"counters: True cannot be used; .*ncu is not on PATH; install it"):
        Traffic(ATTENTION, torch.device("cuda"))


TOY = """\
title: Toy
base: {baseline: none, problem.head_dim: 8, attention: vanilla, precision: fp32, seeds: 1}
axes: {problem.n: [16, 32]}
"""


@pytest.mark.parametrize(("behaviour", "notes"), [("", 0), (REFUSED, 1)])
def test_a_study_from_the_command_line(
    numdev: Command, ncu: FakeNcu, monkeypatch: pytest.MonkeyPatch, behaviour: str, notes: int
) -> None:
    monkeypatch.setattr(runners, "Traffic", lambda operation, device, tell: Traffic(operation, torch.device("cuda"), tell))
    ncu.behaves(behaviour)
    Path("mine/study").mkdir(parents=True)
    Path("mine/study/toy.yaml").write_text(TOY)
    quick = ("device=cpu", "timing.seconds=0.001", "timing.least=3", "timing.most=3")
    ran = numdev("speed", "--config-dir", "mine", "study=toy", "counters=true", *quick)
    assert ran.code == 0
    assert ran.err.count("note: counters: traffic is not counted: ncu: ERR_NVGPUCTRPERM") == notes
    assert ncu.chunks == [2]
    assert pd.read_csv("reports/speed/speed.csv")["l2_bytes"].isna().sum() == 2 * notes
    described = Path("reports/speed/columns.md").read_text()
    assert notes or all(f"| `{name}` |" in described for name in (*COUNTED, *OF_COUNTED))
    assert ("Bytes moved" in ran.out) == (notes == 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or shutil.which("ncu") is None, reason="needs a CUDA device and ncu")
@pytest.mark.parametrize("variant", [Sdpa(Backend.FLASH), Triton()])
def test_a_gpu_reads_its_inputs_about_once(variant: Any) -> None:
    """q, k, v of 64 heads are read from memory; k and v of a head, 1 MiB, stay in a cache of some 50 MiB while they are used.

    The bounds leave room for what other processes move meanwhile, which the GPU counts too.
    """
    shape = Shape(4, 16, 16, 4096, 4096, 64)
    row = speed_bench("cuda", QUICK, counters=True).measure(Problem(Distribution(), shape), variant).rows[0]
    assert row["not_counted"] == ""
    assert 0.9 <= row["dram_read_bytes"] / row["input_bytes"] <= 3
    assert row["dram_write_bytes"] <= 3 * row["output_bytes"]
    assert row["l2_bytes"] > row["dram_read_bytes"]
