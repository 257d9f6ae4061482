"""The time of one call, on a GPU by its own clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from numdev.errors import BadInput

_WARM_UP = 3
_FLUSH_BYTES = 256 << 20  # several times the second-level cache of any GPU; writing it takes longer than a launch


@dataclass(frozen=True)
class Budget:
    """How long one thing is timed: until `seconds` are used up, but `least` to `most` calls."""

    seconds: float = 0.3
    least: int = 10
    most: int = 100

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise BadInput("timing.seconds", self.seconds, "give a positive number of seconds")
        if not 3 <= self.least <= self.most:
            raise BadInput("timing.least", self.least, "give at least 3, and no more than timing.most")

    def calls(self, seconds: float) -> int:
        """How many calls of so many seconds each."""
        return min(self.most, max(self.least, math.ceil(self.seconds / max(seconds, 1e-9))))


@dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Attributes:
        latency: the median.
        low, high: the quartiles.
        host: until the call returned to the caller, the median; on a CPU it is the latency.
        calls: timed.
    """

    latency: float
    low: float
    high: float
    host: float
    calls: int


def timed(run: Callable[[], object], device: torch.device, budget: Budget) -> Timing:
    """Time `run` after warming it up.

    On a GPU: by a pair of CUDA events around each call. Before each, a buffer larger than the second-level cache is
    written, so that inputs come from memory as in a model between other layers, and so that the GPU is still at work on the
    buffer while the host prepares the launch: the figure is the GPU's share alone.
    """
    once = _on_gpu if device.type == "cuda" else _on_cpu
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None
    warm = [once(run, flush) for _ in range(_WARM_UP)]
    calls = budget.calls(min(latency for latency, _ in warm))
    pairs = [once(run, flush) for _ in range(calls)]
    latencies, hosts = zip(*pairs, strict=True)
    low, median, high = statistics.quantiles(latencies, n=4)
    return Timing(median, low, high, statistics.median(hosts), calls)


def _on_gpu(run: Callable[[], object], flush: torch.Tensor | None) -> tuple[float, float]:
    assert flush is not None
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(4):
        flush.zero_()
    start.record()
    begin = time.perf_counter()
    run()
    host = time.perf_counter() - begin
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3, host


def _on_cpu(run: Callable[[], object], _: torch.Tensor | None) -> tuple[float, float]:
    begin = time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    return seconds, seconds
