"""Attention measured in one call: where the general measurement meets the exact and the baseline attention."""

from __future__ import annotations

from functools import lru_cache

from numdev.attention.base import Attention
from numdev.attention.baseline import baseline_for
from numdev.attention.exact import Exact
from numdev.attention.problem import Problem
from numdev.measurement.bench import Bench
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
        BadInput: for a request that cannot be measured; every other failure is a status of the record.
    """
    return bench(device).measure(problem, variant, baseline or baseline_for(variant.format), problem.replicates(seeds))


@lru_cache(maxsize=2)
def bench(device: str) -> Bench:
    """The bench of a device, kept so that golden results serve the next call too."""
    return Bench(Exact(), device)
