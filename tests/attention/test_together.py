"""Replicates in one call have the outputs, counters and kernel of calls of their own, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Output
from numdev.attention.exact import Exact
from numdev.attention.fused import rule
from numdev.attention.mask import Mask
from numdev.attention.naive import Naive
from numdev.attention.path import Path, by
from numdev.attention.precision import Precision
from numdev.attention.softmax import EXPONENTIALS, Maximum, Normalise, OnlineSoftmax, SumOver
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order, Tiling
from numdev.attention.together import Limits, together
from numdev.measurement.operation import outputs_of
from tests.cases import draw

Inputs = tuple[Tensor, Tensor, Tensor]
NAMES = ("bf16", "fp16", "fp32", "fp64", "kernel_bf16", "eager_fp16", "e4m3fn", "e5m2", "tf32", "fp8", "int8")
STEPS: tuple[dict[str, Any], ...] = (
    {},
    {"row_sum": "bf16@16"},
    {"scores": "fp16@8", "values": "e8m13:toward_zero@32"},
    {"probabilities": "e4m3fn:saturate"},
    {"accumulator": "bf16:down"},
)
policies = st.builds(lambda name, steps: Precision.parse(name).with_step(**steps), st.sampled_from(NAMES), st.sampled_from(STEPS))
softmaxes = st.builds(
    OnlineSoftmax,
    normalise=st.sampled_from(Normalise),
    exp=st.sampled_from([EXPONENTIALS[name] for name in ("exp", "exp2", "exp2_fa4")]),
    rescale_threshold=st.sampled_from([0.0, 8.0]),
    p_scale=st.sampled_from([1.0, 256.0]),
    tie_shift=st.sampled_from([None, 2.0]),
    sum_over=st.sampled_from(SumOver),
    maximum=st.sampled_from(Maximum),
)
tilings = st.builds(Tiling, bc=st.sampled_from([5, 16, 64]), order=st.sampled_from(Order), splits=st.integers(1, 2))


def bits(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.contiguous().view(torch.int64 if x.dtype is torch.float64 else torch.int32)


def check(attend: Exact | Naive | Tiled, replicates: list[Inputs], mask: Mask) -> None:
    """The same replicates together and one by one."""
    found, expected = attend.together(replicates, mask, 0.3), [attend(*inputs, mask, 0.3) for inputs in replicates]
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(bits(ours.out), bits(theirs.out))
        assert torch.equal(bits(ours.lse), bits(theirs.lse))
        assert (ours.counters, ours.launch) == (theirs.counters, theirs.launch)


def replicates_of(sizes: tuple[int, ...], count: int) -> list[Inputs]:
    """With other spreads, so that the replicates differ in what they count."""
    return [draw(sizes, seed, (0.3, 1.0, 6.0)[seed % 3]) for seed in range(count)]  # type: ignore[arg-type]


@given(st.data(), policies, softmaxes, tilings)
@settings(max_examples=15, deadline=None)
def test_tiled(data: st.DataObject, policy: Precision, softmax: OnlineSoftmax, tiling: Tiling) -> None:
    sizes, mask, count = data.draw(problems())
    tiled = Tiled(policy, tiling, softmax)
    check(tiled, [tiled.round_inputs(*inputs) for inputs in replicates_of(sizes, count)], mask)


@given(st.data(), policies, st.sampled_from(Normalise))
@settings(max_examples=15, deadline=None)
def test_naive_and_exact(data: st.DataObject, policy: Precision, normalise: Normalise) -> None:
    sizes, mask, count = data.draw(problems())
    naive, replicates = Naive(policy, normalise), replicates_of(sizes, count)
    check(naive, [naive.round_inputs(*inputs) for inputs in replicates], mask)
    check(Exact(), replicates, mask)


@st.composite
def problems(draw_from: st.DrawFn) -> tuple[tuple[int, ...], Mask, int]:
    """Sizes, a mask, which may have a length for each entry of the batch, and a number of replicates."""
    batch, kv_heads, group = (draw_from(st.integers(1, 2)) for _ in range(3))
    queries, keys = draw_from(st.integers(1, 70)), draw_from(st.integers(1, 90))
    lengths = draw_from(st.none() | st.tuples(*[st.integers(0, keys)] * batch))
    mask = Mask(draw_from(st.booleans()), draw_from(st.none() | st.integers(1, keys)), lengths)
    return (batch, kv_heads * group, kv_heads, queries, keys, 8), mask, draw_from(st.integers(1, 5))


@pytest.mark.parametrize("name", ["bf16", "fp32", "kernel_bf16"])
def test_at_the_lengths_of_studies(name: str) -> None:
    """17 replicates of N = 256 are two stacks of tiled attention; golden and naive attention take one at a time."""
    tiled, naive = Tiled(Precision.parse(name)), Naive(Precision.parse(name))
    replicates = [tiled.round_inputs(*draw((1, 1, 1, 256, 256, 64), seed)) for seed in range(17)]
    for attend in (tiled, naive, Exact()):
        check(attend, replicates, Mask())


def stacks(replicates: list[Inputs], limits: Limits) -> list[int]:
    """How many replicates each call has."""
    found: list[int] = []

    def stack(inputs: tuple[Tensor, ...], mask: Mask, count: int) -> list[Output]:
        found.append(count)
        assert len(inputs[0]) == count * len(replicates[0][0])
        return [Output(q, None) for q in inputs[0].chunk(count)]

    outputs = together(Exact(), replicates, Mask(), limits, stack)
    assert all(torch.equal(output.out, inputs[0]) for output, inputs in zip(outputs, replicates, strict=True))
    return found


def test_a_stack_has_so_many_scores() -> None:
    replicates, scores = replicates_of((1, 2, 1, 4, 8, 8), 5), 2 * 4 * 8
    assert stacks(replicates, Limits(scores, 2 * scores)) == [2, 2, 1]
    assert stacks(replicates, Limits(scores, 2 * scores - 1)) == [1] * 5
    assert stacks(replicates, Limits(scores, 1 << 20)) == [5]
    assert stacks(replicates, Limits(scores - 1, 1 << 20)) == [1] * 5
    assert stacks(replicates, Limits(scores // 2, 1 << 20, keys=4)) == [5]
    assert stacks(replicates, Limits(scores, 0)) == [1] * 5


def test_what_is_not_stacked() -> None:
    replicates, limits = replicates_of((1, 2, 1, 4, 8, 8), 3), Limits(1 << 20, 1 << 20)
    assert stacks([*replicates[:2], replicates_of((1, 2, 1, 5, 8, 8), 1)[0]], limits) == [1] * 3
    replicates[1][2][0, 0, 3, 1] = torch.inf
    assert stacks(replicates, limits) == [1] * 3


def test_stochastic_rounding_draws_as_one_by_one() -> None:
    policy = Precision.throughout(Cast.parse("bf16:stochastic:seed=3"))
    for attend in (Tiled(policy), Naive(policy)):
        check(attend, [attend.round_inputs(*inputs) for inputs in replicates_of((1, 2, 1, 20, 20, 8), 3)], Mask())


def test_runs_of_compiled_passes_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tiled = Tiled(Precision.parse("bf16"), Tiling(16, 16))
    replicates = [tiled.round_inputs(*inputs) for inputs in replicates_of((1, 2, 1, 20, 20, 8), 3)]
    with by(Path.COMPILED):
        check(tiled, replicates, Mask())
    monkeypatch.setattr(rule, "_FEWEST_SCORES", 2 * 20 * 20 * 2)  # two replicates would be compiled together, one is not
    check(tiled, replicates, Mask(causal=True))


class Shifted(Tiled):
    """A call of its own, which does not promise to stack."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        found = super().__call__(q, k, v, mask, scale)
        return replace(found, out=found.out + len(q))


def test_a_subclass_with_another_call_is_called_one_by_one() -> None:
    replicates, arguments = replicates_of((1, 2, 1, 20, 20, 8), 3), {"mask": Mask(), "scale": 1.0}
    shifted = Shifted(Precision.parse("fp64"))
    for ours, inputs in zip(outputs_of([shifted] * 3, replicates, arguments), replicates, strict=True):
        assert torch.equal(ours.tensors()["out"], shifted(*inputs, Mask(), 1.0).out)
