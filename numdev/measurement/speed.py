"""Time, memory, cost model and deviation of a variant on a problem: the columns, the clock of a call, and the measurement.

Tables and figures of speed are in the report.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from numdev.errors import BadInput
from numdev.measurement.deviation import COMPARISON, nonfinite, zero
from numdev.measurement.metrics import METRICS, Deviation, Sample, compare
from numdev.measurement.operation import Operation
from numdev.measurement.runner import Context, Findings, Kind, Point
from numdev.results.environment import available_bytes
from numdev.results.record import Column, describe
from numdev.settings import setting

MEASURED = {
    "latency": (
        "s",
        "median time of one call; on a GPU by CUDA events, with inputs in memory and in no cache, without the host's share",
    ),
    "latency_low": ("s", "lower quartile of the time of one call"),
    "latency_high": ("s", "upper quartile of the time of one call"),
    "host": ("s", "median time until a call returned to the caller"),
    "host_hidden": (
        "relative",
        "share of the calls that had returned before the GPU started on them; below 1, latency includes time of the host; "
        "0 on a CPU",
    ),
    "calls": ("count", "calls timed after warm-up"),
    "operations": (
        "count",
        "floating-point operations that any implementation must do; of attention 4 d for each pair of a query and a key that it "
        "sees, over heads and batch, and 10 d of its backward pass",
    ),
    "matmul_flops": ("1/s", "operations per second of a square matrix product of such inputs, measured beside it"),
    "peak_bytes": (
        "B",
        "most memory that a call takes of torch's allocator beyond its inputs, to which a dense mask counts; results included",
    ),
    "input_bytes": ("B", "size of the inputs, without a dense mask"),
    "output_bytes": ("B", "size of what is returned"),
    "algorithm": ("", "the algorithm whose traffic the cost model counts, such as vanilla or tiled; empty without a model"),
    "model_bytes": ("B", "traffic with the processor's memory by the cost model"),
    "model_br": ("rows", "rows of a tile in the cost model; 0 without tiles"),
}

BESIDE = ("latency", "latency_low", "latency_high", "operations", "model_bytes")


def of_beside(names: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The columns of calls that are timed beside the measured one, by the names that say what they are."""
    return {
        f"{name}_{column}": (MEASURED[column][0], f"of {what}: {MEASURED[column][1]}")
        for name, what in names.items()
        for column in BESIDE
    }


FOLLOWING = {
    "tflops": ("1e12/s", "operations / latency"),
    "share": ("relative", "operations / latency over matmul_flops"),
    "bandwidth": ("1e9 B/s", "bytes that any algorithm must move, input_bytes + output_bytes, over latency"),
    "intensity": ("1/B", "arithmetic intensity: operations / model_bytes"),
    "temporary_bytes": ("B", "peak_bytes without the results"),
}
"""Figures that are computed from those of a record, and not stored: see `derived`."""


