"""Attention measured in one call: the general measurement with exact attention as golden and a baseline."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from numdev.attention.base import Attention
from numdev.attention.emulation import baseline_for
from numdev.attention.exact import Exact
from numdev.attention.operation import ATTENTION
from numdev.attention.problem import Problem
from numdev.errors import BadInput
from numdev.measurement.deviation import Deviations
from numdev.measurement.operation import Measurable
from numdev.measurement.runner import CACHE_BYTES, Runner
from numdev.results.record import Record


def measure(
    problem: Problem,
    variant: Attention,
    baseline: Attention | None = None,
    *,
    seeds: int | None = None,
    device: str = "auto",
) -> Record:
    """Measure `variant` on `problem` against golden, FP64 attention, and against a baseline.

    Args:
        problem: shapes, mask and inputs.
        variant: any implementation of attention.
        baseline: `baseline_for(variant.format)` unless given.
        seeds: replicates 0 to `seeds - 1`; unless given, ten draws of a distribution, or every head of captured tensors.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        BadInput: for a request that cannot be measured, or in part has no effect; every other failure is a status of the record.
    """
    if not isinstance(variant, Attention):
        raise BadInput("variant", type(variant).__name__, "give an implementation of attention, a subclass of nd.Attention")
    for refusal in variant.ineffective(problem.shape):
        raise refusal
    return bench(device).measure(problem, variant, baseline or baseline_for(variant.format), problem.replicates(seeds))


class Bench(Runner):
    """Measures the deviation of attention on a device: `measure(problem, variant, baseline, seeds)`.

    Golden results, inputs and baselines are kept from one point to the next. Another operation or kind of measurement has its
    own `numdev.measurement.runner.Runner`.
    """

    def __init__(self, golden: Measurable | None = None, device: str = "auto", cache_bytes: int = CACHE_BYTES) -> None:
        """`golden` is what is taken for exact: `Exact()` unless given.

        Raises:
            BadInput: for a device that is not there.
        """
        super().__init__(Deviations(replace(ATTENTION, golden=golden or Exact())), device, cache_bytes)


@lru_cache(maxsize=2)
def bench(device: str) -> Bench:
    """The bench of a device, kept so that golden results serve the next call too."""
    return Bench(Exact(), device)
