"""Replicates in one call: the record of one by one, and what points share is kept for each replicate by itself."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, Format
from numdev.attention.captured import Captured
from numdev.attention.distributions import Distribution, Kind
from numdev.attention.exact import Exact
from numdev.attention.mask import Mask
from numdev.attention.naive import Naive
from numdev.attention.operation import ATTENTION
from numdev.attention.precision import Precision
from numdev.attention.problem import Problem, Shape
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Tiling
from numdev.measurement.deviation import replicates as module
from numdev.measurement.deviation.measurement import Deviations
from numdev.measurement.operation import Operation, Outputs
from numdev.measurement.runner import Runner
from numdev.results.record import Record

NORMAL = Problem(Distribution(Kind.NORMAL), Shape(heads=2, kv_heads=1, queries=12, keys=20, head_dim=8))
PADDED = Problem(Distribution(), Shape(batch=2, queries=10, keys=10, head_dim=4), Mask(causal=True, key_lengths=(10, 7)))
CAPTURED = Problem(Captured(), Shape(queries=16, keys=16, head_dim=32))
OVERFLOWING = Problem(Distribution(Kind.CONSTANT, value=1e9), Shape(queries=8, keys=8, head_dim=4), Mask(causal=True))


@dataclass(frozen=True)
class OneByOne:
    """The same without `together`."""

    of: Any

    @property
    def formats(self) -> dict[str, Format]:
        formats: dict[str, Format] = self.of.formats
        return formats

    @property
    def input_key(self) -> Hashable:
        key: Hashable = self.of.input_key
        return key

    def round_inputs(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        rounded: tuple[Tensor, ...] = self.of.round_inputs(*inputs)
        return rounded

    def __call__(self, *inputs: Tensor, **arguments: Any) -> Outputs:
        outputs: Outputs = self.of(*inputs, **arguments)
        return outputs

    def replicate(self, seed: int) -> OneByOne:
        return self if isinstance(self.of, Exact) else OneByOne(self.of.replicate(seed))


@dataclass(frozen=True)
class Counting(OneByOne):
    """Together; `calls` has the first element of q of each replicate of each call."""

    calls: list[list[float]] = field(default_factory=list, compare=False)

    def __call__(self, *inputs: Tensor, **arguments: Any) -> Outputs:
        raise AssertionError("a call for one replicate")

    def replicate(self, seed: int) -> Counting:
        return self

    def together(self, replicates: Sequence[tuple[Tensor, Tensor, Tensor]], **arguments: Any) -> Sequence[Outputs]:
        self.calls.append([float(q.flatten()[0]) for q, _, _ in replicates])
        outputs: Sequence[Outputs] = self.of.together(replicates, **arguments)
        return outputs


def with_golden(golden: Any) -> Operation:
    return Operation("attention", golden, ATTENTION.inputs, ATTENTION.outputs, counters=ATTENTION.counters)


def measured(problem: Problem, variant: Any, baseline: Any, golden: Any = None, seeds: int = 5) -> Record:
    return Runner(Deviations(with_golden(golden or Exact())), "cpu").measure(problem, variant, baseline, seeds)


def said(record: Record) -> tuple[Any, ...]:
    """As text, in which NaN equals NaN, and 0 does not equal -0."""
    return record.status, record.reason, record.kernel, repr(record.tables)


@pytest.mark.parametrize("problem", [NORMAL, PADDED, CAPTURED, OVERFLOWING], ids=["heads", "padded", "captured", "overflowing"])
@pytest.mark.parametrize("policy", ["bf16", "fp32", "e4m3fn", "fp8", "bf16:stochastic"])
def test_the_record_is_that_of_one_by_one(problem: Problem, policy: str) -> None:
    step = Precision.parse("bf16").with_step(row_sum=policy, values=policy) if ":" in policy else Precision.parse(policy)
    variant, baseline = Tiled(step, Tiling(bc=8)), Naive(Precision.eager(BF16))
    expected = measured(problem, OneByOne(variant), OneByOne(baseline), OneByOne(Exact()))
    assert len(expected.tables["counters"]) == 5
    assert said(measured(problem, variant, baseline)) == said(expected)


def test_each_replicate_is_kept_by_itself() -> None:
    golden, baseline = Counting(Exact()), Counting(Naive(Precision.eager(BF16)))
    variants = [Counting(Tiled(Precision.kernel(BF16), Tiling(bc=bc))) for bc in (4, 8)]
    runner = Runner(Deviations(with_golden(golden)), "cpu")
    first = [float(NORMAL.inputs(seed)["q"].flatten()[0]) for seed in range(5)]
    rounded = [float(torch.tensor(x, dtype=torch.bfloat16)) for x in first]
    runner.measure(NORMAL, variants[0], baseline, seeds=2)
    runner.measure(NORMAL, variants[1], baseline, seeds=5)
    assert [variant.calls for variant in variants] == [[rounded[:2]], [rounded]]
    assert baseline.calls == [rounded[:2], rounded[2:]]
    assert golden.calls == [first[:2], rounded[:2], first[2:], rounded[2:]]


def test_so_many_replicates_as_fit_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TOGETHER", 2 * NORMAL.bytes)
    variant = Counting(Tiled(Precision.kernel(BF16)))
    told: list[tuple[int, int]] = []
    runner = Runner(Deviations(with_golden(Exact())), "cpu")
    runner.measure(NORMAL, variant, seeds=5, told=lambda done, of: told.append((done, of)))
    assert [len(call) for call in variant.calls] == [2, 2, 1]
    assert told == [(done, 5) for done in range(1, 6)]
    monkeypatch.setattr(module, "_TOGETHER", 1)
    variant.calls.clear()
    runner.measure(NORMAL, variant, seeds=3)
    assert [len(call) for call in variant.calls] == [1, 1, 1]
