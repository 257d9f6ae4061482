"""The router: golden by NumPy, sums in exact rationals, ties, and flips against an independent simulation of lattices."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.arithmetic.formats import BF16
from numdev.arithmetic.rounding import Overflow, Rounding
from numdev.errors import BadInput, Unsupported
from numdev.operations.router import ROUTER, Eager, Expected, Policy, Problem, Routed, Score, Triton, _flips, chosen
from tests.oracles.table import round_exactly


@pytest.mark.parametrize("score", Score)
def test_golden_is_numpys(score: Score) -> None:
    inputs = Problem(50, 16, 3, 20).inputs(2)
    result = ROUTER.exact(*inputs.values(), k=3, score=score).tensors()
    logits = inputs["x"].numpy() @ inputs["w"].numpy().T
    scores = scipy.special.softmax(logits, -1) if score is Score.SOFTMAX else scipy.special.expit(logits)
    mask = (logits >= np.sort(logits, -1)[:, -3:-2]).astype(float)
    np.testing.assert_array_equal(result["experts"], mask)
    weights = scores * mask / (scores * mask).sum(-1, keepdims=True)
    np.testing.assert_allclose(result["weights"], weights, rtol=1e-13)  # errors of the logits, of 20 u |x| |w|, twice


@given(st.lists(st.integers(0, 3), min_size=5, max_size=12), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_of_equal_scores_the_first_is_chosen(scores: list[int], k: int) -> None:
    expected = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
    mask = chosen(torch.tensor([scores], dtype=torch.float64), k)
    assert mask[0].nonzero().flatten().tolist() == sorted(expected)


@given(st.sampled_from(["bf16", "e5m2", "e4m3fn"]), st.sampled_from([1, 3]), st.integers(0, 50))
@settings(max_examples=20, deadline=None)
def test_sums_of_logits_are_rounded_as_exact_rationals_are(fmt: str, every: int, seed: int) -> None:
    policy = Policy.kernel(BF16).with_step(logits=f"{fmt}@{every}", stored=fmt)
    x, w = Routed(policy).round_inputs(*Problem(2, 3, 1, 7).inputs(seed).values())
    logits = Routed(policy)(x, w, k=1, score=Score.SOFTMAX).tensors()["logits"]
    to = policy.stored.to

    def once(value: Fraction) -> Fraction:
        return Fraction(round_exactly(value, to, Rounding.NEAREST_EVEN, Overflow.INFINITY))

    for i, row in enumerate(x.tolist()):
        for j, column in enumerate(w.tolist()):
            products = [Fraction(a) * Fraction(b) for a, b in zip(row, column, strict=True)]
            total = once(sum(products[:every], Fraction(0)))
            for start in range(every, 7, every):
                total = once(total + sum(products[start : start + every], Fraction(0)))
            assert logits[i, j] == float(total)


@pytest.mark.parametrize("lattices", [[0.5], [0.1, 0.3], [0.3, 0.1], [0.2, 0.2]])
def test_flips_are_those_of_pairs_on_lattices_of_random_phase(lattices: list[float]) -> None:
    rng, pairs = np.random.default_rng(0), 200_000
    for distance in (-0.2, 0.0, 0.05, 0.12, 0.35):
        upper, lower = np.full(pairs, distance), np.zeros(pairs)
        for h in lattices:
            phase = rng.random(pairs) * h
            upper, lower = (np.floor((each + phase) / h + 0.5) * h for each in (upper, lower))
        rate = (upper < lower - 1e-9).mean() + (np.abs(upper - lower) <= 1e-9).mean() / 2
        p = float(_flips(torch.tensor([distance], dtype=torch.float64), [torch.tensor([h]).double() for h in lattices]))
        assert abs(p - rate) < 5 * (0.25 / pairs) ** 0.5, (distance, lattices)


@pytest.mark.parametrize(
    ("preset", "score"), [("kernel_bf16", Score.SOFTMAX), pytest.param("eager_bf16", Score.SIGMOID, marks=pytest.mark.slow)]
)
def test_expected_flips_are_those_of_tensors_in_bf16(preset: str, score: Score) -> None:
    """Measured by torch's own conversions: none of it goes through a Cast."""
    problem, changed, expected = Problem(8192, 64, 8, 128), 0.0, 0.0
    for seed in range(3):
        x, w = problem.inputs(seed).values()
        logits = (x.float().bfloat16().double() @ w.float().bfloat16().double().T).float().bfloat16()
        scores = logits if score is Score.SOFTMAX else logits.float().sigmoid().bfloat16()
        golden = chosen(x @ w.T, 8)
        changed += float((chosen(scores.double(), 8) - golden).abs().sum())
        mask = Expected(Policy.parse(preset))(x, w, k=8, score=score).tensors()["experts"]
        assert torch.equal(mask.sum(-1).round(), torch.full((8192,), 8.0, dtype=torch.float64))
        expected += float((mask - golden).abs().sum())
    assert changed > 1000  # so that three standard deviations are 10 %
    assert abs(changed / expected - 1) < 0.1


@pytest.mark.parametrize("score", Score)
def test_the_kernel_computes_in_fp32(score: Score, device: str) -> None:
    variant, problem = Triton(BF16, 32), Problem(16, 10, 3, 40)
    x, w = variant.round_inputs(*problem.inputs(0, device).values())
    result, exact = variant(x, w, k=3, score=score).tensors(), ROUTER.exact(x, w, k=3, score=score).tensors()
    bound = 41 * 2.0**-24 * (x.double().abs() @ w.double().abs().T)  # a sum of 40 products, each rounded
    assert bool(((result["logits"].double() - exact["logits"]).abs() <= bound).all())
    assert torch.equal(result["experts"].double(), exact["experts"])  # gaps of normal logits are larger
    torch.testing.assert_close(result["weights"].double(), exact["weights"], rtol=2.0**-8 + 1e-4, atol=0)


def test_mistakes() -> None:
    with pytest.raises(BadInput, match="problem.k: 4 cannot be used; there are 4 experts"):
        Problem(experts=4, k=4)
    x, w = Problem(4, 8, 2, 32).inputs(0).values()
    with pytest.raises(Unsupported, match="precision.logits"):
        Expected(Policy.kernel(BF16).with_step(logits="hopper"))(x, w, k=2, score=Score.SOFTMAX)
    assert Eager(upcast=True).precision.inputs.to == BF16
