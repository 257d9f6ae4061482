"""The scan: golden by NumPy, tokens in exact rationals, chunks against tokens, every kernel within its bound."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.arithmetic.formats import BF16, FP32, Format
from numdev.arithmetic.rounding import Overflow, Rounding
from numdev.errors import BadInput, Unsupported
from numdev.operations.scan import SCAN, Chunked, Eager, Fla, Policy, Problem, Recurrent, Rule, Triton
from tests.oracles.table import round_exactly

RULES = pytest.mark.parametrize("rule", Rule)


def matrices(problem: Problem, seed: int) -> list[np.ndarray]:
    """o of each head as one product with matrices: S_t = sum_j M_t .. M_{j+1} beta_j k_j v_j^T."""
    q, k, v, g, beta = (x.numpy() for x in problem.inputs(seed).values())
    heads = []
    for h in range(problem.heads):
        steps = [np.eye(problem.key) * math.exp(g[h, t]) for t in range(problem.n)]
        if problem.rule is Rule.DELTA:
            steps = [m @ (np.eye(problem.key) - beta[h, t] * np.outer(k[h, t], k[h, t])) for t, m in enumerate(steps)]
        rows = []
        for t in range(problem.n):
            row, left = np.zeros(problem.value), q[h, t]
            for j in range(t, -1, -1):
                row = row + left @ k[h, j] * beta[h, j] * v[h, j]
                left = left @ steps[j]
            rows.append(row)
        heads.append(np.stack(rows))
    return heads


@RULES
def test_golden_is_the_sum_over_earlier_tokens(rule: Rule) -> None:
    problem = Problem(2, 20, 5, 3, rule, decay=0.1)
    o = SCAN.exact(*problem.inputs(1).values(), rule=rule).tensors()["o"]
    for own, expected in zip(o.numpy(), matrices(problem, 1), strict=True):
        np.testing.assert_allclose(own, expected, atol=20 * 20 * 2.0**-53 * 8)  # 20 tokens of 20 products of numbers below 8


@RULES
@given(st.sampled_from(["bf16", "fp16", "e8m3"]), st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_tokens_are_rounded_as_exact_rationals_are(rule: Rule, fmt: str, seed: int) -> None:
    policy = Policy.uniform(Format.parse(fmt)).with_step(**dict.fromkeys(("scores", "values"), f"{fmt}@1"))
    variant, to = Recurrent(policy), Format.parse(fmt)
    q, k, v, g, beta = variant.round_inputs(*Problem(1, 5, 3, 2, rule, decay=0.3).inputs(seed).values())
    o = variant(q, k, v, g, beta, rule=rule).tensors()["o"]

    def once(value: Fraction | float) -> Fraction:
        return Fraction(round_exactly(value, to, Rounding.NEAREST_EVEN, Overflow.INFINITY))

    def dot(a: list[float], b: list[Fraction]) -> Fraction:
        total = Fraction(0)
        for x, y in zip(a, b, strict=True):
            total = once(total + Fraction(x) * y)
        return total

    state = [[Fraction(0)] * 2 for _ in range(3)]
    for t in range(5):
        a = once(float(torch.tensor(float(g[0, t]), dtype=torch.float64).exp()))
        state = [[once(a * x) for x in row] for row in state]
        for j in range(2):
            fresh = Fraction(float(v[0, t, j]))
            if rule is Rule.DELTA:
                fresh = once(fresh - dot(k[0, t].tolist(), [row[j] for row in state]))
            fresh = once(fresh * Fraction(float(beta[0, t])))
            for i in range(3):
                state[i][j] = once(state[i][j] + once(Fraction(float(k[0, t, i])) * fresh))
        assert o[0, t].tolist() == [float(dot(q[0, t].tolist(), [row[j] for row in state])) for j in range(2)]


@RULES
@given(st.sampled_from([1, 3, 16, 64]), st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_chunks_in_fp64_are_tokens(rule: Rule, chunk: int, seed: int) -> None:
    problem = Problem(2, 40, 8, 6, rule, decay=0.05)
    inputs = problem.inputs(seed).values()
    golden, chunks = (run(*inputs, rule=rule).tensors() for run in (SCAN.exact, Chunked(Policy.golden(), chunk)))
    for name, x in golden.items():
        # |T| <= 2^C in the worst case; of random unit rows of 8 entries, substitution in 64 tokens loses less than 10 bits
        torch.testing.assert_close(chunks[name], x, rtol=0, atol=2.0**-53 * 40 * 2**10)


@RULES
def test_the_error_of_chunks_falls_as_two_to_the_mantissa_bits(rule: Rule) -> None:
    problem = Problem(2, 64, 16, 16, rule)
    bits, errors = [8, 12, 16, 20], []
    for m in bits:
        variant = Chunked(Policy.uniform(Format.parse(f"e11m{m}")), 16)
        inputs = variant.round_inputs(*problem.inputs(0).values())
        exact = SCAN.exact(*inputs, rule=rule).tensors()["o"]
        errors.append(math.log2(float((variant(*inputs, rule=rule).tensors()["o"] - exact).square().mean().sqrt())))
    assert abs(np.polyfit(bits, errors, 1)[0] + 1) < 0.1


@RULES
@pytest.mark.parametrize("variant", [Triton(FP32), Triton(BF16), Eager(FP32)])
def test_kernels_carry_their_state_in_fp32(rule: Rule, variant: Triton | Eager, device: str) -> None:
    problem = Problem(2, 40, 20, 18, rule)
    inputs = variant.round_inputs(*problem.inputs(0, device).values())
    result, exact = variant(*inputs, rule=rule).tensors(), SCAN.exact(*inputs, rule=rule).tensors()
    bound = 40 * 26 * 2.0**-24 * 2 * float(exact["state"].abs().max() + 5)  # 40 tokens of 20 products, 6 further roundings
    assert float((result["state"].double() - exact["state"]).abs().max()) <= bound
    torch.testing.assert_close(result["o"].double(), exact["o"], rtol=2 * variant.format.u, atol=bound)


def test_kernels_of_others_and_mistakes_are_refused() -> None:
    inputs = Fla().round_inputs(*Problem(1, 4, 4, 4).inputs(0).values())
    with pytest.raises(Unsupported, match="not installed|need a GPU"):
        Fla()(*inputs, rule=Rule.DELTA)
    for make in (lambda: Chunked(Policy.golden(), 0), lambda: Triton(BF16, 3), lambda: Fla(FP32)):
        with pytest.raises(BadInput, match="variant"):
            make()
