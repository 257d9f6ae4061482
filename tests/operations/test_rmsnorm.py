"""RMSNorm: golden in multiprecision, every rounding of the emulation in exact rationals, and the kernels' error."""

from __future__ import annotations

from fractions import Fraction

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.arithmetic.formats import BF16, FP32, Format
from numdev.arithmetic.rounding import Overflow, Rounding
from numdev.errors import BadInput
from numdev.operations.base import Entries
from numdev.operations.rmsnorm import RMSNORM, Blocked, Eager, Policy, Problem, Torch, Triton
from tests.oracles.table import round_exactly


def test_golden_is_that_of_multiprecision() -> None:
    problem = Problem(3, 17, kind=Entries.OUTLIERS)
    inputs = problem.inputs(1)
    y = RMSNORM.exact(**inputs, **problem.arguments()).tensors()["y"]
    with mpmath.workdps(40):
        for i, row in enumerate(inputs["x"].tolist()):
            rms = mpmath.sqrt(mpmath.fsum(mpmath.mpf(x) ** 2 for x in row) / 17 + mpmath.mpf(problem.eps))
            for j, x in enumerate(row):
                exact = mpmath.mpf(x) / rms * mpmath.mpf(float(inputs["w"][j]))
                assert abs(float(y[i, j]) - exact) <= 16 * 2.0**-53 * abs(exact)  # 17 sums, halved by the root; 4 roundings


@given(st.sampled_from(["bf16", "kernel_bf16", "e5m2", "kernel_fp16"]), st.integers(1, 9), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_every_rounding_is_that_of_exact_rationals(preset: str, block: int, seed: int) -> None:
    policy, problem = Policy.parse(preset), Problem(2, 9)
    variant = Blocked(policy, block)
    x, w = variant.round_inputs(*problem.inputs(seed).values())
    result = variant(x, w, **problem.arguments()).tensors()["y"]

    def once(value: Fraction | float, step: str) -> Fraction:
        fmt = getattr(getattr(policy, step), "accumulate", getattr(policy, step)).to
        return Fraction(round_exactly(value, fmt, Rounding.NEAREST_EVEN, Overflow.INFINITY))

    for row, out in zip(x.tolist(), result.tolist(), strict=True):
        squares = [once(Fraction(each) ** 2, "square") for each in row]
        total = Fraction(0)
        for start in range(0, 9, block):
            part = sum(squares[start : start + block], Fraction(0))  # exact in FP64: 9 numbers of at most 24 bits of like size
            total = once(total + once(part, "sum"), "sum")
        mean = once(once(total / 9, "mean") + Fraction(problem.eps), "mean")
        r = once(float(torch.tensor(float(mean), dtype=torch.float64).rsqrt()), "rsqrt")
        ys = [once(once(Fraction(a) * r, "normalise") * Fraction(b), "weigh") for a, b in zip(row, w.tolist(), strict=True)]
        assert out == [float(once(y, "output")) for y in ys]


@pytest.mark.parametrize("variant", [Torch(BF16), Triton(BF16, 16), Torch(FP32), Triton(FP32, 128)])
def test_kernels_are_fp32_inside(variant: Torch | Triton, device: str) -> None:
    problem = Problem(8, 300)
    x, w = variant.round_inputs(*problem.inputs(0, device).values())
    y = variant(x, w, eps=problem.eps).tensors()["y"].double()
    exact = RMSNORM.exact(x, w, **problem.arguments()).tensors()["y"]
    inner = (300 / 2 + 4) * 2.0**-24  # relative: a sum of 300 squares under a root, a mean, a root and two products
    u = {BF16: 2.0**-8, FP32: 2.0**-24}[variant.format]  # of the last rounding
    assert bool(((y - exact).abs() <= (inner + u) * exact.abs() * 1.01).all())


@pytest.mark.parametrize(("make", "error"), [
    (lambda: Triton(BF16, 24), "variant.block: 24 cannot be used; give a power of two"),
    (lambda: Eager(Format.parse("e5m2")), "variant.format: 'e5m2' cannot be used; give one of fp64"),
    (lambda: Blocked(Policy.parse("bf16"), 0), "variant.block: 0"),
    (lambda: Problem(0), "problem.rows: 0 cannot be used; give a whole number of at least 1"),
])  # fmt: skip
def test_mistakes(make: object, error: str) -> None:
    assert callable(make)
    with pytest.raises(BadInput, match=error.replace("(", r"\(")):
        make()
