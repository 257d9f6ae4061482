"""One measurement of speed: what is in the record, how it ends where there is nothing to measure, and how calls are timed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from numdev import BadInput, Bench, Exact, Mask, Output, Precision, Record, Status, Tiled, Vanilla
from numdev.arithmetic.formats import FP32, Format
from numdev.attention.operation import ATTENTION
from numdev.attention.problem import Distribution, Kind, Problem, Shape
from numdev.attention.vendor.dispatch import InDtype
from numdev.measurement import speed as module
from numdev.measurement.deviation import COMPARISON
from numdev.measurement.runner import Runner
from numdev.measurement.speed import DEVIATIONS, MEASURED, Budget, Speeds, derived, fills_to_outlast, peak_bytes, timed

QUICK = Budget(1e-4, 3, 3)
PROBLEM = Problem(Distribution(Kind.NORMAL), Shape(2, 4, 2, 32, 48, 16), Mask(causal=True))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(module, "matmul_flops", lambda dtype, device, tf32: 1e9)
    return Runner(Speeds(ATTENTION, QUICK), "cpu")


def test_every_figure_is_there_and_documented(bench: Runner) -> None:
    record = bench.measure(PROBLEM, Tiled(Precision.parse("kernel_bf16")), seeds=2)
    assert record.status is Status.OK
    assert [row["seed"] for row in record.rows] == [0, 1]
    for row in record.rows:
        assert set(row) == {*(column.name for column in COMPARISON), *MEASURED, *DEVIATIONS}
        assert row["calls"] == 3
        assert 0 < row["latency_low"] <= row["latency"] <= row["latency_high"]
    assert Record.from_json(record.to_json()) == record


def test_memory_of_vanilla_attention_is_its_scores(bench: Runner) -> None:
    """S and P of FP32 at once: 2 B H N N' 4 bytes, and some numbers that torch makes tensors of."""
    value = Problem(Distribution(), Shape(1, 3, 3, 200, 300, 16))
    row = bench.measure(value, Vanilla(FP32)).rows[0]
    assert 0 <= row["peak_bytes"] - 2 * 3 * 200 * 300 * 4 < 64
    assert row["output_bytes"] == 3 * 200 * 16 * 4
    assert row["input_bytes"] == 3 * (200 + 2 * 300) * 16 * 4
    assert row["algorithm"] == "vanilla"


def test_the_deviation_is_that_of_an_ordinary_measurement(bench: Runner) -> None:
    """Each replicate's, of inputs of its own, although heads beside the compared ones are computed in the same call."""
    variant = Tiled(Precision.parse("bf16"))
    record = bench.measure(PROBLEM, variant, seeds=2)
    ordinary = Bench(Exact(), "cpu").measure(ATTENTION.workload.sample(PROBLEM), variant, None, 2)
    expected = [r for r in ordinary.rows if (r["output"], r["reference"]) == ("out", "golden")]
    for row, other in zip(record.rows, expected, strict=True):
        assert {name: row[name] for name in DEVIATIONS} == {name: other[name] for name in DEVIATIONS}


@dataclass(frozen=True)
class Counts(InDtype):
    """Wrong from a given call on; counts its calls."""

    wrong_from: int = 1
    fmt: Format = FP32

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        CALLS.append(1)
        out = Vanilla(FP32)(q, k, v, mask, scale).out
        return Output(out if len(CALLS) < self.wrong_from else out * float("nan"), None)


CALLS: list[int] = []


@pytest.mark.parametrize(("wrong_from", "status"), [(1, Status.NONFINITE), (2, Status.OK)])
def test_what_is_compared_is_a_result_of_the_timed_call(bench: Runner, wrong_from: int, status: Status) -> None:
    CALLS.clear()
    record = bench.measure(PROBLEM, Counts(wrong_from))
    assert record.status is status
    assert len(CALLS) == 1 + 1 + 3 + 3  # compared, its memory, warm-up, timed: no call beside them
    assert record.rows[0]["latency"] > 0


def test_refuses_memory_that_is_not_there(bench: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda device: 1 << 20)
    value = Problem(Distribution(), Shape(queries=1025, keys=1025))
    assert bench.measure(value, Vanilla(FP32)).status is Status.OUT_OF_MEMORY
    assert bench.measure(value, Tiled(Precision.parse("fp32"))).status is Status.OUT_OF_MEMORY  # q, k, v, o
    small = Problem(Distribution(), Shape(queries=512, keys=512))
    assert bench.measure(small, Tiled(Precision.parse("fp32"))).status is Status.OK
    assert bench.measure(small, Vanilla(FP32)).status is Status.OUT_OF_MEMORY


def test_takes_no_baseline(bench: Runner) -> None:
    with pytest.raises(BadInput, match=r"baseline: .*baseline=none"):
        bench.key(PROBLEM, Vanilla(), Vanilla())


