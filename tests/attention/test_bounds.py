"""Two runs of one policy, by tensor operations and by the kernel, within the bound of one error analysis."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from numdev.attention.exact import Exact
from numdev.attention.instrumented import Instrumented
from numdev.attention.mask import Mask
from numdev.attention.path import Path, by
from numdev.attention.precision import Precision
from numdev.attention.softmax import Exponential, OnlineSoftmax
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order, Tiling
from tests.attention.bounds import bound
from tests.cases import Sizes, draw, on

DOTS = ("fp32", "fp16", "bf16", "tf32", "fp16@8", "bf16@16", "tf32:toward_zero@8")
CASTS = ("fp32", "fp32", "fp16", "bf16", "tf32", "bf16:toward_zero", "e5m10:flush")
STEPS = {"scores": DOTS, "row_sum": DOTS, "values": DOTS, "exponential": CASTS, "rescale": CASTS, "accumulator": CASTS}


def policy_of(seed: int) -> Precision:
    """Steps drawn one by one; inputs, P and output in a narrow format."""
    drawn = random.Random(seed)
    steps = {name: drawn.choice(formats) for name, formats in STEPS.items()}
    steps |= {name: drawn.choice(("fp16", "bf16", "tf32", "e4m3fn")) for name in ("inputs", "probabilities", "output")}
    return Precision.parse("fp32").with_step(**steps)


def case(seed: int) -> tuple[Precision, Tiling, OnlineSoftmax, Mask]:
    drawn = random.Random(-1 - seed)
    tiling = Tiling(16, drawn.choice((16, 20, 32)), drawn.choice((Order.FORWARD, Order.REVERSE)))
    softmax = OnlineSoftmax(exp=drawn.choice((Exponential.EXP, Exponential.EXP2)))
    return policy_of(seed), tiling, softmax, drawn.choice((Mask(), Mask(causal=True), Mask(causal=True, window=19)))


def both(seed: int, sizes: Sizes, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """The outputs of the kernel and of tensor operations, the exact one, the bound, and the largest |v|."""
    policy, tiling, softmax, mask = case(seed)
    q, k, v = on(device, policy.round_inputs(*draw(sizes, seed, 0.5)))
    scale = q.shape[-1] ** -0.5
    kernel = Instrumented(policy, tiling, softmax)(q, k, v, mask, scale).out
    with by(Path.TENSORS):
        tensors = Tiled(policy, tiling, softmax, count=False)(q, k, v, mask, scale).out
    exact, e = bound(policy, tiling, softmax, (q, k, v), mask, scale)
    assert torch.allclose(exact, Exact()(q, k, v, mask, scale).out, rtol=0, atol=1e-12)
    return kernel.double(), tensors.double(), exact, e, float(v.abs().max())


def check(seed: int, sizes: Sizes, device: str) -> bool:
    """Both within the bound; whether the bound of some element says something."""
    kernel, tensors, exact, e, largest = both(seed, sizes, device)
    for found in (kernel, tensors):
        assert bool(((found - exact).abs() <= e).all())
    assert bool(((kernel - tensors).abs() <= 2 * e).all())
    return float(e.min()) < largest


@pytest.mark.parametrize("seed", range(4))
def test_both_are_within_the_bound(seed: int, device: str) -> None:
    assert check(seed, (1, 1, 1, 30, 48, 16), device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sizes", [(1, 2, 2, 200, 200, 64), (2, 2, 2, 1000, 1000, 128)])
def test_both_are_within_the_bound_on_a_gpu(sizes: Sizes) -> None:
    assert sum(check(seed, sizes, "cuda") for seed in range(12)) > 0


def test_a_step_that_rounds_more_is_beyond_the_bound() -> None:
    """The bound of FP16's steps does not hold for a run whose accumulator, row sum or P is coarser."""
    policy, tiling, softmax, mask = Precision.parse("kernel_fp16"), Tiling(16, 16), OnlineSoftmax(), Mask()
    q, k, v = policy.round_inputs(*draw((1, 2, 2, 40, 48, 16), 0, 0.5))
    exact, e = bound(policy, tiling, softmax, (q, k, v), mask, 0.25)
    for step in ("scores", "exponential", "row_sum", "probabilities", "values", "accumulator", "output"):
        coarse = Tiled(policy.with_step(**{step: "e5m2"}), tiling, softmax, count=False)(q, k, v, mask, 0.25).out
        assert bool(((coarse - exact).abs() > e).any()), step


@pytest.mark.parametrize("name", ["bf16", "e4m3fn"])
def test_over_many_tiles_a_narrow_format_has_a_bound_that_says_nothing(name: str) -> None:
    """Which is why the rule does not ask for it."""
    policy = Precision.parse(name)
    q, k, v = policy.round_inputs(*(torch.rand(1, 1, n, 64) for n in (1, 8192, 8192)))
    _, e = bound(policy, Tiling(64, 64), OnlineSoftmax(), (q, k, v), Mask(), 0.125)
    assert float(e.min()) > float(v.abs().max())
