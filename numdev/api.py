"""Attention measured in one call: where the general measurement meets the exact and the baseline attention."""

from __future__ import annotations

from functools import lru_cache

from numdev.arithmetic.formats import FP32, Format
from numdev.attention.base import Attention
from numdev.attention.exact import Exact
from numdev.attention.naive import Naive
from numdev.attention.precision import Precision
from numdev.attention.problem import Problem
from numdev.measurement.bench import Bench
from numdev.results.record import Record


def baseline_for(fmt: Format) -> Naive:
    """The baseline of a variant whose output is in `fmt`: matmul, softmax, matmul as tensor operations in that format.

    A format narrower than 16 bits has no such operations in torch; its baseline is in FP32.
    """
    return Naive(Precision.eager(fmt if fmt.bits >= 16 else FP32))


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