def test_derived_figures(bench: Runner) -> None:
    """An unknown algorithm has no model, and no intensity."""
    unknown = bench.measure(PROBLEM, Exact()).rows[0]
    assert unknown["algorithm"] == ""
    assert math.isnan(derived(unknown)["intensity"])
    assert math.isnan(derived({name: value for name, value in unknown.items() if name != "model_bytes"})["intensity"])
    row = {"latency": 0.5, "operations": 4e12, "matmul_flops": 16e12, "model_bytes": 1e9}
    row |= {"input_bytes": 6e8, "peak_bytes": 5e8, "output_bytes": 4e8}
    result = derived(row)
    expected = {"tflops": 8.0, "share": 0.5, "bandwidth": 2.0, "intensity": 4000.0, "temporary_bytes": 1e8}
    assert {name: result[name] for name in expected} == expected


CPU = torch.device("cpu")


@given(st.floats(1e-9, 1e3), st.integers(3, 50), st.integers(0, 100), st.floats(1e-3, 10))
def test_a_budget_bounds_the_calls(seconds: float, least: int, more: int, budget: float) -> None:
    calls = Budget(budget, least, least + more).calls(seconds)
    assert least <= calls <= least + more
    if least < calls < least + more:
        assert (calls - 1) * seconds < budget <= calls * seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("arguments", "field"), [((0.0, 10, 20), "seconds"), ((1.0, 2, 20), "least"), ((1.0, 30, 20), "least"), ((-1.0,), "seconds")]
)
def test_a_budget_says_what_is_wrong(arguments: tuple[float, ...], field: str) -> None:
    with pytest.raises(BadInput, match=rf"timing\.{field}"):
        Budget(*arguments)  # type: ignore[arg-type]


def test_timed_counts_the_calls_and_orders_the_quartiles() -> None:
    made: list[float] = []

    def run() -> None:
        time.sleep(0.002)
        made.append(0.002)

    result = timed(run, CPU, Budget(0.02, 5, 8))
    assert len(made) == 3 + result.calls  # warm-up
    assert 5 <= result.calls <= 8
    assert 0.002 <= result.latency_low <= result.latency <= result.latency_high
    assert result.host == result.latency
    assert result.host_hidden == 0.0


@given(st.floats(1e-7, 1.0), st.floats(1e-6, 1e-2))
def test_the_writes_before_a_call_outlast_its_launch(host: float, fill: float) -> None:
    fills = fills_to_outlast(host, fill)
    assert 2 <= fills <= 64
    assert fills * fill >= 2 * host or fills == 64
    assert fills == 2 or (fills - 1) * fill < 2 * host


@pytest.mark.parametrize("n", [64, 300])
def test_peak_memory_is_what_is_held_at_once(n: int) -> None:
    """Two of three n x n matrices of FP32 at a time: the first is released before the third is made."""

    def run() -> torch.Tensor:
        a = torch.ones(n, n)
        b = a + 1
        del a
        return b + 1

    assert 0 <= peak_bytes(run, CPU) - 2 * 4 * n * n < 64  # numbers become tensors too


@pytest.mark.parametrize(("tf32", "expected"), [(False, "highest"), (True, "high")])
def test_the_ceiling_of_fp32_is_ieee_unless_asked(monkeypatch: pytest.MonkeyPatch, tf32: bool, expected: str) -> None:
    seen: list[str] = []

    def watched(run: Callable[[], object], device: torch.device, budget: Budget) -> object:
        seen.append(torch.get_float32_matmul_precision())
        return type("T", (), {"latency": 1.0})()

    monkeypatch.setattr(module, "timed", watched)
    module.matmul_flops.cache_clear()
    before = torch.get_float32_matmul_precision()
    try:
        module.matmul_flops(torch.float32, CPU, tf32)
    finally:
        module.matmul_flops.cache_clear()
    assert seen == [expected]
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize(("sleeps", "budget"), [(1e-3, Budget(0.1)), (0.05, Budget(0.1, 3, 3))])
    def test_events_see_the_gpu_and_not_the_host_unless_it_is_held_up_too_long(self, sleeps: float, budget: Budget) -> None:
        a = torch.randn(64, 64, device="cuda")

        def slow_to_launch() -> torch.Tensor:
            time.sleep(sleeps)
            return a @ a

        slow = timed(slow_to_launch, torch.device("cuda"), budget)
        assert slow.host_hidden > 0.5 if sleeps < 0.01 else slow.host_hidden == 0.0
        assert slow.latency < sleeps < slow.host or sleeps > 0.01, "a host that is seen takes at least as long as it sleeps"

    def test_peak_memory(self) -> None:
        """The allocator rounds to 512 bytes."""
        a = torch.ones(1024, 1024, device="cuda")
        assert peak_bytes(lambda: a + 1, a.device) == 4 * 1024 * 1024
