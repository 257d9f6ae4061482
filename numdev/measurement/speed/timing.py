"""Time of one call, on a GPU by its own clock, and its memory; and the rate of a matrix product to hold it against."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from numdev.errors import BadInput
from numdev.machine import profiler
from numdev.settings import setting

_WARM_UP = 3
FLUSH_BYTES = 256 << 20  # several times the second-level cache of any GPU
_MOST_FILLS = 64  # about 5 ms of an H100; `Timing.host_hidden` tells of calls for which the host needs longer


@dataclass(frozen=True)
class Budget:
    """How long one call is timed: it is repeated until `seconds` have passed, `least` times at least and `most` times at most."""

    seconds: float = setting(0.3, "time for all timed calls together, within the least and the most of them", "s")
    least: int = setting(10, "calls that are timed at least", "count")
    most: int = setting(100, "calls that are timed at most", "count")

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise BadInput("timing.seconds", self.seconds, "give a positive number of seconds")
        if not 3 <= self.least <= self.most:
            raise BadInput("timing.least", self.least, "give at least 3, and no more than timing.most")

    def calls(self, seconds: float) -> int:
        """How many calls fit, if each takes so many seconds."""
        return min(self.most, max(self.least, math.ceil(self.seconds / max(seconds, 1e-9))))


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, by the columns of a record; `MEASURED` of `numdev.measurement.speed.columns` explains each."""

    latency: float
    latency_low: float
    latency_high: float
    host: float
    host_hidden: float
    calls: int


class Call(NamedTuple):
    """The seconds that one call took, the seconds until it returned, and 1 if it returned before the device started on it."""

    latency: float
    host: float
    hidden: float


def timed(run: Callable[[], object], device: torch.device, budget: Budget) -> Timing:
    """Time `run` after warming it up.

    On a GPU a pair of CUDA events around each call measures it. Before each call the GPU writes a buffer larger than its
    second-level cache, so that inputs come from memory, as they do between other layers of a model. It writes the buffer often
    enough to be still busy when the host has prepared the launch, so that the figure includes no time of the host.
    """
    once = _OnGpu(device) if device.type == "cuda" else _on_cpu
    warm = [once(run) for _ in range(_WARM_UP)]
    if isinstance(once, _OnGpu):
        once.fills = fills_to_outlast(min(call.host for call in warm), once.seconds)
    calls = budget.calls(min(call.latency for call in warm))
    made = [once(run) for _ in range(calls)]
    low, median, high = statistics.quantiles([call.latency for call in made], n=4)
    hidden = statistics.fmean(call.hidden for call in made)
    return Timing(median, low, high, statistics.median(call.host for call in made), hidden, calls)


class _OnGpu:
    """Times calls by the GPU's clock; before each of them the GPU writes a buffer."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self.fills = 1
        self(self._buffer.zero_)
        self.seconds = min(self(self._buffer.zero_).latency for _ in range(_WARM_UP))  # that writing it once takes

    def __call__(self, run: Callable[[], object]) -> Call:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(self.fills):
            self._buffer.zero_()
        start.record()
        begin = time.perf_counter()
        run()
        host = time.perf_counter() - begin
        hidden = not start.query()
        stop.record()
        stop.synchronize()
        return Call(start.elapsed_time(stop) / 1e3, host, float(hidden))


def fills_to_outlast(host: float, fill: float) -> int:
    """How many writes of `fill` seconds take twice as long as `host`: at least 2, and not so many that a study takes long."""
    return min(_MOST_FILLS, max(2, math.ceil(2 * host / fill)))


def _on_cpu(run: Callable[[], object]) -> Call:
    begin = time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    return Call(seconds, seconds, 0.0)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that a call has allocated at one time, its results among them, as torch's allocator counts them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = run()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        del kept
        return peak
    with profiler(device, profile_memory=True) as watched:
        kept = run()
    del kept
    assert watched.profiler is not None
    results: Any = watched.profiler.kineto_results
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    return max(itertools.accumulate((change for _, change in changes), initial=0))


@lru_cache(maxsize=16)
def matmul_flops(dtype: torch.dtype, device: torch.device, tf32: bool = False) -> float:
    """Operations per second of `torch.matmul` on square matrices, 2 n^3 over the median time; once per process.

    FP32 is IEEE FP32 unless `tf32`. Formats of 8 bits are compared with FP16, since kernels without a product in 8 bits convert
    their operands to it.
    """
    if dtype.itemsize == 1:
        dtype = torch.float16
    side = 8192 if device.type == "cuda" else 512  # a CPU multiplies some formats a thousand times more slowly than FP32
    generator, before = torch.Generator(device).manual_seed(0), torch.get_float32_matmul_precision()
    a, b = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        return 2 * side**3 / timed(lambda: torch.matmul(a, b), device, Budget(seconds=0.2, least=3, most=50)).latency
    finally:
        torch.set_float32_matmul_precision(before)
