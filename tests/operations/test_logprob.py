"""Log-probabilities: golden in multiprecision, gradients by its differences, the emulation by a loop, the kernels."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numdev.arithmetic.formats import BF16, FP32
from numdev.errors import BadInput
from numdev.operations.logprob import LOGPROB, Blocked, Fused, Policy, Problem, Torch, Triton


def exact(h: Tensor, w: Tensor, y: Tensor) -> dict[str, list[mpmath.mpf]]:
    """Log-probabilities and log-sum-exps in multiprecision."""
    logprobs, lses = [], []
    for row, target in zip(h.tolist(), y.tolist(), strict=True):
        logits = [mpmath.fsum(mpmath.mpf(a) * mpmath.mpf(b) for a, b in zip(row, column, strict=True)) for column in w.tolist()]
        lses.append(mpmath.log(mpmath.fsum(mpmath.exp(each) for each in logits)))
        logprobs.append(logits[int(target)] - lses[-1])
    return {"logprob": logprobs, "lse": lses}


def test_golden_and_its_gradients_are_those_of_multiprecision() -> None:
    h, w, y = Problem(3, 11, 5, 2.0).inputs(1).values()
    result = LOGPROB.exact(h, w, y).tensors()
    with mpmath.workdps(40):
        reference = exact(h, w, y)
        for name, values in reference.items():
            for i, value in enumerate(values):
                assert abs(float(result[name][i]) - value) < 60 * 2.0**-53 * 8  # 5 products, 11 exponentials of logits below 8
        step = mpmath.mpf(2) ** -40
        for name, x in (("dh", h), ("dw", w)):
            for place in ((0, 0), (2, 4)):
                sums = []
                for sign in (1, -1):
                    moved = x.clone()
                    moved[place] += sign * float(step)
                    sums.append(-mpmath.fsum(exact(moved, w, y)["logprob"] if x is h else exact(h, moved, y)["logprob"]))
                spread = mpmath.mpf(float(x[place] + float(step))) - mpmath.mpf(float(x[place] - float(step)))
                assert abs((sums[0] - sums[1]) / spread - float(result[name][place])) < 1e-12


@given(st.sampled_from(["bf16", "kernel_bf16", "eager_bf16", "fp16"]), st.sampled_from([1, 5, 16, 40]), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_the_recurrence_is_that_of_a_loop_over_tokens_and_columns(preset: str, block: int, seed: int) -> None:
    policy = Policy.parse(preset).with_step(logits="fp32@1" if preset.startswith("kernel") else "bf16@1")
    variant = Blocked(policy, block)
    h, w, y = variant.round_inputs(*Problem(2, 16, 4).inputs(seed).values())
    result = variant(h, w, y).tensors()

    def to(step: str, x: Tensor) -> Tensor:  # of FP64 scalars, whose operations on these narrow numbers are exact or innocuous
        cast = getattr(policy, step)
        return getattr(cast, "accumulate", cast)(x.reshape(1)).reshape(())

    for i in range(2):
        logits = []
        for column in w.double():
            total = torch.zeros((), dtype=torch.float64)
            for a, b in zip(h[i].double(), column, strict=True):
                total = to("logits", total + a * b)
            logits.append(to("stored", total))
        m, total = torch.tensor(-math.inf, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for start in range(0, 16, block):
            own = logits[start : start + block]
            largest = max(m, *own)
            part = to("sum", torch.stack([to("exponential", to("exponential", each - largest).exp()) for each in own]).sum())
            if start:
                factor = to("rescale", to("rescale", m - largest).exp())
                part = to("sum", to("sum", total * factor) + part)
            m, total = largest, part
        lse = to("lse", to("lse", total.log()) + m)
        assert float(result["lse"][i]) == float(lse)
        assert float(result["logprob"][i]) == float(to("output", logits[int(y[i])] - lse))


@pytest.mark.parametrize(
    "variant", [Torch(FP32), Fused(FP32), Torch(BF16, fp32_head=True), Triton(BF16), Triton(FP32, 16, 16, 16)]
)
def test_kernels_in_fp32_keep_its_bound(variant: Torch | Fused | Triton, device: str) -> None:
    h, w, y = variant.round_inputs(*Problem(20, 100, 30).inputs(0, device).values())
    result, golden = variant(h, w, y).tensors(), LOGPROB.exact(h, w, y).tensors()
    # twice a logit, of a sum of 30 products; 100 exponentials; a logarithm; the sum m + log l and the difference
    bound = 2.0**-24 * (
        2 * 31 * float((h.double().abs() @ w.double().abs().T).max()) + 104 + 2 * float(golden["lse"].abs().max())
    )
    for name in ("logprob", "lse"):
        if name in result:
            assert float((result[name].double() - golden[name]).abs().max()) <= bound
    for name in ("dh", "dw"):
        if name in result:
            torch.testing.assert_close(result[name].double(), golden[name], rtol=3 * variant.format.u, atol=float(20 * bound))


def test_gradients_change_no_bit_of_a_log_probability() -> None:
    whole, alone = Torch(BF16, upcast=True), Torch(BF16, upcast=True, gradients=False)
    inputs = whole.round_inputs(*Problem(20, 100, 30).inputs(0).values())
    results = whole(*inputs).tensors(), alone(*inputs).tensors()
    assert [*results[1]] == ["logprob", "lse"] == [*alone.formats]
    assert all(torch.equal(results[0][name], x) for name, x in results[1].items())


def test_fp64_in_blocks_is_exact_to_roundoff_with_gradients() -> None:
    inputs = Problem(6, 200, 40).inputs(0).values()
    result, golden = Blocked(Policy.golden(), 30)(*inputs).tensors(), LOGPROB.exact(*inputs).tensors()
    for name, x in golden.items():
        assert float((result[name] - x).abs().max()) < 1000 * 2.0**-53 * max(1.0, float(x.abs().max()))  # sums of 200, 40, 6


def test_targets_are_drawn_as_a_sampler_draws_and_never_rounded() -> None:
    problem = Problem(4000, 5, 3, 1.0)
    h, w, y = problem.inputs(0).values()
    shares, p = torch.bincount(y.long(), minlength=5) / 4000, (h @ w.T).softmax(-1).mean(0)
    assert float((shares - p).abs().max()) < 4 * (0.25 / 4000) ** 0.5
    large = torch.full((1,), 4097.0, dtype=torch.float64)  # which BF16 would round
    assert Torch(BF16).round_inputs(h, w, large)[2] is large


@pytest.mark.parametrize("make", [lambda: Blocked(Policy.golden(), 0), lambda: Triton(BF16, 8)])
def test_mistakes(make: object) -> None:
    assert callable(make)
    with pytest.raises(BadInput, match="variant"):
        make()
