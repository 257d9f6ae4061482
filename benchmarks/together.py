"""Replicates in one call against one by one: by each implementation that computes several together, and whole points."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Result, paired
from numdev import Distribution, Exact, Mask, Naive, Precision, Problem, Shape, Tiled
from numdev.arithmetic.formats import Format
from numdev.attention.operation import ATTENTION
from numdev.measurement.deviation.measurement import Deviations
from numdev.measurement.operation import Operation, Outputs
from numdev.measurement.runner import Runner
from numdev.results.record import Status

_LENGTHS, _POLICIES, _REPLICATES, _RUNS = (64, 256, 1024), ("bf16", "fp32", "kernel_bf16"), 10, 5
Attend = Exact | Naive | Tiled


@dataclass(frozen=True)
class OneByOne:
    """An implementation that does not declare `together`."""

    of: Attend

    @property
    def formats(self) -> dict[str, Format]:
        return self.of.formats

    @property
    def input_key(self) -> Hashable:
        return self.of.input_key

    def round_inputs(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.of.round_inputs(*inputs)

    def __call__(self, *inputs: Tensor, **arguments: Any) -> Outputs:
        return self.of(*inputs, **arguments)  # type: ignore[arg-type]


def singly(attend: Attend, replicates: Sequence[tuple[Tensor, ...]]) -> list[Outputs]:
    return [attend(*inputs, Mask()) for inputs in replicates]  # type: ignore[call-arg]


def point(problem: Problem, variant: Any, baseline: Any, golden: Any) -> None:
    """A whole point, with nothing kept of another."""
    operation = Operation("attention", golden, ATTENTION.inputs, ATTENTION.outputs, counters=ATTENTION.counters)
    record = Runner(Deviations(operation), "cpu").measure(problem, variant, baseline, _REPLICATES)
    if record.status is not Status.OK:
        raise AssertionError(record.reason)


def compare(length: int, name: str) -> list[Result]:
    policy = Precision.parse(name)
    problem = Problem(Distribution(), Shape(queries=length, keys=length))
    variant, baseline, golden = Tiled(policy), Naive(Precision.eager(policy.format)), Exact()
    found = []
    for attend in (variant, baseline, golden):
        inputs = [attend.round_inputs(*problem.inputs(seed).values()) for seed in range(_REPLICATES)]
        both = zip(attend.together(inputs, Mask()), singly(attend, inputs), strict=True)
        if not all(torch.equal(ours.out, theirs.tensors()["out"]) and ours.counters == theirs.counters for ours, theirs in both):
            raise AssertionError(f"replicates together and one by one differ: {type(attend).__name__}, {name}, N = {length}")
        case = f"{_REPLICATES} replicates, {type(attend).__name__}, {name}, N = {length}"
        ours, theirs = partial(attend.together, inputs, Mask()), partial(singly, attend, inputs)
        found.append(
            paired(case, ours, theirs, at_least=1.1 if length == 64 or (attend is variant and length == 256) else 0.9, runs=_RUNS)
        )
    ours, theirs = (
        partial(point, problem, variant, baseline, golden),
        partial(point, problem, OneByOne(variant), OneByOne(baseline), OneByOne(golden)),
    )
    found.append(paired(f"{_REPLICATES} replicates, a whole point, {name}, N = {length}", ours, theirs, at_least=0.9, runs=_RUNS))
    return found


def results() -> list[Result]:
    """d = 64, one head. What is stacked is to be faster; the rest, and whole points, which are mostly metrics, no slower."""
    return [result for length in _LENGTHS for name in _POLICIES for result in compare(length, name)]
