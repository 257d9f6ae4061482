"""How long things are timed, the memory that calls take, and the ceiling."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numdev.errors import BadInput
from numdev.measurement import speed as timing
from numdev.measurement.speed import Budget, fills_to_outlast, peak_bytes, timed

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
    with pytest.raises(BadInput, match=f"timing.{field}"):
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

    monkeypatch.setattr(timing, "timed", watched)
    timing.matmul_flops.cache_clear()
    before = torch.get_float32_matmul_precision()
    try:
        timing.matmul_flops(torch.float32, CPU, tf32)
    finally:
        timing.matmul_flops.cache_clear()
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
