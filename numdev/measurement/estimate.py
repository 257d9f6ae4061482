"""How long measurements would take, from a short calibration on small problems, and how much memory they would need.

The time of a replicate is modelled as `a + b s_1 + c s_2 + ...`, with coefficients of at least 0; `s` is the size of the problem
as its operation declares it (`numdev.measurement.operation.Workload.size`; for attention, rows and pairs of a query and a key).
One replicate of each of a few smaller problems gives the coefficients of a variant and a baseline; no result is stored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numdev.errors import BadInput
from numdev.measurement.runner import Kind, Runner
from numdev.measurement.speed.measurement import Speeds
from numdev.results.environment import resolve_device
from numdev.results.record import Status

_TOKENS = {"cpu": (64, 256, 512), "cuda": (256, 1024, 4096)}  # tokens of the small problems; a GPU needs larger ones to be busy

Parts = tuple[Any, Any, Any, int]  # problem, variant, baseline and replicates of a point


class Rate(NamedTuple):
    """The time of one replicate.

    Attributes:
        coefficients: the constant part in seconds, then seconds per unit of each size; NaN alone where it is not known.
        kept: share of the time that remains if golden and baseline are already known from another point of the same problem.
    """

    coefficients: tuple[float, ...] = (math.nan,)
    kept: float = 1.0

    def seconds(self, size: Iterable[float]) -> float:
        """The time for a problem of this size."""
        return math.fsum(a * s for a, s in zip(self.coefficients, (1.0, *size), strict=True))


@dataclass
class Estimator:
    """Estimates points of one kind of measurement.

    Attributes:
        kind: makes the measurements.
        device: where they would run.
        budget: seconds that all calibrations together may take; after that, variants get the mean rate of those before.
        calibrated: variants and baselines that were calibrated.
        assumed: variants and baselines that got the mean rate of others.
    """

    kind: Kind
    device: str
    budget: float = 20.0
    calibrated: int = 0
    assumed: int = 0
    _rates: dict[Any, Rate] = field(default_factory=dict)
    _spent: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.kind, Speeds):
            self.kind = replace(self.kind, traffic=None)  # counting takes a process of its own
        self._tokens = _TOKENS[resolve_device(self.device).type]

    def seconds(self, points: Iterable[Parts]) -> list[float]:
        """The time of each point, one after the other, as a runner measures them; NaN where it is not known."""
        times, before = [], None
        for problem, variant, baseline, seeds in points:
            rate = self._rate(problem, variant, baseline)
            size = self.kind.operation.workload.size(problem) if len(rate.coefficients) > 1 else ()
            times.append(seeds * rate.seconds(size) * (rate.kept if (problem, baseline) == before else 1.0))
            before = problem, baseline
        return times

    def is_long(self, problem: Any, seeds: int, replicates: float) -> bool:
        """Whether a point needs at least as much work as `replicates` replicates of the largest problem of the calibration."""
        workload = self.kind.operation.workload
        small = workload.smaller(problem, self._tokens[-1])
        return small is not None and seeds * workload.size(problem)[-1] > replicates * workload.size(small)[-1]

    def _rate(self, problem: Any, variant: Any, baseline: Any) -> Rate:
        sizes = (self.kind.operation.workload.smaller(problem, tokens) for tokens in self._tokens)
        small = list(dict.fromkeys(one for one in sizes if one is not None))
        if not small:
            return Rate()
        key = variant, baseline, small[0]
        if key not in self._rates and self._spent > self.budget:
            known = [rate for rate in self._rates.values() if len(rate.coefficients) > 1]
            means = [np.mean(values, axis=0) for values in zip(*known, strict=True)]
            self._rates[key] = Rate(tuple(means[0].tolist()), float(means[1])) if known else Rate()
            self.assumed += 1
        elif key not in self._rates:
            start = time.perf_counter()
            self._rates[key] = self._calibrate(small, variant, baseline)
            self._spent += time.perf_counter() - start
            self.calibrated += 1
        return self._rates[key]

    def _calibrate(self, problems: list[Any], variant: Any, baseline: Any) -> Rate:
        sizes, times = [], []
        try:
            Runner(self.kind, self.device).measure(problems[0], variant, baseline, 1)  # loads libraries, compiles kernels
            for problem in problems:
                runner = Runner(self.kind, self.device)
                record = runner.measure(problem, variant, baseline, 1)
                if record.status is Status.UNSUPPORTED:
                    return Rate((0.0,))
                if record.status in (Status.ERROR, Status.OUT_OF_MEMORY):
                    return Rate()
                sizes.append((1.0, *self.kind.operation.workload.size(problem)))
                times.append(record.seconds)
            again = runner.measure(problems[-1], variant, baseline, 1)
        except BadInput:
            return Rate()
        return Rate(_fit(np.array(sizes), np.array(times)), min(1.0, again.seconds / times[-1]))


def _fit(sizes: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float, ...]:
    """Least squares of relative errors with coefficients of at least 0."""
    from scipy.optimize import nnls  # late: estimates alone need it

    scale = sizes.max(axis=0)
    coefficients, _ = nnls(sizes / scale / times[:, None], np.ones(len(times)))
    return tuple((coefficients / scale).tolist())


def needed_bytes(kind: Kind, problem: Any, variant: Any) -> int | None:
    """Memory that a point of this kind needs; None where the problem does not say."""
    if isinstance(kind, Speeds):
        return kind.operation.workload.needed_bytes(problem, variant)
    size = getattr(problem, "bytes", None)
    return size if isinstance(size, int) else None