def derived(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of measured figures with those that follow from them."""
    rate = row["operations"] / row["latency"]
    return {
        **row,
        "tflops": rate / 1e12,
        "share": rate / row["matmul_flops"],
        "bandwidth": (row["input_bytes"] + row["output_bytes"]) / row["latency"] / 1e9,
        "intensity": row["operations"] / row.get("model_bytes", math.nan),
        "temporary_bytes": row["peak_bytes"] - row["output_bytes"],
    }


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
    """Seconds of one call, by the columns of a record; `MEASURED` of `numdev.measurement.speed` explains each."""

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
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # some versions of the profiler's library write lines to the terminal
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
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


KIND = "speed"
DEVIATIONS = ("rmse", "max_difference", "max_u")


@dataclass(frozen=True)
class Speeds(Kind):
    """Times a variant, and compares the first call's result with golden on the part that `Workload.sample` returns."""

    operation: Operation  # the operation whose implementations are timed
    budget: Budget = field(default_factory=Budget)  # how long each variant is timed
    name: ClassVar[str] = KIND
    seeds: ClassVar[int] = 1

    @property
    def columns(self) -> dict[str, tuple[Column, ...]]:
        figures = MEASURED | of_beside(self.operation.workload.beside)
        deviations = {name: METRICS[name] for name in DEVIATIONS}
        return {KIND: (*COMPARISON, *(Column(name, *said) for name, said in (figures | deviations).items()))}

    @property
    def figures(self) -> list[str]:
        return [*super().figures, *FOLLOWING]

    @property
    def comparable(self) -> list[str]:
        """Deviations also by the name of the output, as in other studies."""
        return [*self.figures, *(f"{self.operation.primary}.{name}" for name in DEVIATIONS)]

    def completed(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return derived(row)

    def config(self, point: Point) -> dict[str, Any]:
        """Raises BadInput for a baseline: each variant is timed alone."""
        if point.baseline is not None:
            hint = "speed is compared between variants, each a point of its own; give baseline=none"
            raise BadInput("baseline", type(point.baseline).__name__, hint)
        return super().config(point) | {"timing": describe(self.budget)}

    def needed_bytes(self, problem: Any, variant: Any) -> int:
        """Those that a call needs."""
        return self.operation.workload.needed_bytes(problem, variant)

    def run(self, point: Point, context: Context) -> Findings:
        """Each replicate draws its own inputs and gives one row.

        Raises:
            MemoryError: if too little memory is free: a system that overcommits memory would kill the process.
        """
        rows, compared, kernels = list[dict[str, Any]](), list[dict[str, Any]](), dict[str, None]()
        try:
            needed, free = self.needed_bytes(point.problem, point.variant), available_bytes(context.device)
            if needed > free:
                raise MemoryError(f"about {needed / 2**30:.1f} GiB are needed and {free / 2**30:.1f} GiB are free")
            for seed in context.replicates():
                row, deviation, kernel = self._replicate(point, seed, context)
                place = {"seed": seed, "cluster": point.problem.cluster(seed), "subject": "variant"}
                place |= {"output": self.operation.primary, "primary": True, "reference": "golden"}
                rows.append(place | row)
                compared.append(place | deviation.metrics())
                kernels[kernel] = None
        finally:
            self.operation.workload.forget()
        return Findings({KIND: rows}, "; ".join(kernels), nonfinite(compared), zero(compared))

    def _replicate(self, point: Point, seed: int, context: Context) -> tuple[dict[str, Any], Deviation, str]:
        (problem, variant, *_), device, workload = point, context.device, self.operation.workload
        inputs = self.operation.prepared(problem, variant, seed, device)
        run = workload.bound(problem, variant, inputs)
        first = run()
        kernel = first.kernel
        deviation = self._deviation(point, seed, context, first)
        output_bytes = sum(tensor.nbytes for tensor in first.tensors().values())
        cost = workload.cost(problem, variant, first, device)
        del first
        peak = peak_bytes(run, device)
        timing = timed(run, device, self.budget)
        del run  # with what it keeps of a first pass
        figures = {
            **vars(timing),
            "operations": cost.operations,
            "matmul_flops": matmul_flops(inputs[0].dtype, device, workload.is_tf32(variant)),
            "peak_bytes": peak,
            "input_bytes": sum(tensor.nbytes for tensor in inputs),
            "output_bytes": output_bytes,
            "algorithm": cost.algorithm,
            "model_bytes": cost.model_bytes,
            "model_br": cost.model_br,
        }
        for name, (call, cost) in workload.calls_beside(problem, variant, inputs, device).items():
            beside = vars(timed(call, device, self.budget)) | {"operations": cost.operations, "model_bytes": cost.model_bytes}
            figures |= {f"{name}_{column}": beside[column] for column in BESIDE}
        metrics = deviation.metrics()
        return figures | {name: metrics[name] for name in DEVIATIONS}, deviation, kernel

    def _deviation(self, point: Point, seed: int, context: Context, output: Any) -> Deviation:
        """Compares the result of the call that is timed with golden, on the part that golden computes."""
        operation, primary = self.operation, self.operation.primary
        small = operation.workload.sample(point.problem)

        def exact() -> Sample:
            drawn = operation.draw(small, seed, context.device)
            return Sample(operation.exact(*drawn, **small.arguments()).tensors()[primary])

        golden = context.kept.get(("golden of speed", operation.name, small, seed), exact)
        sample = operation.workload.compared(point.problem, output.tensors()[primary])
        return compare(Sample(sample), golden, point.variant.formats[primary])
