"""Time, memory, model and deviation of a variant on a problem."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from numdev.errors import BadInput
from numdev.machine import available_bytes
from numdev.measurement.deviation.measurement import COMPARISON, nonfinite, zero
from numdev.measurement.deviation.metrics import METRICS, Deviation, compare
from numdev.measurement.deviation.sample import Sample
from numdev.measurement.operation import Operation
from numdev.measurement.runner import Context, Findings, Kind, Point
from numdev.measurement.speed.columns import BESIDE, COUNTED, MEASURED, of_beside
from numdev.measurement.speed.timing import Budget, matmul_flops, peak_bytes, timed
from numdev.measurement.speed.traffic import Traffic
from numdev.results.record import Column, describe

KIND = "speed"
DEVIATIONS = ("rmse", "max_difference", "max_u")


@dataclass(frozen=True)
class Speeds(Kind):
    """Times a variant, and compares the first call's result with golden on the part that `Workload.sample` returns."""

    operation: Operation  # the operation whose implementations are timed
    budget: Budget = field(default_factory=Budget)  # how long each variant is timed
    traffic: Traffic | None = None  # counts the bytes that calls move; None if they are not counted
    name: ClassVar[str] = KIND
    seeds: ClassVar[int] = 1

    @property
    def columns(self) -> dict[str, tuple[Column, ...]]:
        figures = MEASURED | of_beside(self.operation.workload.beside) | ({} if self.traffic is None else COUNTED)
        deviations = {name: METRICS[name] for name in DEVIATIONS}
        return {KIND: (*COMPARISON, *(Column(name, *said) for name, said in (figures | deviations).items()))}

    def config(self, point: Point) -> dict[str, Any]:
        """Raises BadInput for a baseline: each variant is timed alone."""
        if point.baseline is not None:
            hint = "speed is compared between variants, each a point of its own; give baseline=none"
            raise BadInput("baseline", type(point.baseline).__name__, hint)
        counters = {} if self.traffic is None else {"counters": True}
        return super().config(point) | {"timing": describe(self.budget)} | counters

    def needed_bytes(self, problem: Any, variant: Any) -> int:
        """Those that a call needs."""
        return self.operation.workload.needed_bytes(problem, variant)

    def run(self, point: Point, context: Context) -> Findings:
        """Each replicate draws its own inputs and gives one row.

        Raises:
            MemoryError: if too little memory is free: a system that overcommits memory would kill the process.
        """
        rows: list[dict[str, Any]] = []
        compared: list[dict[str, Any]] = []
        kernels: dict[str, None] = {}
        try:
            self._check_memory(point, context.device)
            for seed in context.replicates():
                row, deviation, kernel = self._replicate(point, seed, context)
                place = {"seed": seed, "cluster": point.problem.cluster(seed), "subject": "variant"}
                place |= {"output": self.operation.primary, "primary": True, "reference": "golden"}
                rows.append(place | row)
                compared.append(place | deviation.metrics())
                kernels[kernel] = None
        finally:
            self.operation.workload.forget()
        if self.traffic is not None:  # last: the calls above verify which kernel runs, which counting does not
            counted = self.traffic.of(point.problem, point.variant)
            rows = [row | counted for row in rows]
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

    def _check_memory(self, point: Point, device: torch.device) -> None:
        needed, free = self.operation.workload.needed_bytes(point.problem, point.variant), available_bytes(device)
        if needed > free:
            raise MemoryError(f"about {needed / 2**30:.1f} GiB are needed and {free / 2**30:.1f} GiB are free")
