"""Time, memory, model and deviation of a variant on a problem."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from numdev.errors import BadInput
from numdev.machine import available_bytes
from numdev.measurement.deviation.measurement import COMPARISON, nonfinite, zero
from numdev.measurement.deviation.metrics import METRICS, Deviation, compare
from numdev.measurement.deviation.sample import Sample
from numdev.measurement.operation import Operation
from numdev.measurement.protocol import Context, Findings, configuration
from numdev.measurement.speed.columns import COUNTED, MEASURED, of_beside
from numdev.measurement.speed.timing import Budget, matmul_flops, peak_bytes, timed
from numdev.measurement.speed.traffic import Traffic
from numdev.results.record import Column

KIND = "speed"
DEVIATIONS = ("rmse", "max_difference", "max_u")


@dataclass(frozen=True)
class Speeds:
    """The kind `speed` of measurement of an operation.

    Attributes:
        operation: the operation whose implementations are timed.
        budget: how long each variant is timed.
        traffic: counts the bytes that calls move; None if they are not counted.
    """

    operation: Operation
    budget: Budget = field(default_factory=Budget)
    traffic: Traffic | None = None
    name: ClassVar[str] = KIND
    seeds: ClassVar[int] = 1

    @property
    def columns(self) -> dict[str, tuple[Column, ...]]:
        figures = MEASURED | of_beside(self.operation.workload.beside) | ({} if self.traffic is None else COUNTED)
        deviations = {name: METRICS[name] for name in DEVIATIONS}
        return {KIND: (*COMPARISON, *(Column(name, *said) for name, said in (figures | deviations).items()))}

    def of(self, problem: Any, variant: Any, baseline: Any, seeds: int) -> SpeedPoint:
        """Raises BadInput for a baseline: each variant is timed alone."""
        if baseline is not None:
            mend = "speed is compared between variants, each a point of its own; give baseline=none"
            raise BadInput("baseline", type(baseline).__name__, mend)
        return SpeedPoint(self.operation, problem, variant, seeds, self.budget, self.traffic)

    def announce(self, points: Iterable[tuple[Any, Any]]) -> None:
        """Passes on the points that will be measured, in this order, so that their traffic is counted in chunks."""
        if self.traffic is not None:
            self.traffic.announce(points)


@dataclass(frozen=True)
class SpeedPoint:
    """A variant timed on a problem; each replicate draws its own inputs and gives one row.

    A row holds the columns `MEASURED` of `numdev.measurement.speed.columns`, the columns `COUNTED` if counters are asked for, and
    the deviation of the first call's result from golden, on the part of the problem that `Workload.sample` returns.
    """

    operation: Operation
    problem: Any
    variant: Any
    seeds: int
    budget: Budget
    traffic: Traffic | None = None
    kind: ClassVar[str] = KIND

    @property
    def config(self) -> dict[str, Any]:
        counters = {} if self.traffic is None else {"counters": True}
        parts = {"problem": self.problem, "variant": self.variant, "baseline": None, "seeds": self.seeds, "timing": self.budget}
        return configuration(**parts, **counters)

    @property
    def columns(self) -> dict[str, tuple[Column, ...]]:
        return Speeds(self.operation, self.budget, self.traffic).columns

    def run(self, context: Context) -> Findings:
        """Raises MemoryError if too little memory is free: a system that overcommits memory would kill the process."""
        rows: list[dict[str, Any]] = []
        compared: list[dict[str, Any]] = []
        kernels: dict[str, None] = {}
        try:
            self._check_memory(context.device)
            for seed in context.replicates():
                row, deviation, kernel = self._replicate(seed, context)
                place = {"seed": seed, "cluster": self.problem.cluster(seed), "subject": "variant"}
                place |= {"output": self.operation.primary, "primary": True, "reference": "golden"}
                rows.append(place | row)
                compared.append(place | deviation.metrics())
                kernels[kernel] = None
        finally:
            self.operation.workload.forget()
        if self.traffic is not None:  # last: the calls above verify which kernel runs, which counting does not
            counted = self.traffic.of(self.problem, self.variant)
            rows = [row | counted for row in rows]
        return Findings({KIND: rows}, "; ".join(kernels), nonfinite(compared), zero(compared))

    def _replicate(self, seed: int, context: Context) -> tuple[dict[str, Any], Deviation, str]:
        device, workload = context.device, self.operation.workload
        inputs = self.operation.prepared(self.problem, self.variant, seed, device)
        run = workload.bound(self.problem, self.variant, inputs)
        first = run()
        kernel = first.kernel
        deviation = self._deviation(seed, context, first)
        output_bytes = sum(map(_bytes, first.tensors().values()))
        cost = workload.cost(self.problem, self.variant, first, device)
        del first
        peak = peak_bytes(run, device)
        timing = timed(run, device, self.budget)
        del run  # with what it keeps of a first pass
        figures = {
            "latency": timing.latency,
            "latency_low": timing.low,
            "latency_high": timing.high,
            "host": timing.host,
            "host_hidden": timing.hidden,
            "calls": timing.calls,
            "operations": cost.operations,
            "matmul_flops": matmul_flops(inputs[0].dtype, device, workload.is_tf32(self.variant)),
            "peak_bytes": peak,
            "input_bytes": sum(map(_bytes, inputs)),
            "output_bytes": output_bytes,
            "algorithm": cost.algorithm,
            "model_bytes": cost.model_bytes,
            "model_br": cost.model_br,
        }
        figures |= self._beside(inputs, device)
        metrics = deviation.metrics()
        return figures | {name: metrics[name] for name in DEVIATIONS}, deviation, kernel

    def _beside(self, inputs: tuple[Tensor, ...], device: torch.device) -> dict[str, Any]:
        """The columns of what is timed beside the call, by the same budget."""
        figures: dict[str, Any] = {}
        for name, call in self.operation.workload.calls_beside(self.problem, self.variant, inputs, device).items():
            timing, cost = timed(call.run, device, self.budget), call.cost
            figures |= {f"{name}_latency": timing.latency, f"{name}_latency_low": timing.low, f"{name}_latency_high": timing.high}
            figures |= {f"{name}_operations": cost.operations, f"{name}_model_bytes": cost.model_bytes}
        return figures

    def _deviation(self, seed: int, context: Context, output: Any) -> Deviation:
        """Compares the result of the call that is timed with golden, on the part that golden computes."""
        operation, primary = self.operation, self.operation.primary
        small = operation.workload.sample(self.problem)

        def exact() -> Sample:
            drawn = operation.draw(small, seed, context.device)
            return Sample(operation.exact(*drawn, **small.arguments()).tensors()[primary])

        golden = context.kept.get(("golden of speed", operation.name, small, seed), exact)
        sample = operation.workload.compared(self.problem, output.tensors()[primary])
        return compare(Sample(sample), golden, self.variant.formats[primary])

    def _check_memory(self, device: torch.device) -> None:
        needed, free = self.operation.workload.needed_bytes(self.problem, self.variant), available_bytes(device)
        if needed > free:
            raise MemoryError(f"about {needed / 2**30:.1f} GiB are needed and {free / 2**30:.1f} GiB are free")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
